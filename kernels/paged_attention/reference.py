"""Paged attention in plain torch: the executable definition that the fast kernels are tested against.

Cache layout: see `kernels.kv_store.reference`. Every query row is computed by itself in float64 with shapes that
depend on its position alone, so its bits depend neither on the batch nor on how the prompt was chunked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.checks import check_metadata, check_shape
from kernels.kv_store.reference import dequantize, is_quantized, row_width


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, row_width]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, row_width]
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: Tensor | None = None,  # [num_tokens, num_heads, head_dim]
) -> Tensor:
    """Returns [num_tokens, num_heads, head_dim] in the query's dtype; rows that no sequence owns are zero."""
    num_tokens, num_heads, head_dim = query.shape
    check_shape("key_cache", key_cache, [None, None, None, row_width(head_dim, key_cache.dtype)])
    check_shape("value_cache", value_cache, list(key_cache.shape))
    check_metadata(metadata, num_tokens)
    if num_heads % key_cache.shape[2]:
        raise ValueError(f"{num_heads} query heads do not divide into {key_cache.shape[2]} key/value heads")
    result = torch.zeros(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    starts = metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        if seq_len == 0:
            continue
        keys = _gather(key_cache, metadata.block_table[seq], seq_len)
        values = _gather(value_cache, metadata.block_table[seq], seq_len)
        for row in range(starts[seq], starts[seq + 1]):
            end = seq_len - (starts[seq + 1] - row) + 1
            start = 0 if params.sliding_window is None else max(0, end - params.sliding_window)
            result[row] = _attend(query[row], keys[start:end], values[start:end], params).to(query.dtype)
    return result if out is None else out.copy_(result)


def _gather(cache: Tensor, block_ids: Tensor, seq_len: int) -> Tensor:
    """The first seq_len tokens that `block_ids` [max_blocks] name: [seq_len, num_kv_heads, head_dim], dequantised.

    The table may name no block any more for tokens that left the sliding window; those rows are never used.
    """
    block_size = cache.shape[1]
    blocks = block_ids[: -(-seq_len // block_size)].long().clamp(0, cache.shape[0] - 1)
    rows = cache[blocks].flatten(0, 1)[:seq_len]
    return dequantize(rows) if is_quantized(cache) else rows


def _attend(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """One query row [H, D] over keys and values [S, Hkv, D] -> [H, D] float64."""
    num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.double().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("hgd,shd->hgs", grouped, keys.double()) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    if params.sinks is not None:  # one more key, without a value
        sinks = params.sinks.double().view(num_kv_heads, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hgs,shd->hgd", weights, values.double()).reshape(num_heads, head_dim)
