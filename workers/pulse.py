"""A rank's sign of life: a thread that tells the supervisor several times a second that it runs, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

from novainfer.protocol.supervision import SUPERVISOR_SCHEMA, RankPulse
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import connect_push

PULSE_INTERVAL = 0.25  # seconds


class Pulse:
    """Tells what the rank's main thread writes into the public fields; has a socket of its own."""

    def __init__(self, context: zmq.Context[Any], supervisor: Endpoint | None, rank: int, epoch: int) -> None:
        """supervisor: None = nobody listens, and no thread is needed."""
        self.is_busy = True  # it loads
        self.num_blocks = 0  # until it is ready
        self.fingerprint = ""
        self.progress: Callable[[], int] = int
        self._context = context
        self._supervisor = supervisor
        self._rank, self._epoch = rank, epoch
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        if self._supervisor is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._supervisor is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._supervisor is not None
        socket = connect_push(self._context, self._supervisor)
        socket.set(zmq.LINGER, 0)
        while not self._is_over.wait(PULSE_INTERVAL):
            pulse = RankPulse(self._rank, self._epoch, self.is_busy, self.progress(), self.num_blocks, self.fingerprint)
            socket.send(SUPERVISOR_SCHEMA.encode(pulse))
        socket.close()
