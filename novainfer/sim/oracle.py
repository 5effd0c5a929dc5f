"""Rows without a model: token = H(history, seed, choice, index), and a KV cache that is checked on reading.

Every slot holds the hash of the history up to it. Before a row computes a token, all earlier slots in its block
table must hold exactly that row's history, so a stale, shared or misplaced block fails at once; and since the
token depends on the whole history, a lost, doubled or swapped token shows in everything after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.columns import column
from novainfer.protocol.messages import Logprobs
from novainfer.protocol.step import NewRow, RowPromptLogprobs, StepPlan, StepResult
from novainfer.sampling.params import SamplingParams

NOT_FINITE = -1  # what a slot holds whose computation went wrong: no hash is negative
_GUESSED = -2  # what a slot holds whose token was a wrong guess
_MASK = 2**64 - 1


class OracleError(EngineError):
    """A plan cannot be, or a block does not hold what its reader needs."""


def history_hash(previous: int, token_id: int) -> int:
    """The hash of a history that goes on with `token_id`: 64 bits. One to one for equal `previous`."""
    mixed = ((previous ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def hash_tokens(token_ids: Iterable[int], previous: int = 0) -> int:
    """The hash of a whole history."""
    for token_id in token_ids:
        previous = history_hash(previous, token_id)
    return previous


def oracle_token(history: int, seed: int, choice: int, index: int, vocab_size: int) -> int:
    """Output token `index` of a choice after this history."""
    return (hash_tokens((seed, choice, index), history) >> 7) % vocab_size


def oracle_stream(
    prompt: Sequence[int], params: SamplingParams, choice: int, stops: Iterable[int], vocab_size: int, salt: int = 0
) -> list[int]:
    """The output of a choice, without any engine. `salt`: see `OracleRow.of`."""
    history = hash_tokens(prompt, salt)
    ends = frozenset(stops)
    output: list[int] = []
    while len(output) < params.max_tokens:
        token_id = oracle_token(history, params.seed or 0, choice, len(output), vocab_size)
        output.append(token_id)
        if token_id in ends and len(output) > params.min_tokens:
            break
        history = history_hash(history, token_id)
    return output


def oracle_logprobs(history: int, token_id: int) -> Logprobs:
    """What is reported of `token_id`, the next token after this history."""
    return Logprobs(token_id, -float(hash_tokens((token_id,), history) % 1000), 1)


def oracle_vector(history: int) -> bytes:
    """The embedding of this history: two numbers."""
    return history.to_bytes(8, "little")


@dataclass(slots=True)
class OracleRow:
    """A row as the workers keep it. hashes[i]: of the history up to token i. salt: what comes before it."""

    token_ids: list[int]
    hashes: list[int]
    prompt_len: int
    num_computed: int
    blocks: list[int]
    params: SamplingParams
    choice: int
    salt: int = 0
    is_bad: bool = False  # some of its logits were not finite
    embed: bool = False

    @classmethod
    def of(cls, new: NewRow, salt: int = 0) -> OracleRow:
        """A row that starts. `salt`: the hash of what comes before its first token."""
        row = cls([], [], new.prompt_len, new.num_computed_tokens, list(new.block_ids), new.params, new.choice, salt)
        row.embed = new.embed
        for token_id in new.token_ids:
            row.append(token_id)
        return row

    def append(self, token_id: int) -> None:
        """One more known token."""
        self.hashes.append(history_hash(self.hashes[-1] if self.hashes else self.salt, token_id))
        self.token_ids.append(token_id)


class OracleRows:
    """The rows and the KV blocks of one rank; `execute` runs a plan. Raises `OracleError` for what cannot be."""

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info
        self.kv: list[list[int]] = [[0] * info.block_size for _ in range(info.num_blocks)]
        self.rows: dict[int, OracleRow] = {}
        self.bad_rows: set[int] = set()  # rows to report as not finite whenever they sample

    @property
    def info(self) -> ExecutorInfo:
        """What the workers can do."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end."""
        self._apply(plan)
        if any(a > 1 and b == 1 for a, b in pairwise(plan.num_new_tokens)):
            raise OracleError("rows with one token must come first")
        result = StepResult(plan.epoch, plan.step, column(), column())
        most = dict(zip(plan.rows, plan.num_drafts, strict=False))
        entries = [(index, self._row(index), n) for index, n in zip(plan.rows, plan.num_new_tokens, strict=True)]
        # All rows write before any row reads, as the layers do.
        for _, row, count in entries:
            self._write(row, count)
        for index, row, count in entries:
            is_finite = self._read(row, row.num_computed + count)
            self._describe_prompt(index, row, count, result)
            row.num_computed += count
            if row.num_computed == len(row.token_ids):
                self._sample(index, row, result, is_finite)
                if index in most:
                    result.num_drafted.append(self._draft(index, row, result, most[index]))
        if not any(result.logprobs):
            result.logprobs.clear()
        return result

    def salt_of(self, new: NewRow) -> int:
        """See `OracleRow.of`."""
        return 0

    def is_bad(self, index: int, row: OracleRow) -> bool:
        """Whether this row's logits are to come out wrong now."""
        return index in self.bad_rows

    def may_read_garbage(self, row: OracleRow) -> bool:
        """Whether the row may find a slot that is not finite; it is reported as bad then."""
        return row.is_bad  # it was told, and a step that was in flight goes on

    def _sample(self, index: int, row: OracleRow, result: StepResult, is_finite: bool) -> None:
        if not is_finite or self.is_bad(index, row):
            result.bad_rows.append(index)
            row.is_bad = True
            block, offset = self._slot(row, row.num_computed - 1)
            self.kv[block][offset] = NOT_FINITE
        if row.embed:
            if index not in result.bad_rows:
                result.embeddings[index] = oracle_vector(row.hashes[-1])
            result.logprobs.append(None)
            result.rows.append(index)
            result.token_ids.append(0)
            return
        output_index = len(row.token_ids) - row.prompt_len
        token = oracle_token(row.hashes[-1], row.params.seed or 0, row.choice, output_index, self._info.vocab_size)
        wants = row.params.logprobs is not None and index not in result.bad_rows
        result.logprobs.append(oracle_logprobs(row.hashes[-1], token) if wants else None)
        row.append(token)
        result.rows.append(index)
        result.token_ids.append(token)

    def _draft(self, index: int, row: OracleRow, result: StepResult, most: int) -> int:
        """Guess some tokens, rightly or not; returns how many. What a wrong one leaves in its slot nobody may read."""
        drawn = hash_tokens((most, row.num_computed), row.hashes[-1])
        num_drafts = 0 if row.is_bad else (drawn >> 9) % (most + 1)
        num_true = (drawn >> 17) % (num_drafts + 1)
        for i in range(num_drafts):
            block, offset = self._slot(row, row.num_computed)
            if i >= num_true or self.is_bad(index, row):
                for position in range(row.num_computed, row.num_computed + num_drafts - i):
                    block, offset = self._slot(row, position)
                    self.kv[block][offset] = _GUESSED
                break
            self.kv[block][offset] = row.hashes[row.num_computed]
            row.num_computed += 1
            self._sample(index, row, result, is_finite=True)
        return num_drafts

    def _describe_prompt(self, index: int, row: OracleRow, count: int, result: StepResult) -> None:
        if row.params.prompt_logprobs is None:
            return
        first, end = row.num_computed + 1, min(row.num_computed + count + 1, row.prompt_len)
        if first < end:
            entries = [oracle_logprobs(row.hashes[i - 1], row.token_ids[i]) for i in range(first, end)]
            result.prompt_logprobs.append(RowPromptLogprobs(index, first, entries))

    def _apply(self, plan: StepPlan) -> None:
        for index in plan.freed_rows:
            self._row(index)
            del self.rows[index]
        for src, dst in zip(plan.copy_src, plan.copy_dst, strict=True):
            self.kv[dst] = list(self.kv[src])
        for new in plan.new_rows:
            if new.row in self.rows:
                raise OracleError(f"row {new.row} is taken")
            if not 0 <= new.num_computed_tokens < len(new.token_ids):
                raise OracleError("at least one token must be left to compute")
            self.rows[new.row] = OracleRow.of(new, self.salt_of(new))
        for row, block in zip(plan.grown_rows, plan.grown_blocks, strict=True):
            self._row(row).blocks.append(block)

    def _row(self, index: int) -> OracleRow:
        if index not in self.rows:
            raise OracleError(f"row {index} is not in use")
        return self.rows[index]

    def _slot(self, row: OracleRow, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._info.block_size)
        if index >= len(row.blocks):
            raise OracleError(f"position {position} of a row lies behind its {len(row.blocks)} blocks")
        return row.blocks[index], offset

    def _write(self, row: OracleRow, count: int) -> None:
        if row.num_computed + count > len(row.token_ids):
            raise OracleError("a plan computes tokens that do not exist")
        for position in range(row.num_computed, row.num_computed + count):
            block, offset = self._slot(row, position)
            self.kv[block][offset] = row.hashes[position]

    def _read(self, row: OracleRow, end: int) -> bool:
        """Check the history of `end` tokens; False if a slot of it is not finite, and that is allowed."""
        size, is_finite = self._info.block_size, True
        for i in range(-(-end // size)):
            wanted = row.hashes[i * size : min(end, (i + 1) * size)]
            found = self.kv[row.blocks[i]][: len(wanted)]
            if found == wanted:
                continue
            for offset, (have, want) in enumerate(zip(found, wanted, strict=True)):
                if have == NOT_FINITE and self.may_read_garbage(row):
                    is_finite = False
                elif have != want:
                    position = i * size + offset
                    raise OracleError(
                        f"block {row.blocks[i]} offset {offset} does not hold position {position} of this row"
                    )
        return is_finite
