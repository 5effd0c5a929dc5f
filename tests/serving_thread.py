"""What plays a scheduler for gateways over real ZeroMQ: a thread with its socket."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import bind_router

IDLE_MS = 5


class ServingThread(ABC):
    """Subclasses say what a turn is; `_start` is the last word of their constructor."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(self._context, endpoint)
        self._stop = False
        self._turned = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    def _start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Go away without a word, as a killed process does."""
        self._stop = True
        self._thread.join()
        self._socket.close()
        self._context.term()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Block until `condition` holds after a turn."""
        with self._turned:
            assert self._turned.wait_for(condition, timeout), f"{type(self).__name__} never came to that state"

    @abstractmethod
    def _turn(self) -> bool:
        """Do what can be done now; whether anything was."""

    def _run(self) -> None:
        while not self._stop:
            moved = self._turn()
            with self._turned:
                self._turned.notify_all()
            if not moved:
                self._socket.poll(IDLE_MS)
