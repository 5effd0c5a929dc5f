"""The simulation's oracle as an executor, for tests that run a scheduler alone."""

from __future__ import annotations

from collections import deque

from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.sim.oracle import OracleRows, oracle_stream

__all__ = ["OracleExecutor", "oracle_stream"]


class OracleExecutor(OracleRows):
    """One rank in this process. Implements `Executor`; `plans` keeps every plan for assertions."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        can_draft: bool = False,
    ) -> None:
        info = ExecutorInfo(
            epoch=1,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            can_draft=can_draft,
        )
        super().__init__(info)
        self.plans: list[StepPlan] = []
        self._queue: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `Executor`."""
        self.plans.append(plan)
        self._queue.append(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """See `Executor`."""
        return self._execute(self._queue.popleft()) if self._queue else None

    def close(self) -> None:
        """See `Executor`."""
        self._queue.clear()

    def _execute(self, plan: StepPlan) -> StepResult:
        return self.execute(plan)
