"""The life of one rank as a process: load, say hello, run plans, report faults, exit.

Whoever starts the process (a Ray actor, a test) calls `run_rank`. The scheduler is at the other end of a ZeroMQ DEALER;
the supervisor hears about start, progress, readiness and faults over a one-way PUSH socket.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from types import TracebackType
from typing import Any

import zmq

from novainfer.errors import EngineError
from novainfer.protocol.step import WORKER_SCHEMA, Shutdown, StepPlan, WorkerFault, WorkerHello
from novainfer.protocol.supervision import (
    ROLE_WORKER,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
)
from novainfer.transport.channel import connect_dealer, connect_push
from workers.launch import RankLaunch, RankPlace
from workers.model_runner import PendingStep
from workers.worker import Worker

logger = logging.getLogger(__name__)

_LAST_WORD_LINGER_MS = 1000


def run_rank(launch: RankLaunch) -> None:
    """Live as one rank until the scheduler says Shutdown. Raises what made it fail, after telling both peers."""
    place = launch.place
    with zmq.Context() as context, Reports(context, launch) as reports:
        socket = connect_dealer(context, launch.scheduler, f"rank-{place.rank}-{place.epoch}".encode())
        try:
            reports.send(ChildStarted(ROLE_WORKER, place.rank, os.getpid()))
            worker = Worker.build(launch.config, place, reports.progress)
            socket.send(WORKER_SCHEMA.encode(_hello(worker, place)))
            reports.send(ChildReady(ROLE_WORKER, place.rank))
            StepLoop(worker, socket).run()
            worker.tp.close()
        except Exception as error:
            logger.exception("rank %d cannot go on", place.rank)
            message = f"{type(error).__name__}: {error}"
            socket.send(WORKER_SCHEMA.encode(WorkerFault(place.epoch, place.rank, message)))
            reports.send(ChildFault(ROLE_WORKER, place.rank, place.epoch, message))
            raise
        finally:
            socket.close(linger=_LAST_WORD_LINGER_MS)


class StepLoop:
    """Receives plans in order, runs each once, and sends rank 0's results in the same order."""

    def __init__(self, worker: Worker, socket: zmq.Socket[bytes]) -> None:
        self._worker = worker
        self._socket = socket
        self._epoch = worker.info.epoch
        self._last_step: int | None = None
        self._pending: deque[PendingStep] = deque()  # launched, not finished; rank 0 only

    def run(self) -> None:
        """Until Shutdown. Raises `EngineError` for a plan out of order, and whatever a step raises."""
        while True:
            if self._pending and not self._may_launch_more():
                self._finish_oldest()
                continue
            message = WORKER_SCHEMA.decode(self._socket.recv())
            if getattr(message, "epoch", self._epoch) < self._epoch:
                continue  # meant for the group that this one replaced
            if isinstance(message, Shutdown):
                break
            if not isinstance(message, StepPlan):
                raise EngineError(f"the scheduler sent a {type(message).__name__}")
            self._launch(message)
        while self._pending:
            self._finish_oldest()

    def _may_launch_more(self) -> bool:
        return len(self._pending) < self._worker.max_launched and bool(self._socket.poll(0))

    def _launch(self, plan: StepPlan) -> None:
        expected = plan.step if self._last_step is None else self._last_step + 1
        if plan.epoch != self._epoch or plan.step != expected:
            raise EngineError(f"got step {plan.step} of epoch {plan.epoch}, not step {expected} of epoch {self._epoch}")
        self._last_step = plan.step
        pending = self._worker.runner.launch(plan)
        if pending is not None:
            self._pending.append(pending)

    def _finish_oldest(self) -> None:
        self._socket.send(WORKER_SCHEMA.encode(self._pending.popleft().finish()))


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
            self._socket.send(SUPERVISOR_SCHEMA.encode(message))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report how far loading is."""
        self.send(LoadProgress(self._rank, stage, done, total))


def _hello(worker: Worker, place: RankPlace) -> WorkerHello:
    info = worker.info
    return WorkerHello(
        epoch=place.epoch,
        rank=place.rank,
        world_size=place.world_size,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        mode=info.mode,
    )
