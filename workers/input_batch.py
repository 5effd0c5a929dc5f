"""Everything the model and the sampler need for one step, complete when built from (states, plan).

Letters: T tokens of the step, drafts included; N rows of the plan; S places to sample at, one of each row that samples
and one more for each of its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata
from novainfer.protocol.step import StepPlan
from workers.models.base import ForwardBatch, KeptTokens
from workers.request_states import HostRows, RequestStates
from workers.row_sampling import IntArray, to_device


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens of one row whose log-probabilities this step finds: start, start + 1, ... start + count - 1."""

    row: int
    start: int  # position of the first such token; the hidden state before it predicts it
    count: int
    first_hidden: int  # index in T of the hidden state at position start - 1
    num_top: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step computes and where it samples, as far as the host knows it."""

    rows: IntArray  # [N], those with one token first, drafts included
    num_new_tokens: IntArray  # [N], drafts aside
    seq_lens: IntArray  # [N], with the tokens of this step
    query_start_loc: IntArray  # [N + 1]: token t is the (t - query_start_loc[i])-th new token of its row rows[i]
    token_rows: IntArray  # [T]
    positions: IntArray  # [T]
    sampling: IntArray  # [S]: which of `rows` samples there
    sample_ahead: IntArray | None  # [S]: how many of its row's drafts stand before the place; None: there are no drafts
    sample_hidden: IntArray  # [S]: which of the T hidden states the sampled tokens follow
    prompt_spans: list[PromptSpan]

    @classmethod
    def of(cls, states: RequestStates, plan: StepPlan, num_drafts: IntArray | None = None) -> StepRows:
        """Read the rows that `plan` runs (at least one); `states.apply(plan)` has been called, nothing is written.

        num_drafts [N]: how many drafts stand behind the known tokens of each row; None: nowhere any.
        """
        rows, num_new = np.array(plan.rows, np.int64), np.array(plan.num_new_tokens, np.int64)
        place, counts = np.arange(len(rows)), num_new  # of each row of the plan in the batch
        if num_drafts is not None:
            counts = num_new + num_drafts
            order = np.argsort(counts > 1, kind="stable")
            place[order] = np.arange(len(rows))
            rows, num_new, counts = rows[order], num_new[order], counts[order]
        computed = states.num_computed_tokens[rows]
        seq_lens = computed + counts
        query_start_loc = np.arange(len(rows) + 1)
        token_rows, positions = rows, computed
        if len(rows) != counts.sum():
            np.cumsum(counts, out=query_start_loc[1:])
            token_rows = np.repeat(rows, counts)
            positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], counts)
        samples = (computed + num_new == states.num_tokens[rows])[place]
        sampling = place[samples]
        hidden, ahead = query_start_loc[sampling] + num_new[sampling] - 1, None
        if num_drafts is not None:
            sampling, hidden, ahead = _with_drafts(sampling, hidden, num_drafts[samples])
        return cls(
            rows=rows,
            num_new_tokens=num_new,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            token_rows=token_rows,
            positions=positions,
            sampling=sampling,
            sample_ahead=ahead,
            sample_hidden=hidden,
            prompt_spans=_prompt_spans(states, rows, seq_lens, query_start_loc),
        )

    @property
    def sample_rows(self) -> IntArray:
        """[S], in the plan's order, the places of one row next to each other."""
        return self.rows[self.sampling]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of a step on the device."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    forward: ForwardBatch  # query_start_loc [N + 1], seq_lens [N], block_table [N, max_blocks], slot_mapping [T]
    sample_hidden: Tensor | None  # [S] int64: which of the model's hidden states the sampled tokens follow; None: all

    @classmethod
    def build(cls, states: RequestStates, step: StepRows) -> InputBatch:
        """Nothing is written."""
        table_width = -(-int(step.seq_lens.max()) // states.limits.block_size)
        make = _on_device if states.host is None else partial(_on_host, states.host)
        ids, positions, slots, table = make(states, step, table_width)
        # Without drafts and log-probabilities of prompts nothing counts but one hidden state of each row that samples.
        last, kept, are_last = step.sample_hidden, None, step.sample_ahead is None and not step.prompt_spans
        if are_last and len(last) < len(step.positions):
            kept = _last_tokens(last, step.seq_lens[step.sampling], _rows_of(table, step.sampling))
        return cls(
            input_ids=ids,
            positions=positions,
            forward=ForwardBatch(_metadata(step.query_start_loc, step.seq_lens, table), slots, kept),
            sample_hidden=None if are_last else to_device(last, states.device),
        )


def _on_host(host: HostRows, states: RequestStates, step: StepRows, table_width: int) -> tuple[Tensor, ...]:
    """Token ids [T], positions [T], slots [T], all int64, and block table [N, table_width]."""
    blocks, offsets = np.divmod(step.positions, states.limits.block_size)
    slots = host.block_table[step.token_rows, blocks].astype(np.int64) * states.limits.block_size + offsets
    ids = host.token_ids[step.token_rows, step.positions].astype(np.int64)
    table = host.block_table[step.rows, :table_width]
    return torch.from_numpy(ids), torch.from_numpy(step.positions), torch.from_numpy(slots), torch.from_numpy(table)


def _on_device(states: RequestStates, step: StepRows, table_width: int) -> tuple[Tensor, ...]:
    """The same of rows that are on another device."""
    device, block_size = states.device, states.limits.block_size
    token_rows, positions = to_device(step.token_rows, device), to_device(step.positions, device)
    rows = token_rows if step.token_rows is step.rows else to_device(step.rows, device)
    blocks = states.block_table[token_rows, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    return states.token_ids[token_rows, positions].long(), positions, slots, states.block_table[rows, :table_width]


def _rows_of(table: Tensor, index: IntArray) -> Tensor:
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy()[index])
    return table[to_device(index, table.device)]


def _with_drafts(sampling: IntArray, hidden: IntArray, num_drafts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Both [rows that sample], again for each draft: [S]; and how many drafts of its row stand before each place."""
    num_places = num_drafts + 1
    ahead = np.arange(num_places.sum()) - np.repeat(np.cumsum(num_places) - num_places, num_places)
    return np.repeat(sampling, num_places), np.repeat(hidden, num_places) + ahead, ahead


def _last_tokens(index: IntArray, seq_lens: IntArray, block_table: Tensor) -> KeptTokens:
    """One of each sequence."""
    metadata = _metadata(np.arange(len(seq_lens) + 1), seq_lens, block_table)
    return KeptTokens(to_device(index, block_table.device), metadata)


def _metadata(query_start_loc: IntArray, seq_lens: IntArray, block_table: Tensor) -> AttentionMetadata:
    device, counts = block_table.device, np.diff(query_start_loc)
    return AttentionMetadata(
        query_start_loc=to_device(query_start_loc.astype(np.int32), device),
        seq_lens=to_device(seq_lens.astype(np.int32), device),
        block_table=block_table,
        num_decodes=int((counts == 1).sum()),
        max_query_len=int(counts.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )


def _prompt_spans(
    states: RequestStates, rows: IntArray, seq_lens: IntArray, query_start_loc: IntArray
) -> list[PromptSpan]:
    """The prompt tokens to report; a prompt's first token has no probability, nor has one computed before its row."""
    num_top = states.sampling.num_prompt_logprobs[rows]
    spans: list[PromptSpan] = []
    for i in np.flatnonzero(num_top >= 0):
        row = int(rows[i])
        start = int(states.num_computed_tokens[row]) + 1
        end = min(int(seq_lens[i]) + 1, int(states.prompt_len[row]))
        if end > start:
            spans.append(PromptSpan(row, start, end - start, int(query_start_loc[i]), int(num_top[i])))
    return spans
