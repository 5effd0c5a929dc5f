"""An executor without a model: token = H(history, seed, choice, index), and a KV cache that is checked on reading.

Every slot holds the hash of the history up to it. Before a row computes a token, all earlier slots in its block
table must hold exactly that row's history, so a stale, shared or misplaced block fails at once; and since the
token depends on the whole history, a lost, doubled or swapped token shows in everything after it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.step import NewRow, StepPlan, StepResult
from novainfer.sampling.params import SamplingParams


def history_hash(previous: int, token_id: int) -> int:
    data = previous.to_bytes(8, "little") + token_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def oracle_token(history: int, seed: int, choice: int, index: int, vocab_size: int) -> int:
    data = f"{history}/{seed}/{choice}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % vocab_size


def oracle_stream(
    prompt: list[int], params: SamplingParams, choice: int, stops: set[int], vocab_size: int
) -> list[int]:
    """The output of a choice, without any engine."""
    history = 0
    for token_id in prompt:
        history = history_hash(history, token_id)
    output: list[int] = []
    while len(output) < params.max_tokens:
        token_id = oracle_token(history, params.seed or 0, choice, len(output), vocab_size)
        output.append(token_id)
        if token_id in stops and len(output) > params.min_tokens:
            break
        history = history_hash(history, token_id)
    return output


@dataclass
class _Row:
    token_ids: list[int]
    hashes: list[int]
    prompt_len: int
    num_computed: int
    blocks: list[int]
    params: SamplingParams
    choice: int

    @classmethod
    def of(cls, new: NewRow) -> _Row:
        row = cls([], [], new.prompt_len, new.num_computed_tokens, list(new.block_ids), new.params, new.choice)
        for token_id in new.token_ids:
            row.append(token_id)
        return row

    def append(self, token_id: int) -> None:
        self.hashes.append(history_hash(self.hashes[-1] if self.hashes else 0, token_id))
        self.token_ids.append(token_id)


class OracleExecutor:
    """Implements `Executor`; `plans` keeps every plan for assertions."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
    ) -> None:
        self._info = ExecutorInfo(
            epoch=1,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )
        self.kv: list[list[int]] = [[0] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.plans: list[StepPlan] = []
        self.bad_rows: set[int] = set()  # rows to report as not finite in the next step
        self._queue: deque[StepPlan] = deque()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._queue.append(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        return self._execute(self._queue.popleft()) if self._queue else None

    def close(self) -> None:
        self._queue.clear()

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        order = plan.num_new_tokens
        if any(a > 1 and b == 1 for a, b in pairwise(order)):
            raise EngineError("rows with one token must come first")
        sampled: list[tuple[int, int]] = []
        # All rows write before any row reads, as the layers do.
        for index, count in zip(plan.rows, plan.num_new_tokens, strict=True):
            self._write(self.rows[index], count)
        for index, count in zip(plan.rows, plan.num_new_tokens, strict=True):
            row = self.rows[index]
            self._check_history(row, row.num_computed + count)
            row.num_computed += count
            if row.num_computed == len(row.token_ids):
                output_index = len(row.token_ids) - row.prompt_len
                token = oracle_token(
                    row.hashes[-1], row.params.seed or 0, row.choice, output_index, self._info.vocab_size
                )
                row.append(token)
                sampled.append((index, token))
        bad = [index for index, _ in sampled if index in self.bad_rows]
        return StepResult(plan.epoch, plan.step, [r for r, _ in sampled], [t for _, t in sampled], bad_rows=bad)

    def _apply(self, plan: StepPlan) -> None:
        for index in plan.freed_rows:
            del self.rows[index]
        for src, dst in zip(plan.copy_src, plan.copy_dst, strict=True):
            self.kv[dst] = list(self.kv[src])
        for new in plan.new_rows:
            if new.row in self.rows:
                raise EngineError(f"row {new.row} is taken")
            if not 0 <= new.num_computed_tokens < len(new.token_ids):
                raise EngineError("at least one token must be left to compute")
            self.rows[new.row] = _Row.of(new)
        for grown in plan.new_blocks:
            self.rows[grown.row].blocks.extend(grown.block_ids)

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        size = self._info.block_size
        return row.blocks[position // size], position % size

    def _write(self, row: _Row, count: int) -> None:
        if row.num_computed + count > len(row.token_ids):
            raise EngineError("a plan computes tokens that do not exist")
        for position in range(row.num_computed, row.num_computed + count):
            block, offset = self._slot(row, position)
            self.kv[block][offset] = row.hashes[position]

    def _check_history(self, row: _Row, end: int) -> None:
        for position in range(end):
            block, offset = self._slot(row, position)
            if self.kv[block][offset] != row.hashes[position]:
                raise EngineError(f"block {block} offset {offset} does not hold position {position} of this row")
