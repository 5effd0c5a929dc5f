"""One step while it is being put together, and what must be remembered of it until its result is back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from novainfer.errors import EngineError
from novainfer.protocol.messages import PromptLogprobs, TokenOutput
from novainfer.protocol.step import IndexedBlock, NewBlocks, NewRow, StepPlan, StepResult
from novainfer.scheduler.request import Sequence

T = TypeVar("T")
_FEW = 4  # to look each of them up costs less than to make a table


@dataclass(frozen=True, slots=True)
class Steady:
    """The members of a `Cohort` at some time, in order of age. Columns, never changed."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    first_indexes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step in flight. Columns, in the plan's order: one entry for each row that it runs.

    `rows` are kept, since a sequence may lose its row before the result. The first rows are those of `steady`.
    """

    step: int
    sequences: list[Sequence]
    rows: list[int]
    steady: Steady
    others: dict[int, int]  # places of those that are not members of the cohort (any more), and their generations
    sampled: list[Sequence]  # those that get a token; their rows; by place: see `Steady`
    sampled_rows: list[int]
    sampled_refs: list[int]
    first_indexes: list[int]
    sampled_others: list[int]  # places in `sampled` of those that are no members (any more)
    counts: list[int]  # tokens that each row computes, drafts aside
    drafts: list[int]  # empty, or the most drafts of each decode
    num_tokens: int  # that it computes
    context: int  # tokens that those it computes attend to: all of its rows
    submitted: float | None  # seconds, on the caller's clock
    begun: list[Sequence]  # whose prompt is whole with it

    def single_out(self, members: list[Sequence]) -> None:
        """These leave the cohort: now they are among the others here, too. Nothing else changes a step in flight."""
        rows = [sequence.row for sequence in members]
        for place, sequence in zip(_places_of(rows, self.rows), members, strict=True):
            self.others[place] = sequence.generation
        self.sampled_others.extend(_places_of(rows, self.sampled_rows))

    def not_finite(self, result: StepResult) -> list[Sequence]:
        """Those whose logits were not."""
        if not result.bad_rows:
            return []
        return [s for s, row in zip(self.sequences, self.rows, strict=True) if row in result.bad_rows]

    def confirm(self, block_size: int, steady: list[Sequence]) -> list[Sequence]:
        """What the others have computed in it is there. Returns those that run and have filled a block by it, together
        with members of the cohort, `steady`, that have: in the plan's order.
        """
        full = []
        for place, generation in self.others.items():
            sequence, count = self.sequences[place], self.counts[place]
            if generation == sequence.generation:
                sequence.num_confirmed_tokens = confirmed = sequence.num_confirmed_tokens + count
                if confirmed % block_size < count and sequence.is_running:
                    full.append(sequence)
        if not full:
            return steady
        places = _places(self.rows)
        return sorted(full + steady, key=lambda s: places[s.row])

    def sampled_by(self, result: StepResult) -> list[Sequence]:
        """Whose tokens the result has, in its order. Raises `EngineError` if it does not answer this step."""
        rows = result.rows
        sampled = self.sampled
        if self.drafts and rows != self.sampled_rows:
            owner = dict(zip(self.sampled_rows, self.sampled, strict=True))
            most = dict(zip(self.rows, self.drafts, strict=False))
            runs = [(row, len(list(run))) for row, run in groupby(rows)]
            if all(count <= 1 + most.get(row, 0) for row, count in runs):
                rows = [row for row, _ in runs]
                sampled = [owner[row] for row in result.rows if row in owner]
        if (result.step, rows) != (self.step, self.sampled_rows) or len(result.token_ids) != len(sampled):
            raise EngineError(f"the result of step {result.step} does not answer the plan of step {self.step}")
        if len(result.logprobs) not in (0, len(sampled)):
            raise EngineError(f"the result of step {result.step} has {len(result.logprobs)} log-probabilities")
        return sampled

    def plain_tokens(self, sampled: list[Sequence], token_ids: list[int]) -> PlainTokens:
        """The tokens of `sampled_by`; the output indexes of those that are no members are void until written."""
        if self.drafts:
            return PlainTokens(sampled, [s.ref for s in sampled], [0] * len(sampled), token_ids)
        step = self.step
        return PlainTokens(sampled, self.sampled_refs, [index + step for index in self.first_indexes], token_ids)

    def prompt_logprobs(self, result: StepResult) -> list[PromptLogprobs]:
        """Those of requests that have not ended, as their clients get them."""
        if not result.prompt_logprobs:
            return []
        by_row = dict(zip(self.rows, self.sequences, strict=True))
        return [
            PromptLogprobs(by_row[item.row].request_id, item.start, item.entries)
            for item in result.prompt_logprobs
            if not by_row[item.row].request.finished
        ]


@dataclass(slots=True)
class PlainTokens:
    """Tokens of choices that have a number at their gateway, without anything else to tell. Columns.

    `sequences` is the same list, unchanged, as long as it is the same choices that have them.
    """

    sequences: list[Sequence] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)  # output indexes
    token_ids: list[int] = field(default_factory=list)

    def without(self, places: Collection[int]) -> PlainTokens:
        """All but those at some places."""
        return self.at([i for i in range(len(self.refs)) if i not in places]) if places else self

    def at(self, places: list[int]) -> PlainTokens:
        """Those at some places."""
        columns = (self.sequences, self.refs, self.indexes, self.token_ids)
        return PlainTokens(*[[column[place] for place in places] for column in columns])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one result means for the clients. `others` come after the plain tokens."""

    plain: PlainTokens
    others: list[TokenOutput]
    prompt_logprobs: list[PromptLogprobs]

    @property
    def outputs(self) -> list[TokenOutput]:
        """All tokens spelled out."""
        plain = zip(self.plain.sequences, self.plain.indexes, self.plain.token_ids, strict=True)
        return [*(sequence.output(index, [token_id], None) for sequence, index, token_id in plain), *self.others]


@dataclass(slots=True)
class StepBatch:
    """Collects rows under one token budget; decodes and prefill chunks are kept apart for the plan's order."""

    budget: int  # tokens left
    steady: Steady = field(default_factory=Steady)  # decodes that come before the others
    decodes: list[Sequence] = field(default_factory=list)
    steady_context: int = 0  # computed tokens of the cohort's members
    chunks: list[Sequence] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)  # the most drafts, by the place in `decodes`
    sampled_decodes: list[Sequence] = field(default_factory=list)
    sampled_chunks: list[Sequence] = field(default_factory=list)
    # Those that may begin with this step, or compute the last token of their prompt.
    prompts: list[Sequence] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_new_ids: int = 0  # integers that the new rows carry

    def add(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Schedule the sequence's next tokens and advance it: the step counts as computed from here on.

        Whether one more token of it is sampled.
        """
        self.budget -= num_new_tokens
        sequence.num_computed_tokens = computed = sequence.num_computed_tokens + num_new_tokens
        self.prompts.append(sequence)
        if num_new_tokens == 1:
            self.decodes.append(sequence)
        else:
            self.chunks.append(sequence)
            self.chunk_sizes.append(num_new_tokens)
        if computed < len(sequence.token_ids) + sequence.num_pending:
            return False
        (self.sampled_decodes if num_new_tokens == 1 else self.sampled_chunks).append(sequence)
        sequence.num_pending += 1
        return True

    @property
    def is_empty(self) -> bool:
        return not (self.steady.rows or self.decodes or self.chunks)

    def add_steady(self, steady: Steady) -> None:
        """One token for each of the members of the cohort, before other decodes are added."""
        self.steady = steady
        self.budget -= len(steady.rows)

    def add_decodes(self, decodes: list[Sequence]) -> None:
        """Rows with one token each, which are advanced already."""
        self.decodes += decodes
        self.sampled_decodes += decodes
        self.budget -= len(decodes)

    def allow_drafts(self, sequence: Sequence, most: int, place: int) -> None:
        """The decode at this place in `decodes` may have so many drafts."""
        self.drafts[place] = most
        self.budget -= most
        sequence.num_ahead += most
        if sequence.drafts is not None:
            sequence.drafts.is_tried = True

    def add_new_row(self, row: NewRow) -> None:
        """A sequence starts with this step."""
        params = row.params
        lists = (row.token_ids, row.block_ids, row.stop_token_ids, params.logit_bias, params.banned_token_ids)
        self.num_new_ids += sum(map(len, lists)) + len(params.allowed_token_ids or ()) + len(params.stop_token_ids)
        self.new_rows.append(row)

    def plan(
        self, epoch: int, record: StepRecord, freed_rows: list[int], index_changes: tuple[list[int], list[IndexedBlock]]
    ) -> StepPlan:
        """The step as the workers get it. index_changes: see `PrefixIndex.take_changes`."""
        unindexed, indexed = index_changes
        return StepPlan(
            epoch=epoch,
            step=record.step,
            rows=record.rows,
            num_new_tokens=record.counts,
            num_drafts=record.drafts,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            copy_src=[src for src, _ in self.copies],
            copy_dst=[dst for _, dst in self.copies],
            unindexed=unindexed,
            indexed=indexed,
        )

    def record(self, step: int, submitted: float | None) -> StepRecord:
        """What to remember of it."""
        steady = self.steady
        first = len(steady.rows)
        others, sampled_others = self.decodes + self.chunks, self.sampled_decodes + self.sampled_chunks
        rows = _with(steady.rows, [s.row for s in others])
        are_all_sampled = len(sampled_others) == len(others)
        num_decodes = first + len(self.decodes)
        return StepRecord(
            step=step,
            sequences=_with(steady.sequences, others),
            rows=rows,
            steady=steady,
            others={place: s.generation for place, s in enumerate(others, first) if not s.joined},
            sampled=_with(steady.sequences, sampled_others),
            sampled_rows=rows if are_all_sampled else steady.rows + [s.row for s in sampled_others],
            sampled_refs=_with(steady.refs, [s.ref for s in sampled_others]),
            first_indexes=_with(steady.first_indexes, [s.first_index for s in sampled_others]),
            sampled_others=[place for place, s in enumerate(sampled_others, first) if not s.joined],
            counts=[1] * num_decodes + self.chunk_sizes,
            drafts=[self.drafts.get(i, 0) for i in range(len(self.decodes))] if self.drafts else [],
            num_tokens=num_decodes + sum(self.chunk_sizes),
            context=self.steady_context + sum([s.num_computed_tokens for s in others if not s.joined]),
            submitted=submitted,
            begun=[s for s in self.prompts if s.num_computed_tokens >= s.prompt_len and not s.num_output],
        )


def _places(rows: list[int]) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows)}


def _places_of(wanted: list[int], rows: list[int]) -> list[int]:
    if len(wanted) < _FEW:
        return [rows.index(row) for row in wanted]
    places = _places(rows)
    return [places[row] for row in wanted]


def _with(columns: list[T], more: list[T]) -> list[T]:
    """Both; the same list, if there is no more."""
    return columns + more if more else columns


def new_row(sequence: Sequence) -> NewRow:
    """The sequence as the workers get to know it, when it takes a row."""
    return NewRow(
        row=sequence.row,
        token_ids=list(sequence.token_ids),
        prompt_len=sequence.prompt_len,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=list(sequence.table.blocks),
        params=sequence.params,
        choice=sequence.choice,
        stop_token_ids=sorted(sequence.stop_token_ids),
    )
