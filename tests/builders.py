"""Builders of the records that a scheduler sends to its workers, and of runners without a checkpoint around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels.backend import KernelBackend
from novainfer.config import CacheConfig
from novainfer.protocol.columns import column
from novainfer.protocol.step import NewRow, StepPlan, StepResult
from novainfer.sampling.params import SamplingParams
from workers.graphs import Record
from workers.kv_cache import KVCache
from workers.model_runner import ModelRunner
from workers.models.base import CausalLM
from workers.request_states import RequestStates, RowLimits
from workers.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
BLOCK_SIZE = 16
VOCAB_SIZE = 64  # of states that have no model

_ROW_FIELDS = ("prompt_len", "num_computed_tokens", "choice", "stop_token_ids", "embed")


def new_row(row: int, token_ids: Sequence[int], block_ids: Sequence[int], **fields: Any) -> NewRow:
    """A row that is all prompt, greedy with seed 0; `fields` are NewRow's or SamplingParams' own."""
    own = {name: fields.pop(name) for name in _ROW_FIELDS if name in fields}
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, **fields})
    defaults = {"prompt_len": len(token_ids), "num_computed_tokens": 0, "choice": 0}
    return NewRow(row=row, token_ids=column(token_ids), block_ids=list(block_ids), params=params, **{**defaults, **own})


def limits(**values: int) -> RowLimits:
    """Small limits; any of them may be given."""
    defaults = {
        "max_num_seqs": 8,
        "max_model_len": 128,
        "max_num_batched_tokens": 512,
        "num_blocks": 64,
        "block_size": BLOCK_SIZE,
        "vocab_size": VOCAB_SIZE,
    }
    return RowLimits(**{**defaults, **values})


def make_runner(
    model: CausalLM,
    kernels: KernelBackend,
    *,
    kv_cache_dtype: str = "auto",
    record: Record | None = None,
    **values: int,
) -> ModelRunner:
    """A runner on the CPU with empty rows and a zeroed cache."""
    row_limits = limits(**{"vocab_size": model.spec.vocab_size, **values})
    config = CacheConfig(block_size=row_limits.block_size, kv_cache_dtype=kv_cache_dtype)
    cache = KVCache.allocate(model, kernels, row_limits.num_blocks, config, CPU)
    return ModelRunner(model, kernels, TensorParallel.single(), RequestStates(row_limits, CPU), cache, record)


class PlanWriter:
    """Writes plans as a scheduler would: numbers the steps, hands out blocks, puts decodes first.

    Blocks are handed out in order and never again; `first_block` keeps two writers apart.
    """

    def __init__(self, *, epoch: int = 1, block_size: int = BLOCK_SIZE, first_block: int = 0) -> None:
        self._epoch = epoch
        self._block_size = block_size
        self._next_block = first_block
        self._step = 0
        self._ends: dict[int, int] = {}  # row -> tokens computed after the last plan
        self._capacity: dict[int, int] = {}  # row -> tokens its blocks hold
        self._new: list[NewRow] = []
        self._freed: list[int] = []

    def add(self, row: int, token_ids: Sequence[int], **fields: Any) -> None:
        """The next plan gives `row` to a choice. See `new_row`."""
        computed = fields.get("num_computed_tokens", 0)
        self._ends[row] = computed
        blocks = fields.pop("block_ids", None) or self._take_blocks(computed)
        self._capacity[row] = len(blocks) * self._block_size
        self._new.append(new_row(row, token_ids, blocks, **fields))

    def free(self, row: int) -> None:
        """The next plan frees `row`."""
        self._freed.append(row)

    def plan(self, work: Mapping[int, int], **fields: Any) -> StepPlan:
        """Compute work[row] tokens of each row; what `add` and `free` announced goes with it."""
        order = sorted(work, key=lambda row: work[row] != 1)
        grown_rows, grown_blocks = [], []
        for row in order:
            self._ends[row] += work[row]
            missing = self._take_blocks(self._ends[row] - self._capacity[row])
            self._capacity[row] += len(missing) * self._block_size
            grown_rows += [row] * len(missing)
            grown_blocks += missing
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            rows=column(order),
            num_new_tokens=column([work[row] for row in order]),
            freed_rows=self._freed,
            new_rows=self._new,
            grown_rows=column(grown_rows),
            grown_blocks=column(grown_blocks),
            **fields,
        )
        self._step += 1
        self._new, self._freed = [], []
        return plan

    def _take_blocks(self, num_tokens: int) -> list[int]:
        count = max(0, -(-num_tokens // self._block_size))
        start, self._next_block = self._next_block, self._next_block + count
        return list(range(start, self._next_block))


def execute(runner: ModelRunner, plan: StepPlan) -> StepResult:
    """Run a plan on rank 0."""
    result = runner.execute(plan)
    assert result is not None
    return result


def generate(runner: ModelRunner, writer: PlanWriter, row: int, count: int, *, chunk: int = 512) -> list[int]:
    """Prefill `row` in chunks and sample `count` tokens; nothing else runs."""
    states = runner.states
    tokens: list[int] = []
    plan = writer.plan({})
    execute(runner, plan)
    while len(tokens) < count:
        left = int(states.num_tokens[row] - states.num_computed_tokens[row])
        tokens += execute(runner, writer.plan({row: min(left, chunk)})).token_ids
    return tokens
