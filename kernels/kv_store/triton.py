# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""KV store in Triton: one program per token. Cache layout: [num_blocks, num_kv_heads, block_size, head_dim]."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_store.reference import is_float8
from kernels.triton_float8 import to_float8
from kernels.triton_launch import next_power_of_2, warps_for


@triton.jit
def _store_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,  # [num_tokens, num_kv_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping,  # [num_tokens] int64
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    row = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    cache_at = row * HEAD_DIM + dims
    keys = tl.load(key + token * key_stride + heads * key_head_stride + dims, mask=mask)
    values = tl.load(value + token * value_stride + heads * value_head_stride + dims, mask=mask)
    if FLOAT8:
        keys, values = to_float8(keys.to(tl.float32)), to_float8(values.to(tl.float32))
    tl.store(key_cache + cache_at, keys, mask=mask)
    tl.store(value_cache + cache_at, values, mask=mask)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key, value [T, Hkv, D] to their slots [T] int64 in both caches, in place; slot -1 skips a token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    block_h, block_d = next_power_of_2(num_kv_heads), next_power_of_2(head_dim)
    _store_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=key_cache.shape[2],
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        FLOAT8=is_float8(key_cache),
        num_warps=warps_for(block_h * block_d),
        enable_fp_fusion=False,
    )
