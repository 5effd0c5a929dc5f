"""Paged attention by the native kernel, over the block table and the packed cache of `kernels.kv_store.cpu`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.checks import check_dtype, check_last_dim_contiguous, check_metadata, check_shape
from kernels.kv_store.cpu import cache_geometry
from kernels.kv_store.reference import is_quantized
from kernels.native.library import DTYPES, LANES, NativeLibrary, last_dim_contiguous


class AttentionArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/attention_rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "out", "key_cache", "value_cache")),
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_table")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("out_token_stride", "out_head_stride", "table_stride", "table_width")),
        *((name, ctypes.c_int64) for name in ("dtype", "num_tokens", "num_seqs", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "padded_dim", "num_blocks", "block_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        ("quantized", ctypes.c_int64),
    ]


def attention_arguments(
    query: Tensor, out: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams
) -> AttentionArguments:
    """For the kernel, but for the sequences; the caller keeps the tensors. Raises ValueError for sinks."""
    if params.sinks is not None:
        raise ValueError("kernel backend 'cpu' has no attention sinks")
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, padded_dim = cache_geometry(value_cache)
    return AttentionArguments(
        *(query.data_ptr(), out.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), 0, 0, 0),
        *query.stride()[:2],
        *out.stride()[:2],
        *(0, 0, DTYPES[query.dtype], num_tokens, 0, num_heads, num_kv_heads),
        *(head_dim, padded_dim, num_blocks, block_size, params.sliding_window or 0),
        *(params.scale, params.soft_cap or 0.0, is_quantized(value_cache)),
    )


def paged_attention(
    library: NativeLibrary,
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: Tensor | None = None,  # [num_tokens, num_heads, head_dim]
) -> Tensor:
    """Returns [num_tokens, num_heads, head_dim] in the query's dtype. Rows that no sequence owns become zero.

    Raises IndexError if a sequence sees a block that the cache does not have.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, _, num_kv_heads, padded_dim = cache_geometry(value_cache)
    if not is_usual(metadata):
        check_metadata(metadata, num_tokens)
    check_dtype("query", query, *(DTYPES if is_quantized(key_cache) else (key_cache.dtype,)))
    if num_heads % num_kv_heads or not padded_dim - LANES < head_dim <= padded_dim:
        raise ValueError(
            f"query {list(query.shape)} does not fit a cache of {num_kv_heads} heads of up to {padded_dim}"
        )
    if params.sliding_window is not None and params.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {params.sliding_window}")
    query = last_dim_contiguous(query)
    out = _output(query, out)
    arguments = attention_arguments(query, out, key_cache, value_cache, params)
    arguments.query_start_loc = metadata.query_start_loc.data_ptr()
    arguments.seq_lens = metadata.seq_lens.data_ptr()
    arguments.block_table = metadata.block_table.data_ptr()
    arguments.table_stride = metadata.block_table.stride(0)
    arguments.table_width = metadata.block_table.shape[1]
    arguments.num_seqs = metadata.seq_lens.shape[0]
    if library.paged_attention(ctypes.addressof(arguments), torch.get_num_threads()):
        raise IndexError(
            "a sequence has more rows than the query, or fewer blocks than its length, or a block outside the cache"
        )
    return out


def _output(query: Tensor, out: Tensor | None) -> Tensor:
    """`out` if it fits the query, or a new tensor."""
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype)
    check_shape("out", out, query.shape)
    check_dtype("out", out, query.dtype)
    check_last_dim_contiguous("out", out)
    return out


def is_usual(metadata: AttentionMetadata) -> bool:
    """A quick look that complete metadata passes; the check that explains faults takes longer than a short decode."""
    starts, lengths, table = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
    return (
        starts.dtype is lengths.dtype is table.dtype is torch.int32
        and len(starts) - 1 == len(lengths) == len(table)
        and starts.is_contiguous()
        and lengths.is_contiguous()
        and table.is_contiguous()
    )
