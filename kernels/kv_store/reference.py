"""KV store in plain torch. Cache layout: [num_blocks, block_size, num_kv_heads, head_dim]."""

from __future__ import annotations

from torch import Tensor

from kernels.checks import check_shape


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64, -1 = skip
) -> None:
    """Write every token whose slot is not -1 into both caches, in place."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, [num_tokens, num_kv_heads, head_dim])
    check_shape("key_cache", key_cache, [None, None, num_kv_heads, head_dim])
    check_shape("value_cache", value_cache, list(key_cache.shape))
    check_shape("slot_mapping", slot_mapping, [num_tokens])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    key_cache.view(-1, num_kv_heads, head_dim)[slots] = key[kept].to(key_cache.dtype)
    value_cache.view(-1, num_kv_heads, head_dim)[slots] = value[kept].to(value_cache.dtype)
