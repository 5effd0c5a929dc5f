"""The one interface between the engine core and whatever runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from novainfer.protocol.step import IndexedBlock, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What the workers agreed on after loading (the minimum over the ranks where they differ)."""

    epoch: int
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int  # width of the logits
    max_model_len: int  # tokens
    max_num_seqs: int  # persistent rows
    max_num_batched_tokens: int  # of one step, if the configuration does not say
    mode: str = ""  # see `novainfer.mode`
    can_draft: bool = False  # see `StepPlan.num_drafts`
    hidden_size: int = 0  # of the model


class Executor(Protocol):
    """Runs plans in the order of submission and answers each with exactly one result, in the same order."""

    @property
    def info(self) -> ExecutorInfo:
        """Valid once the workers are ready."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. Does not wait for it. Raises `EngineError` if the workers are gone."""
        ...

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest unanswered step's result; None if `timeout` seconds pass first (None = wait).

        Raises `EngineError` if the workers failed; every row's state is then lost.
        """
        ...

    def close(self) -> None:
        """Release the workers (idempotent)."""
        ...


class OwnExecutor(Executor, Protocol):
    """An executor whose owner may break a step off, and go on."""

    def start_anew(self) -> None:
        """Forget every plan, result and row, whatever was going on; `info` may be of another epoch then.

        May wait for steps that run. Raises `EngineError` if the workers cannot go on, or are still not known to do
        nothing: then nothing may be submitted before another call has returned.
        """
        ...


class GroupExecutor(Executor, Protocol):
    """An executor whose workers come later than itself, and may be replaced."""

    @property
    def held(self) -> list[IndexedBlock]:
        """The blocks in the index of the scheduler that had these ranks before; valid like `info`."""
        ...

    def expect(self, epoch: int, *, group: int) -> None:
        """From now on the ranks that were started as `group` work here, in `epoch`; nobody else is heard.

        Ranks of that group that are in an older epoch are adopted.
        """
        ...

    def try_ready(self) -> ExecutorInfo | None:
        """The info once all ranks have said hello. Raises `EngineError` if one failed. Does not wait."""
        ...

    def check(self) -> None:
        """Raises `EngineError` if the workers failed, as far as is known."""
        ...
