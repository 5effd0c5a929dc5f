"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_rotary


def rotary(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor,  # [max_position, 2, rotary_dim // 2] float32
) -> None:
    """Rotate the first rotary_dim elements of every head of query and key, in place."""
    half = check_rotary(query, key, positions, cos_sin)
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)  # each [num_tokens, 1, half]
    for heads in (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., : 2 * half] = rotated.to(heads.dtype)
