"""What `prepare_decodes` and `append_tokens` of a backend do, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import DecodeInputs, PersistentRows


def prepare_decodes(step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
    """See `KernelBackend`."""
    row, position, index = step
    is_row = row >= 0
    row, position = row.clamp(min=0), position.where(is_row, 0)
    blocks = rows.block_table[row]
    out.input_ids.copy_(rows.token_ids[row, position].long().where(is_row, 0))
    out.positions.copy_(position)
    out.seq_lens.copy_((position + 1).where(is_row, 0))
    slots = blocks.gather(1, (position // block_size)[:, None])[:, 0].long() * block_size + position % block_size
    out.slot_mapping.copy_(slots.where(is_row, -1))
    out.block_table.copy_(blocks)
    sampling = out.sampling
    for number, found in zip((sampling.temperature, sampling.top_p, sampling.min_p), rows.floats[:, row], strict=True):
        number.copy_(found.where(is_row, 0.0))
    for number, found in zip((sampling.top_k, sampling.choice, sampling.seed), rows.integers[:, row], strict=True):
        number.copy_(found.where(is_row, 0))
    sampling.index.copy_(index)


def append_tokens(step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
    """See `KernelBackend`."""
    is_row = step[0] >= 0
    token_ids[step[0, is_row], step[1, is_row] + 1] = tokens[is_row].to(torch.int32)
