"""The engine: a scheduler and an executor, joined. The same object runs in the scheduler process and in `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from novainfer.config import ServeConfig
from novainfer.errors import EngineError
from novainfer.executor.base import Executor
from novainfer.protocol.messages import AddRequest, TokenOutput
from novainfer.protocol.step import IndexedBlock
from novainfer.scheduler.batch import StepOutputs
from novainfer.scheduler.scheduler import Scheduler


class EngineCore:
    """`submit` keeps up to `steps_in_flight` plans with the workers, `collect` applies the oldest result."""

    def __init__(
        self,
        executor: Executor,
        config: ServeConfig,
        held: Sequence[IndexedBlock] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`held`: what the workers' KV blocks hold already, in another scheduler's account. `clock`: in seconds, where
        the owner does not tell the scheduler the time himself.
        """
        self._executor = executor
        self._clock = clock
        self._steps_in_flight = config.scheduler.steps_in_flight
        weights = {key.tenant: key.weight for key in config.keys}
        self.scheduler = Scheduler(executor.info, config.scheduler, config.cache, weights)
        self.scheduler.kv.adopt(held)

    def add(self, message: AddRequest, now: float) -> list[TokenOutput]:
        """See `Scheduler.add`."""
        return self.scheduler.add(message, now)

    def cancel(self, request_id: str, choice: int = -1, *, complete: bool = False) -> list[TokenOutput]:
        """See `Scheduler.cancel`."""
        return self.scheduler.cancel(request_id, choice, complete=complete)

    def lose_workers(self, *, faulted: bool) -> list[TokenOutput]:
        """See `Scheduler.lose_workers`."""
        return self.scheduler.lose_workers(faulted=faulted)

    def attach_workers(self, executor: Executor) -> list[TokenOutput]:
        """Go on with these workers; see `Scheduler.attach_workers`."""
        self._executor = executor
        return self.scheduler.attach_workers(executor.info)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.scheduler.requests and self.scheduler.num_in_flight == 0

    def submit(self) -> int:
        """Submit plans until enough are in flight or nothing can be scheduled; returns how many."""
        count, scheduler = 0, self.scheduler
        if self._clock is not None:
            scheduler.now = self._clock()
        while scheduler.num_in_flight < self._steps_in_flight:
            plan = scheduler.schedule()
            if plan is None:
                break
            self._executor.submit(plan)
            count += 1
        return count

    def collect(self, timeout: float | None) -> StepOutputs | None:
        """Wait up to `timeout` seconds (None = for ever) for the oldest step; None if none came or none is out.

        Raises `EngineError` if the workers failed, or know nothing of a step that is out.
        """
        if self.scheduler.num_in_flight == 0:
            return None
        result = self._executor.collect(timeout)
        if result is None and timeout is None:
            raise EngineError(f"{self.scheduler.num_in_flight} steps are out, but the workers have none to answer")
        if self._clock is not None:
            self.scheduler.now = self._clock()
        return None if result is None else self.scheduler.update(result)
