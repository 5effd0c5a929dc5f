# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""All between the projection and attention in one launch: a program takes some heads of one token.

Queries are normalised and rotated in place; keys too, but on their way into the cache; values go there as they are. A
row's numbers are summed in three parts (the two halves that are rotated, and the rest), which is not the order of the
norm kernel: the last bit may differ from that of the kernels one after another. It depends on the row alone all the
same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import AttentionInput
from kernels.kv_store.reference import is_float8
from kernels.triton_float8 import to_float8
from kernels.triton_launch import next_power_of_2

_HEADS_AT_ONCE = 8


@triton.jit
def _normed(value, scale, weight_at, columns, mask, weight_offset, dtype: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """value [HEADS, BLOCK] float32 times scale [HEADS, 1] and weight, rounded as `kernels.rms_norm` does."""
    weight = tl.load(weight_at + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        value = value * scale * (weight_offset + weight)
    else:
        value = (value * scale).to(dtype).to(tl.float32) * weight
    return value.to(dtype).to(tl.float32)


@triton.jit
def _store(at, value, mask, FLOAT8: tl.constexpr):
    """Into the cache, whose numbers may be smaller."""
    if FLOAT8:
        tl.store(at, to_float8(value.to(tl.float32)), mask=mask)
    else:
        tl.store(at, value, mask=mask)


@triton.jit
def _input_kernel(
    heads,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    query_weight,  # [HEAD_DIM]; unused without HAS_NORM
    key_weight,
    positions,  # [num_tokens] int64
    cos_sin,  # [max_position, 2, HALF] float32
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache,
    slot_mapping,  # [num_tokens] int64
    token_stride,
    head_stride,
    eps,
    weight_offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of what is rotated
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # at once
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # of what is not; at least 1
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    dtype = heads.dtype.element_ty
    pairs, others = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_half, in_rest = is_head & (pairs < HALF), is_head & (others < HEAD_DIM)
    row = heads + token * token_stride + head * head_stride
    first = tl.load(row + pairs, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(row + HALF + pairs, mask=in_half, other=0.0).to(tl.float32)
    rest = tl.load(row + others, mask=in_rest, other=0.0).to(tl.float32)
    # Values go through nothing of this, as zeros.
    new_first, new_second = tl.where(is_value, 0.0, first), tl.where(is_value, 0.0, second)
    new_rest = tl.where(is_value, 0.0, rest)
    if HAS_NORM:
        squares = tl.sum(new_first * new_first, axis=1) + tl.sum(new_second * new_second, axis=1)
        squares += tl.sum(new_rest * new_rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.where(is_query, query_weight, key_weight)
        new_first = _normed(new_first, scale, weight, pairs, in_half, weight_offset, dtype, HAS_OFFSET)
        new_second = _normed(new_second, scale, weight, HALF + pairs, in_half, weight_offset, dtype, HAS_OFFSET)
        new_rest = _normed(new_rest, scale, weight, others, in_rest, weight_offset, dtype, HAS_OFFSET)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    turned = new_first * cos - new_second * sin
    new_second = new_second * cos + new_first * sin
    first = tl.where(is_value, first, turned).to(dtype)
    second = tl.where(is_value, second, new_second).to(dtype)
    rest = tl.where(is_value, rest, new_rest).to(dtype)
    tl.store(row + pairs, first, mask=in_half & is_query)
    tl.store(row + HALF + pairs, second, mask=in_half & is_query)
    tl.store(row + others, rest, mask=in_rest & is_query)
    slot = tl.load(slot_mapping + token)
    # -1 keeps a token out of the cache.
    is_stored = (head >= NUM_HEADS) & (head * 0 + slot >= 0)
    in_half, in_rest = in_half & is_stored, in_rest & is_stored
    kv_head = head % NUM_KV_HEADS  # of which there are a whole number of times as many before it
    at = ((slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    target = tl.where(is_value, value_cache, key_cache) + at
    _store(target + pairs, first, in_half, FLOAT8)
    _store(target + HALF + pairs, second, in_half, FLOAT8)
    _store(target + others, rest, in_rest, FLOAT8)


def attention_input(heads: Tensor, given: AttentionInput) -> Tensor:
    """See `KernelBackend.attention_input`."""
    num_tokens, all_heads, head_dim = heads.shape
    half, norms = given.cos_sin.shape[2], given.norms
    query = heads[:, : given.num_heads]
    if num_tokens == 0:
        return query
    at_once = min(_HEADS_AT_ONCE, next_power_of_2(all_heads))
    _input_kernel[(num_tokens, triton.cdiv(all_heads, at_once))](
        heads,
        heads if norms is None else norms.query_weight,
        heads if norms is None else norms.key_weight,
        given.positions,
        given.cos_sin,
        given.key_cache,
        given.value_cache,
        given.slot_mapping,
        heads.stride(0),
        heads.stride(1),
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.weight_offset,
        NUM_HEADS=given.num_heads,
        NUM_KV_HEADS=(all_heads - given.num_heads) // 2,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=given.key_cache.shape[2],
        HEADS=at_once,
        BLOCK_HALF=next_power_of_2(max(half, 1)),
        BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)),
        HAS_NORM=norms is not None,
        HAS_OFFSET=norms is not None and norms.weight_offset != 0.0,
        FLOAT8=is_float8(given.key_cache),
        num_warps=2,
        enable_fp_fusion=False,
    )
    return query
