"""One step while it is being put together, and what must be remembered of it until its result is back."""

from __future__ import annotations

from dataclasses import dataclass, field

from novainfer.protocol.messages import PromptLogprobs, TokenOutput
from novainfer.protocol.step import IndexedBlock, NewBlocks, NewRow, StepPlan
from novainfer.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A sequence's part of a submitted step. `row` is kept: the sequence may lose it before the result."""

    sequence: Sequence
    row: int
    generation: int
    num_computed_after: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step in flight: its rows in the plan's order."""

    step: int
    rows: list[ScheduledRow]
    num_tokens: int  # that it computes
    context: int  # tokens that they attend to: those of its rows
    submitted: float | None  # seconds, on the caller's clock


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one result means for the clients."""

    outputs: list[TokenOutput]
    prompt_logprobs: list[PromptLogprobs]


@dataclass(slots=True)
class StepBatch:
    """Collects rows under one token budget; decodes and prefill chunks are kept apart for the plan's order."""

    budget: int  # tokens left
    decodes: list[ScheduledRow] = field(default_factory=list)
    chunks: list[ScheduledRow] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_new_ids: int = 0  # integers that the new rows carry

    def add(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Schedule the sequence's next tokens and advance it: the step counts as computed from here on.

        Whether one more token of it is sampled.
        """
        self.budget -= num_new_tokens
        sequence.num_computed_tokens += num_new_tokens
        samples = sequence.num_computed_tokens == sequence.num_tokens
        entry = ScheduledRow(sequence, sequence.row, sequence.generation, sequence.num_computed_tokens, samples)
        if num_new_tokens == 1:
            self.decodes.append(entry)
        else:
            self.chunks.append(entry)
            self.chunk_sizes.append(num_new_tokens)
        if samples:
            sequence.num_pending += 1
        return samples

    def add_new_row(self, row: NewRow) -> None:
        """A sequence starts with this step."""
        params = row.params
        lists = (row.token_ids, row.block_ids, row.stop_token_ids, params.logit_bias, params.banned_token_ids)
        self.num_new_ids += sum(map(len, lists)) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
        self.new_rows.append(row)

    @property
    def rows(self) -> list[ScheduledRow]:
        """All rows in the plan's order: those with one token first."""
        return self.decodes + self.chunks

    def plan(
        self, epoch: int, step: int, freed_rows: list[int], index_changes: tuple[list[int], list[IndexedBlock]]
    ) -> StepPlan:
        """The step as the workers get it. index_changes: see `PrefixIndex.take_changes`."""
        unindexed, indexed = index_changes
        return StepPlan(
            epoch=epoch,
            step=step,
            rows=[entry.row for entry in self.rows],
            num_new_tokens=[1] * len(self.decodes) + self.chunk_sizes,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            copy_src=[src for src, _ in self.copies],
            copy_dst=[dst for _, dst in self.copies],
            unindexed=unindexed,
            indexed=indexed,
        )


def new_row(sequence: Sequence) -> NewRow:
    """The sequence as the workers get to know it, when it takes a row."""
    return NewRow(
        row=sequence.row,
        token_ids=list(sequence.token_ids),
        prompt_len=sequence.request.prompt_len,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=list(sequence.table.blocks),
        params=sequence.params,
        choice=sequence.choice,
        stop_token_ids=sorted(sequence.stop_token_ids),
    )
