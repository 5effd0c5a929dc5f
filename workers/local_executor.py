"""The engine's `Executor` over a worker in the same process: one rank, no socket, no Ray. For the offline `LLM`."""

from __future__ import annotations

import gc
from collections import deque

import torch

from novainfer.config import ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.protocol.supervision import FIRST_EPOCH
from workers.launch import RankPlace
from workers.worker import Pending, Progress, Worker


def _no_progress(stage: str, done: int, total: int) -> None:
    """For callers who do not want to see the loading."""


class LocalExecutor:
    """Plans wait in a queue; `collect` launches them, on the caller's thread, and waits for the oldest one's end."""

    def __init__(self, config: ServeConfig, *, epoch: int = FIRST_EPOCH, progress: Progress = _no_progress) -> None:
        if config.parallel.tensor_parallel_size != 1:
            raise ConfigError("tensor parallelism needs worker processes; the in-process engine has one rank")
        place = RankPlace(rank=0, world_size=1, epoch=epoch, meeting_point="")
        self._worker: Worker | None = Worker.build(config, place, progress)
        self._worker.take_cache_memory(config)
        self._worker.runner.use_idle_time()  # the largest graph of decodes, which serves any number of them
        self._info = self._worker.info
        self._plans: deque[StepPlan] = deque()
        self._launched: deque[Pending] = deque()

    @property
    def info(self) -> ExecutorInfo:
        """What the worker can hold."""
        return self._info

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises `EngineError` for another epoch's, or when closed."""
        if self._worker is None:
            raise EngineError("the executor is closed")
        if plan.epoch != self._info.epoch:
            raise EngineError(f"plan of epoch {plan.epoch} for a worker of epoch {self._info.epoch}")
        self._plans.append(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """End the oldest plan whatever `timeout` says; None if none is waiting. Raises `EngineError` for a bad plan."""
        if self._worker is None:
            return None
        while self._plans and len(self._launched) < self._worker.max_launched:
            pending = self._worker.runner.launch(self._plans.popleft())
            if pending is not None:
                self._launched.append(pending)
        return self._launched.popleft().finish() if self._launched else None

    def start_anew(self) -> None:
        """See `OwnExecutor`. What a device still computes of steps that were launched comes before all that follows."""
        if self._worker is None:
            raise EngineError("the executor is closed")
        self._plans.clear()
        self._launched.clear()
        self._worker.runner.drop_rows()

    def record_graphs(self) -> None:
        """Record all CUDA graphs, which a server does while it idles; nothing where there are none."""
        while self._worker is not None and self._worker.runner.use_idle_time():
            pass

    def close(self) -> None:
        """Drop the worker with its weights and cache (idempotent)."""
        if self._worker is not None and self._worker.cache is not None:
            self._worker.cache.close()
        self._worker = None
        self._plans.clear()
        self._launched.clear()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()  # graphs and what records them hold each other, and all memory of the worker
            torch.cuda.empty_cache()
