# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Rotary embedding in Triton: one program per token, all heads of query and key."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import next_power_of_2, warps_for


@triton.jit
def _rotate(
    heads_base,  # pointer to [NUM_HEADS, head_dim] of one token
    head_stride,
    cos,  # [1, BLOCK_HALF] float32
    sin,  # [1, BLOCK_HALF] float32
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_H)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (pairs < HALF)
    first_at = heads_base + heads * head_stride + pairs
    first = tl.load(first_at, mask=mask).to(tl.float32)
    second = tl.load(first_at + HALF, mask=mask).to(tl.float32)
    tl.store(first_at, (first * cos - second * sin).to(heads_base.dtype.element_ty), mask=mask)
    tl.store(first_at + HALF, (second * cos + first * sin).to(heads_base.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    query,  # [num_tokens, NUM_HEADS, head_dim]
    key,  # [num_tokens, NUM_KV_HEADS, head_dim]
    positions,  # [num_tokens] int64
    cos_sin,  # [max_position, 2, HALF] float32
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    row = cos_sin + tl.load(positions + token) * (2 * HALF) + pairs
    cos = tl.load(row, mask=pairs < HALF)
    sin = tl.load(row + HALF, mask=pairs < HALF)
    _rotate(query + token * query_stride, query_head_stride, cos, sin, NUM_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    _rotate(key + token * key_stride, key_head_stride, cos, sin, NUM_KV_HEADS, HALF, BLOCK_KV_H, BLOCK_HALF)


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate query [T, H, D] and key [T, Hkv, D] in place; see `KernelBackend.rotary`."""
    num_tokens, num_heads, _ = query.shape
    half = cos_sin.shape[2]
    if num_tokens == 0 or half == 0:
        return
    block_h, block_half = next_power_of_2(num_heads), next_power_of_2(half)
    _rotary_kernel[(num_tokens,)](
        query,
        key,
        positions,
        cos_sin,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=key.shape[1],
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_KV_H=next_power_of_2(key.shape[1]),
        BLOCK_HALF=block_half,
        num_warps=warps_for(block_h * block_half),
        enable_fp_fusion=False,
    )
