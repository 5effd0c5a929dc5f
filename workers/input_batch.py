"""Everything the model and the sampler need for one step, complete when built from (states, plan).

Letters: T tokens of the step, N rows of the plan, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kernels.backend import AttentionMetadata
from novainfer.protocol.step import StepPlan
from workers.models.base import ForwardBatch
from workers.request_states import RequestStates
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
class InputBatch:
    """One step's inputs. `rows`, `num_new_tokens` and `sample_rows` stay on the host; tensors are on the device."""

    rows: IntArray  # [N], decodes first
    num_new_tokens: IntArray  # [N]
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    forward: ForwardBatch  # query_start_loc [N + 1], seq_lens [N], block_table [N, max_blocks], slot_mapping [T]
    sample_rows: IntArray  # [S], in the plan's order
    sample_row_index: Tensor  # [S] int64: sample_rows
    sample_hidden: Tensor  # [S] int64: indices in T of the hidden states that the sampled tokens follow
    prompt_spans: list[PromptSpan]

    @classmethod
    def build(cls, states: RequestStates, plan: StepPlan) -> InputBatch:
        """Read the rows that `plan` runs (at least one); `states.apply(plan)` has been called, nothing is written."""
        device, block_size = states.device, states.limits.block_size
        rows, counts = np.array(plan.rows, np.int64), np.array(plan.num_new_tokens, np.int64)
        computed = states.num_computed_tokens[rows]
        seq_lens = computed + counts
        query_start_loc = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_start_loc[1:])

        # Token t is the (t - query_start_loc[i])-th new token of its row rows[i].
        host_positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], counts)
        positions = to_device(host_positions, device)
        token_rows = to_device(np.repeat(rows, counts), device)
        row_index = to_device(rows, device)
        blocks = states.block_table[token_rows, positions // block_size]
        max_blocks = -(-int(seq_lens.max()) // block_size)

        samples = seq_lens == states.num_tokens[rows]
        sample_rows = rows[samples]
        return cls(
            rows=rows,
            num_new_tokens=counts,
            input_ids=states.token_ids[token_rows, positions].long(),
            positions=positions,
            forward=ForwardBatch(
                metadata=AttentionMetadata(
                    query_start_loc=to_device(query_start_loc.astype(np.int32), device),
                    seq_lens=to_device(seq_lens.astype(np.int32), device),
                    block_table=states.block_table[row_index, :max_blocks],
                    num_decodes=int((counts == 1).sum()),
                    max_query_len=int(counts.max()),
                    max_seq_len=int(seq_lens.max()),
                ),
                slot_mapping=blocks.long() * block_size + positions % block_size,
            ),
            sample_rows=sample_rows,
            sample_row_index=to_device(sample_rows, device),
            sample_hidden=to_device(query_start_loc[1:][samples] - 1, device),
            prompt_spans=_prompt_spans(states, rows, seq_lens, query_start_loc),
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
