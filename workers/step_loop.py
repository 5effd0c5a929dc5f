"""The life of one rank as a process: load, say hello, run plans, report faults, exit.

Whoever starts the process (a Ray actor, a test) calls `run_rank`. The scheduler is at the other end of a ZeroMQ DEALER;
the supervisor hears about start, progress, readiness and faults over a one-way PUSH socket.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import zmq

from novainfer.errors import PeerLostError, words_of
from novainfer.executor.rank import RankSession
from novainfer.protocol.step import WORKER_SCHEMA, StepPlan, WorkerFault
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    ROLE_WORKER,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
)
from novainfer.transport.channel import connect_dealer, connect_push
from workers.fingerprint import StrangeRankError, check_fingerprint
from workers.launch import RankLaunch, RankPlace
from workers.pulse import Pulse
from workers.rank_log import RankLog
from workers.weight_file import BesideSteps
from workers.worker import Pending, Worker

logger = logging.getLogger(__name__)

HELLO_INTERVAL_MS = 100  # so soon a new scheduler learns of an idle rank
_LAST_WORD_LINGER_MS = 1000
_MEMORY_SECONDS = 0.8  # for the KV cache's memory, before a server is ready


def run_rank(launch: RankLaunch, worker: Worker | None = None) -> None:
    """Live as one rank until the scheduler says Shutdown. Raises what made it fail, after telling both peers.

    worker: what `Worker.build` has made for this place already, in whatever epoch; None: build it.
    """
    place = launch.place
    with (
        zmq.Context() as context,
        Reports(context, launch) as reports,
        Pulse(context, launch.supervisor, place.rank, place.epoch) as pulse,
        RankLog(context, launch.supervisor, place.rank, place.epoch),
    ):
        socket = connect_dealer(context, launch.scheduler, f"rank-{place.rank}-{place.epoch}".encode())
        try:
            reports.send(ChildStarted(ROLE_WORKER, place.rank, os.getpid(), epoch=place.epoch))
            if worker is None:
                worker = Worker.build(launch.config, place, reports.progress)
            check_fingerprint(worker.fingerprint, place.known)
            runner = worker.runner
            pulse.progress = lambda: runner.progress
            loop = StepLoop(worker, place, socket, pulse)
            # Who waits for a rank that takes another one's place has waited long enough.
            is_first = place.epoch == FIRST_EPOCH
            worker.take_cache_memory(launch.config, _MEMORY_SECONDS if is_first else 0.0)
            ready = ChildReady(ROLE_WORKER, place.rank, place.epoch, worker.info.num_blocks, worker.fingerprint)
            reports.send(ready)
            pulse.fingerprint, pulse.num_blocks = worker.fingerprint, worker.info.num_blocks
            loop.run()
            worker.tp.close()
        except Exception as error:
            logger.exception("rank %d cannot go on", place.rank)
            message = words_of(error)
            peer_lost = isinstance(error, PeerLostError)
            strange = error.fingerprint if isinstance(error, StrangeRankError) else ""
            with suppress(PeerLostError):
                reports.send(ChildFault(ROLE_WORKER, place.rank, place.epoch, message, peer_lost, strange))
            with suppress(PeerLostError):
                _send(socket, WORKER_SCHEMA.encode(WorkerFault(place.epoch, place.rank, message)))
            raise
        finally:
            socket.close(linger=_LAST_WORD_LINGER_MS)


class StepLoop:
    """Feeds a `RankSession` from the socket, runs its steps, and sends rank 0's results in the order of the plans."""

    def __init__(self, worker: Worker, place: RankPlace, socket: zmq.Socket[bytes], pulse: Pulse) -> None:
        self._worker = worker
        self._socket = socket
        self._pulse = pulse
        info = replace(worker.info, epoch=place.epoch)
        self._session = RankSession(self, self._send, rank=place.rank, world_size=place.world_size, info=info)
        self._pending: deque[Pending] = deque()  # launched, not finished; rank 0 only
        self._beside_steps = BesideSteps(worker.write_weights, place.world_size)

    def run(self) -> None:
        """Until Shutdown. Raises `EngineError` for a plan out of order, and whatever a step raises."""
        self._session.say_hello()
        while True:
            self._pulse.is_busy = bool(self._pending)
            if self._pending and not self._may_launch_more():
                self._finish_oldest()
                continue
            self._beside_steps.turn()  # here rank 0 has sent its result: the scheduler plans meanwhile
            if not self._socket.poll(HELLO_INTERVAL_MS):
                self._session.say_hello()
                self._use_idle_time()
                continue
            message = WORKER_SCHEMA.decode(self._socket.recv())
            self._pulse.is_busy = True
            if not self._session.handle(message):
                break
        self._finish_all()

    def _use_idle_time(self) -> None:
        """Until a message comes, or it is time for the next hello."""
        until = time.monotonic() + HELLO_INTERVAL_MS / 1000
        while self._worker.use_idle_time() and not self._socket.poll(0) and time.monotonic() < until:
            pass

    def launch(self, plan: StepPlan) -> None:
        """See `Steps`."""
        pending = self._worker.runner.launch(plan)
        if pending is not None:
            self._pending.append(pending)

    def drop_rows(self) -> None:
        """See `Steps`."""
        self._finish_all()
        self._worker.runner.drop_rows()

    def _may_launch_more(self) -> bool:
        return len(self._pending) < self._worker.max_launched and bool(self._socket.poll(0))

    def _finish_all(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._send(self._pending.popleft().finish())

    def _send(self, message: object) -> None:
        _send(self._socket, WORKER_SCHEMA.encode(message))


def _send(socket: zmq.Socket[bytes], data: bytes) -> None:
    """Raises `PeerLostError` where it would block for ever: ZeroMQ gives a connection up when a broken frame comes."""
    try:
        socket.send(data, zmq.NOBLOCK)
    except zmq.Again:
        raise PeerLostError("a broken frame has ended the connection") from None


class Reports:
    """The one-way line to the supervisor, or to nobody."""

    def __init__(self, context: zmq.Context[Any], launch: RankLaunch) -> None:
        self._rank = launch.place.rank
        self._socket = None if launch.supervisor is None else connect_push(context, launch.supervisor)

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()

    def send(self, message: object) -> None:
        """Queue one record of SUPERVISOR_SCHEMA."""
        if self._socket is not None:
            _send(self._socket, SUPERVISOR_SCHEMA.encode(message))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report how far loading is."""
        self.send(LoadProgress(self._rank, stage, done, total))
