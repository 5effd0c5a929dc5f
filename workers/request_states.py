"""The persistent rows of a worker: one per running choice, changed only by the deltas of a `StepPlan`.

Tokens and block tables live on the device, so that a step reads the token that the step before it sampled without the
host knowing its value. Counts live on the host: they follow from the plans alone, whatever is sampled.

The plans come from our own scheduler. One that cannot be is a bug there: it raises `EngineError`, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.errors import EngineError
from novainfer.protocol.step import NewRow, StepPlan
from workers.row_sampling import IntArray, SamplingRows, to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """What the rows are bounded by."""

    max_num_seqs: int
    max_model_len: int  # tokens of a row, prompt and output
    max_num_batched_tokens: int  # tokens of a step
    num_blocks: int
    block_size: int  # tokens
    vocab_size: int  # width of the logits


class HostRows(NamedTuple):
    """`RequestStates.token_ids` and `block_table` for NumPy, which takes a third of the time that PyTorch does."""

    token_ids: npt.NDArray[np.int32]  # [max_num_seqs, max_model_len]
    block_table: npt.NDArray[np.int32]  # [max_num_seqs, blocks of a row]


class RequestStates:
    """Rows 0 .. max_num_seqs - 1. Written by `apply`, `append`, `advance`, once per step in that order, and `clear`."""

    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        rows = limits.max_num_seqs
        self.limits = limits
        self.device = device
        max_blocks = -(-limits.max_model_len // limits.block_size)
        # Never read beyond a row's counts, so left uninitialised: untouched pages cost a CPU nothing.
        self.token_ids = torch.empty(rows, limits.max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        # The same memory; None: it is not this process's own.
        self.host = HostRows(self.token_ids.numpy(), self.block_table.numpy()) if device.type == "cpu" else None
        self.in_use: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        # Host arrays [max_num_seqs]. Known tokens, those of them that are in the KV cache, prompt tokens, blocks held.
        self.num_tokens: IntArray = np.zeros(rows, np.int64)
        self.num_computed_tokens: IntArray = np.zeros(rows, np.int64)
        self.prompt_len: IntArray = np.zeros(rows, np.int64)
        self.num_row_blocks: IntArray = np.zeros(rows, np.int64)
        self.sampling = SamplingRows(rows, device)
        self.embedding: set[int] = set()  # rows in use that want no token but their hidden state: see `NewRow.embed`

    def apply(self, plan: StepPlan) -> None:
        """Free, take and extend rows as the plan says, and check that the plan can run. Raises `EngineError`."""
        for row in plan.freed_rows:
            self._check_in_use(row)
            self.in_use[row] = False
            self.embedding.discard(row)
            self.sampling.forget(row)
        for new in plan.new_rows:
            self._take(new)
        if len(plan.grown_rows) != len(plan.grown_blocks):
            raise EngineError(f"plan has {len(plan.grown_blocks)} blocks for {len(plan.grown_rows)} rows that grow")
        for row, block in zip(plan.grown_rows, plan.grown_blocks, strict=True):
            self._check_in_use(row)
            self._append_blocks(row, [block])
        self._check_copies(plan)
        self._check_work(plan)

    def clear(self) -> None:
        """Free every row: its owner is gone."""
        for row in np.flatnonzero(self.in_use).tolist():
            self.sampling.forget(row)
        self.in_use[:] = False
        self.embedding.clear()

    def append(self, rows: IntArray, token_ids: Tensor, ahead: IntArray | None = None) -> None:
        """Add the sampled token_ids [B] int64 (device) to `rows` [B].

        ahead [B]: how many tokens of the same row stand before each of these; None: no row has two.
        """
        positions = self.num_tokens[rows] if ahead is None else self.num_tokens[rows] + ahead
        if self.host is not None:
            self.host.token_ids[rows, positions] = token_ids.numpy()
        else:
            self.token_ids[to_device(rows, self.device), to_device(positions, self.device)] = token_ids.int()
        self.num_tokens[rows] = positions + 1

    def count_appended(self, rows: IntArray) -> None:
        """The device has appended a token to each of `rows` [B] itself."""
        self.num_tokens[rows] += 1

    def advance(self, rows: IntArray, num_new_tokens: IntArray) -> None:
        """The KV of the next num_new_tokens[i] tokens of rows[i] has been computed."""
        self.num_computed_tokens[rows] += num_new_tokens

    def output_len(self, rows: IntArray, ahead: IntArray | None = None) -> IntArray:
        """Number of output tokens of `rows` [B], which is the output index of the token they sample next.

        ahead [B]: how many drafts are taken for output tokens too.
        """
        known = self.num_tokens[rows] - self.prompt_len[rows]
        return known if ahead is None else known + ahead

    def output(self, row: int, start: int) -> list[int]:
        """Output tokens of a row from an index on. On a GPU the host waits for the newest of them."""
        first, end = int(self.prompt_len[row]) + start, int(self.num_tokens[row])
        ids: list[int] = self.token_ids[row, first:end].tolist() if first < end else []
        return ids

    def _take(self, new: NewRow) -> None:
        row, count = new.row, len(new.token_ids)
        if not 0 <= row < self.limits.max_num_seqs or self.in_use[row]:
            raise EngineError(f"plan gives row {row} to a new choice, but it does not exist or is in use")
        if not 1 <= new.prompt_len <= count <= self.limits.max_model_len:
            raise EngineError(f"row {row}: {count} tokens with a prompt of {new.prompt_len} do not fit")
        if not 0 <= new.num_computed_tokens < count:
            raise EngineError(f"row {row}: {new.num_computed_tokens} of {count} tokens cannot be computed already")
        tokens = np.array(new.token_ids, np.int64)
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise EngineError(f"row {row}: a token id is outside 0..{self.limits.vocab_size - 1}")
        self.sampling.set(new)
        self.in_use[row] = True
        if new.embed:
            self.embedding.add(row)
        self.num_tokens[row] = count
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.prompt_len[row] = new.prompt_len
        self.num_row_blocks[row] = 0
        self.token_ids[row, :count] = to_device(tokens.astype(np.int32), self.device)
        self._append_blocks(row, new.block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        if not block_ids:
            return
        self._check_blocks(block_ids)
        start = int(self.num_row_blocks[row])
        end = start + len(block_ids)
        if end > self.block_table.shape[1]:
            raise EngineError(f"row {row}: {end} blocks are more than {self.limits.max_model_len} tokens need")
        self.block_table[row, start:end] = to_device(np.array(block_ids, np.int32), self.device)
        self.num_row_blocks[row] = end

    def _check_in_use(self, row: int) -> None:
        if not 0 <= row < self.limits.max_num_seqs or not self.in_use[row]:
            raise EngineError(f"plan names row {row}, which is not in use")

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        if min(block_ids) < 0 or max(block_ids) >= self.limits.num_blocks:
            raise EngineError(f"a block id is outside 0..{self.limits.num_blocks - 1}")

    def _check_copies(self, plan: StepPlan) -> None:
        if len(plan.copy_src) != len(plan.copy_dst) or len(set(plan.copy_dst)) != len(plan.copy_dst):
            raise EngineError("plan's block copies do not pair up")
        if plan.copy_src:
            self._check_blocks(plan.copy_src)
            self._check_blocks(plan.copy_dst)

    def _check_work(self, plan: StepPlan) -> None:
        rows, counts = np.array(plan.rows, np.int64), np.array(plan.num_new_tokens, np.int64)
        if len(rows) != len(counts) or len(set(plan.rows)) != len(rows):
            raise EngineError("plan's rows are not distinct, each with its number of tokens")
        if not len(rows):
            return
        if rows.min() < 0 or rows.max() >= self.limits.max_num_seqs or not self.in_use[rows].all():
            raise EngineError("plan runs a row that is not in use")
        total, least = int(counts.sum()), int(counts.min())
        ends, num_tokens = self.num_computed_tokens[rows] + counts, self.num_tokens[rows]
        samples = ends == num_tokens
        if len(plan.num_drafts):
            drafts = np.zeros_like(counts)
            drafts[: len(plan.num_drafts)] = plan.num_drafts[: len(counts)]
            if drafts.any() and (self.device.type != "cpu" or not samples[drafts > 0].all()):
                raise EngineError("plan has drafts for rows that do not sample, or whose tokens are not on the host")
            least, total = min(least, 1 + int(drafts.min())), total + int(drafts.sum())
        else:
            drafts = None
        if least < 1 or total > self.limits.max_num_batched_tokens:
            raise EngineError(f"plan computes {total} tokens, at most {self.limits.max_num_batched_tokens} fit")
        if total != len(rows) and (np.diff((counts == 1).astype(np.int8)) > 0).any():
            raise EngineError("plan does not name its decodes first")
        if (ends > num_tokens).any():
            raise EngineError("plan computes tokens that a row does not have")
        if drafts is not None:
            ends += drafts
        if (ends > self.num_row_blocks[rows] * self.limits.block_size).any():
            raise EngineError("plan computes tokens that a row has no block for")
        if ends.max() >= self.limits.max_model_len and not self.embedding.issuperset(
            rows[samples & (ends >= self.limits.max_model_len)].tolist()
        ):
            raise EngineError(f"plan samples a token beyond max_model_len ({self.limits.max_model_len})")
