"""The engine's `Executor` over Ray workers of this process's own: for the offline `LLM` with several ranks."""

from __future__ import annotations

import shutil
import time
import weakref
from contextlib import ExitStack

import zmq

from novainfer.config import ServeConfig
from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.protocol.supervision import FIRST_EPOCH
from novainfer.transport.addresses import RunDir
from novainfer.transport.cluster import cluster_links
from workers.ray_group import RayWorkerGroup

_LIVENESS_INTERVAL = 0.5  # seconds


class RayExecutor:
    """Owns the links to its ranks, the group and its Ray instance. A rank that fails fails the engine.

    All of it ends with `close`, or when nobody holds this object any more, or when Python ends.
    """

    def __init__(self, config: ServeConfig, *, epoch: int = FIRST_EPOCH) -> None:
        """Start everything and wait until all ranks have loaded. Raises `EngineError` if one fails or is too late.

        Raises `ConfigError` if this process uses Ray already.
        """
        # In reverse order. It must not know this object: else nobody would ever let go of it.
        parts = ExitStack()
        self._end = weakref.finalize(self, parts.close)
        try:
            run_dir = RunDir.create(None)
            parts.callback(shutil.rmtree, run_dir.path, ignore_errors=True)
            parts.enter_context(cluster_links(run_dir, config.parallel.cluster_host))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            parts.callback(context.term)
            self._group = RayWorkerGroup(config, run_dir)
            parts.callback(self._group.stop)
            self._epoch = self._first_epoch = epoch
            self._stall_timeout = config.server.stall_timeout
            world_size = config.parallel.tensor_parallel_size
            self._ranks = ZmqExecutor(run_dir.workers(0), world_size=world_size, epoch=epoch, context=context)
            parts.callback(self._ranks.close)
            deadline = time.monotonic() + config.server.start_timeout
            self._group.start(epoch, is_wanted=lambda: time.monotonic() < deadline)
            self._wait_ready(deadline, "the ranks have not loaded within --start-timeout")
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ExecutorInfo:
        """What the ranks agreed on."""
        return self._ranks.info

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank."""
        self._ranks.listen()  # first: what ranks said while they were idle is older than the plan
        self._ranks.submit(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest unanswered step's result. Raises `EngineError` if a rank failed or died."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            result = self._ranks.collect(min(left, _LIVENESS_INTERVAL))
            if result is not None or left <= _LIVENESS_INTERVAL:
                return result
            self._check_alive()

    def start_anew(self) -> None:
        """See `OwnExecutor`: the ranks take us for another scheduler, and end what the one before has asked for.

        One that was not sent a plan that others have got leaves them waiting for it: then this fails.
        """
        if not self._end.alive:
            raise EngineError("the executor is closed")
        self._epoch += 1
        self._ranks.expect(self._epoch, group=self._first_epoch)
        deadline = time.monotonic() + self._stall_timeout
        self._wait_ready(deadline, "the ranks have not ended a step that was broken off within --stall-timeout")

    def close(self) -> None:
        """End the ranks and Ray (idempotent)."""
        self._end()

    def _wait_ready(self, deadline: float, too_late: str) -> None:
        while self._ranks.try_ready() is None:
            if time.monotonic() > deadline:
                raise EngineError(too_late)
            self._ranks.socket.poll(int(_LIVENESS_INTERVAL * 1000))
            self._check_alive()

    def _check_alive(self) -> None:
        if not self._group.is_alive():
            self._ranks.collect(0)  # raises what the rank said before it died
            raise EngineError("a worker died")
