"""One step while it is being put together, and what must be remembered of it until its result is back."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from novainfer.errors import EngineError
from novainfer.kv.prefix_index import IndexChanges
from novainfer.protocol.columns import Column, column
from novainfer.protocol.messages import FINISH_ERROR, FINISH_REFUSED, Notes, PromptLogprobs, TokenOutput
from novainfer.protocol.step import GIVEN_UP, NOT_FOLLOWED, RULED_OUT, NewRow, StepPlan, StepResult
from novainfer.scheduler.indexing import IndexPace
from novainfer.scheduler.request import Sequence

T = TypeVar("T")
NOT_FINITE = FINISH_ERROR, "The model's output was not finite."
_REFUSALS = {
    RULED_OUT: (
        FINISH_REFUSED,
        "The request's own rules (its grammar, allowed tokens, banned ones) leave no token to choose.",
    ),
    GIVEN_UP: (FINISH_REFUSED, "The grammar is too complex, or takes too much time, to be followed any further."),
    NOT_FOLLOWED: (FINISH_ERROR, "This server cannot follow the request's grammar."),
}
_FEW = 4  # to look each of them up, or to take it out, costs less than to make a table, or to pick all others


@dataclass(slots=True)
class Steady:
    """The members of a `Cohort` at some time, in order of age. Never changed, nor are its columns."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: Column = field(default_factory=column)
    refs: Column = field(default_factory=column)
    first_indexes: Column = field(default_factory=column)
    counts: Column = field(default_factory=column)  # of tokens: 1 for each

    def record(self, step: int, context: int, submitted: float | None) -> StepRecord:
        """Of a step of theirs alone; see there."""
        return StepRecord(
            step=step,
            sequences=self.sequences,
            rows=self.rows,
            steady=self,
            others={},
            sampled=self.sequences,
            sampled_rows=self.rows,
            sampled_refs=self.refs,
            first_indexes=self.first_indexes,
            sampled_others=[],
            counts=self.counts,
            drafts=[],
            num_tokens=len(self.rows),
            context=context,
            submitted=submitted,
            begun=[],
        )


@dataclass(slots=True)
class StepRecord:
    """A step in flight. Columns, in the plan's order: one entry for each row that it runs. They may be those of a
    `Steady`, and are never changed.

    `rows` are kept, since a sequence may lose its row before the result. The first rows are those of `steady`.
    """

    step: int
    sequences: list[Sequence]
    rows: Column
    steady: Steady
    others: dict[int, int]  # places of those that are not members of the cohort (any more), and their generations
    sampled: list[Sequence]  # those that get a token; their rows; by place: see `Steady`
    sampled_rows: Column
    sampled_refs: Column
    first_indexes: Column
    sampled_others: list[int]  # places in `sampled` of those that are no members (any more)
    counts: Column  # tokens that each row computes, drafts aside
    drafts: list[int]  # empty, or the most drafts of each decode
    num_tokens: int  # that it computes
    context: int  # tokens that those it computes attend to: all of its rows
    submitted: float | None  # seconds, on the caller's clock
    begun: list[Sequence]  # whose prompt is whole with it
    noted: tuple[Sequence, ...] = ()  # whose notes change with it

    def single_out(self, members: list[Sequence]) -> None:
        """These leave the cohort: now they are among the others here, too. Nothing else changes a step in flight."""
        rows = [sequence.row for sequence in members]
        for place, sequence in zip(_places_of(rows, self.rows), members, strict=True):
            self.others[place] = sequence.generation
        self.sampled_others.extend(_places_of(rows, self.sampled_rows))

    def not_finite(self, result: StepResult) -> list[Sequence]:
        """Those whose logits were not, or left no token to choose."""
        if not result.bad_rows:
            return []
        return [s for s, row in zip(self.sequences, self.rows, strict=True) if row in result.bad_rows]

    def why_bad(self, sequence: Sequence, result: StepResult) -> tuple[str, str]:
        """How a sequence ends that is one of those: the finish reason, and words for its client; or `NOT_FINITE`."""
        if not result.refused:
            return NOT_FINITE
        row = self.rows[next(i for i, other in enumerate(self.sequences) if other is sequence)]
        return _REFUSALS.get(result.refused.get(row, ""), NOT_FINITE)

    def confirm(self, pace: IndexPace, steady: list[Sequence]) -> list[Sequence]:
        """What the others have computed in it is there. Returns those that run and whose blocks are to be indexed now,
        together with such members of the cohort, `steady`: in the plan's order.
        """
        full = []
        for place, generation in self.others.items():
            sequence, count = self.sequences[place], self.counts[place]
            if generation == sequence.generation:
                sequence.num_confirmed_tokens = confirmed = sequence.num_confirmed_tokens + count
                if sequence.is_running and pace.is_due(sequence.row, confirmed, count, sequence.prompt_len):
                    full.append(sequence)
        if not full:
            return steady
        full += steady
        places = _places_of([sequence.row for sequence in full], self.rows)
        return [sequence for _, sequence in sorted(zip(places, full, strict=True))]

    def sampled_by(self, result: StepResult) -> list[Sequence]:
        """Whose tokens the result has, in its order. Raises `EngineError` if it does not answer this step."""
        rows = result.rows
        sampled = self.sampled
        if self.drafts and rows != self.sampled_rows:
            owner = dict(zip(self.sampled_rows, self.sampled, strict=True))
            most = dict(zip(self.rows, self.drafts, strict=False))
            runs = [(row, len(list(run))) for row, run in groupby(rows)]
            if all(count <= 1 + most.get(row, 0) for row, count in runs):
                rows = column([row for row, _ in runs])
                sampled = [owner[row] for row in result.rows if row in owner]
        if (result.step, rows) != (self.step, self.sampled_rows) or len(result.token_ids) != len(sampled):
            raise EngineError(f"the result of step {result.step} does not answer the plan of step {self.step}")
        if len(result.logprobs) not in (0, len(sampled)):
            raise EngineError(f"the result of step {result.step} has {len(result.logprobs)} log-probabilities")
        return sampled

    def plain_tokens(self, sampled: list[Sequence], token_ids: Column) -> PlainTokens:
        """The tokens of `sampled_by`; the output indexes of those that are no members are void until written."""
        if self.drafts:
            return PlainTokens(sampled, column([s.ref for s in sampled]), column([0] * len(sampled)), token_ids)
        # Copied if some will be written: it is the same column as long as nobody comes or goes.
        offsets = self.first_indexes[:] if self.sampled_others else self.first_indexes
        return PlainTokens(sampled, self.sampled_refs, offsets, token_ids, base=self.step)

    def notes(self) -> list[Notes]:
        """Those that changed, of choices that have not ended: an end tells them itself."""
        return [notes for s in self.noted if not s.finished and (notes := s.told_notes()) is not None]

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
    """Tokens of choices that have a number at their gateway, without anything else to tell. Columns, which may be those
    of a `StepRecord`, of a `Steady`: `write` alone writes to one, where `StepRecord.plain_tokens` has copied it.

    `sequences` is the same list, unchanged, as long as it is the same choices that have them.
    """

    sequences: list[Sequence] = field(default_factory=list)
    refs: Column = field(default_factory=column)
    offsets: Column = field(default_factory=column)  # output indexes, less `base`
    token_ids: Column = field(default_factory=column)
    base: int = 0
    begun: list[int] = field(default_factory=list)  # places of first tokens

    def write(self, place: int, index: int) -> None:
        """The output index of the token at this place."""
        self.offsets[place] = index - self.base
        if index == 0:
            self.begun.append(place)

    def without(self, places: Set[int]) -> PlainTokens:
        """All but those at some places."""
        if not places:
            return self
        if len(places) == len(self.refs):
            return PlainTokens(base=self.base)
        if len(places) > _FEW:
            return self.at([i for i in range(len(self.refs)) if i not in places])
        rest = PlainTokens(self.sequences[:], self.refs[:], self.offsets[:], self.token_ids[:], self.base)
        for place in sorted(places, reverse=True):
            for values in (rest.sequences, rest.refs, rest.offsets, rest.token_ids):
                del values[place]
        rest.begun = [place - sum(gone < place for gone in places) for place in self.begun if place not in places]
        return rest

    def at(self, places: list[int]) -> PlainTokens:
        """Those at some places, in order."""
        sequences = [self.sequences[place] for place in places]
        columns = (self.refs, self.offsets, self.token_ids)
        refs, offsets, token_ids = [column([values[place] for place in places]) for values in columns]
        begun = [i for i, place in enumerate(places) if place in self.begun] if self.begun else []
        return PlainTokens(sequences, refs, offsets, token_ids, self.base, begun)


@dataclass(slots=True)
class StepOutputs:
    """What one result means for the clients. `others` come after the plain tokens."""

    plain: PlainTokens
    others: list[TokenOutput]
    prompt_logprobs: list[PromptLogprobs]
    notes: list[Notes] = field(default_factory=list)

    @property
    def outputs(self) -> list[TokenOutput]:
        """All tokens spelled out."""
        plain = zip(self.plain.sequences, self.plain.offsets, self.plain.token_ids, strict=True)
        base = self.plain.base
        return [*(sequence.output(base + index, [token_id], None) for sequence, index, token_id in plain), *self.others]


_NOBODY = Steady()


class StepBatch:
    """Collects rows under one token budget; decodes and prefill chunks are kept apart for the plan's order."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.steady = _NOBODY  # decodes that come before the others
        self.decodes: list[Sequence] = []
        self.steady_context = 0  # computed tokens of the cohort's members
        self.chunks: list[Sequence] = []
        self.chunk_sizes: list[int] = []
        self.drafts: dict[int, int] = {}  # the most drafts, by the place in `decodes`
        self.sampled_decodes: list[Sequence] = []
        self.sampled_chunks: list[Sequence] = []
        # Those that may begin with this step, or compute the last token of their prompt.
        self.prompts: list[Sequence] = []
        self.new_rows: list[NewRow] = []
        self.grown_rows: list[int] = []  # one for each of the next
        self.grown_blocks: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.num_new_ids = 0  # integers that the new rows carry

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

    @property
    def num_decodes(self) -> int:
        """Rows with one token each."""
        return len(self.steady.rows) + len(self.decodes)

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

    def add_blocks(self, rows: list[int], blocks: list[int]) -> None:
        """Rows that run already go on in these blocks: one each."""
        self.grown_rows += rows
        self.grown_blocks += blocks

    def plan(self, epoch: int, record: StepRecord, freed_rows: list[int], index_changes: IndexChanges) -> StepPlan:
        """The step as the workers get it."""
        return StepPlan(
            epoch=epoch,
            step=record.step,
            rows=record.rows,
            num_new_tokens=record.counts,
            num_drafts=record.drafts,
            freed_rows=freed_rows,
            new_rows=self.new_rows,
            grown_rows=column(self.grown_rows),
            grown_blocks=column(self.grown_blocks),
            copy_src=[src for src, _ in self.copies],
            copy_dst=[dst for _, dst in self.copies],
            unindexed=index_changes.unindexed,
            indexed=index_changes.indexed,
            indexed_parents=index_changes.parents,
            indexed_ids=index_changes.token_ids,
        )

    def record(self, step: int, submitted: float | None) -> StepRecord:
        """What to remember of it."""
        steady = self.steady
        first = len(steady.rows)
        if not (self.decodes or self.chunks):
            return steady.record(step, self.steady_context, submitted)
        others, sampled_others = self.decodes + self.chunks, self.sampled_decodes + self.sampled_chunks
        rows = _with_column(steady.rows, [s.row for s in others])
        are_all_sampled = len(sampled_others) == len(others)
        num_decodes = first + len(self.decodes)
        return StepRecord(
            step=step,
            sequences=_with(steady.sequences, others),
            rows=rows,
            steady=steady,
            others={place: s.generation for place, s in enumerate(others, first) if not s.joined},
            sampled=_with(steady.sequences, sampled_others),
            sampled_rows=rows if are_all_sampled else _with_column(steady.rows, [s.row for s in sampled_others]),
            sampled_refs=_with_column(steady.refs, [s.ref for s in sampled_others]),
            first_indexes=_with_column(steady.first_indexes, [s.first_index for s in sampled_others]),
            sampled_others=[place for place, s in enumerate(sampled_others, first) if not s.joined],
            counts=_with_column(steady.counts, [1] * len(self.decodes) + self.chunk_sizes),
            drafts=[self.drafts.get(i, 0) for i in range(len(self.decodes))] if self.drafts else [],
            num_tokens=num_decodes + sum(self.chunk_sizes),
            context=self.steady_context + sum([s.num_computed_tokens for s in others if not s.joined]),
            submitted=submitted,
            begun=[s for s in self.prompts if s.num_computed_tokens >= s.prompt_len and not s.num_output],
            noted=tuple([s for s in self.prompts if s.notes is not None]),
        )


def _places(rows: Column) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows)}


def _places_of(wanted: list[int], rows: Column) -> list[int]:
    if len(wanted) < _FEW:
        return [rows.index(row) for row in wanted]
    places = _places(rows)
    return [places[row] for row in wanted]


def _with(items: list[T], more: list[T]) -> list[T]:
    """Both; the same list, if there is no more."""
    return items + more if more else items


def _with_column(values: Column, more: list[int]) -> Column:
    """Both; the same column, if there is no more."""
    return values + column(more) if more else values


def new_row(sequence: Sequence) -> NewRow:
    """The sequence as the workers get to know it, when it takes a row."""
    return NewRow(
        row=sequence.row,
        token_ids=sequence.token_ids[:],
        prompt_len=sequence.prompt_len,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=list(sequence.table.blocks),
        params=sequence.params,
        choice=sequence.choice,
        stop_token_ids=sorted(sequence.stop_token_ids),
        embed=sequence.embeds,
    )
