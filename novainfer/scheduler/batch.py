"""One step while it is being put together, and what must be remembered of it until its result is back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from novainfer.errors import EngineError
from novainfer.protocol.messages import PromptLogprobs, TokenOutput
from novainfer.protocol.step import IndexedBlock, NewBlocks, NewRow, StepPlan, StepResult
from novainfer.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step in flight. Columns, in the plan's order: one entry for each row that it runs.

    `rows` and `generations` are kept, since a sequence may lose its row before the result.
    """

    step: int
    sequences: list[Sequence]
    rows: list[int]
    generations: list[int]
    sampled: list[Sequence]  # those that get a token, and their rows
    sampled_rows: list[int]
    counts: list[int]  # tokens that each row computes, drafts aside
    drafts: list[int]  # empty, or the most drafts of each decode
    num_tokens: int  # that it computes
    context: int  # tokens that those it computes attend to: all of its rows
    submitted: float | None  # seconds, on the caller's clock
    begun: list[Sequence]  # whose prompt is whole with it

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
    """Tokens of choices that have a number at their gateway, without anything else to tell. Columns."""

    sequences: list[Sequence] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)  # output indexes
    token_ids: list[int] = field(default_factory=list)

    def add(self, sequence: Sequence, index: int, token_id: int) -> None:
        """One more."""
        self.sequences.append(sequence)
        self.indexes.append(index)
        self.token_ids.append(token_id)


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
    decodes: list[Sequence] = field(default_factory=list)
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

    def allow_drafts(self, sequence: Sequence, most: int) -> None:
        """The decode that comes next may have so many drafts."""
        self.drafts[len(self.decodes)] = most
        self.budget -= most
        sequence.num_ahead += most

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
        sequences = self.decodes + self.chunks
        sampled = self.sampled_decodes + self.sampled_chunks
        rows = [s.row for s in sequences]
        return StepRecord(
            step=step,
            sequences=sequences,
            rows=rows,
            generations=[s.generation for s in sequences],
            sampled=sampled,
            sampled_rows=rows if len(sampled) == len(sequences) else [s.row for s in sampled],
            counts=[1] * len(self.decodes) + self.chunk_sizes,
            drafts=[self.drafts.get(i, 0) for i in range(len(self.decodes))] if self.drafts else [],
            num_tokens=len(self.decodes) + sum(self.chunk_sizes),
            context=sum([s.num_computed_tokens for s in sequences]),
            submitted=submitted,
            begun=[s for s in self.prompts if s.num_computed_tokens >= s.prompt_len and not s.num_output],
        )


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
