# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Attention of longer query runs in Triton: prompts, chunks of prompts, and the paged context before them.

A program takes a tile of neighbouring queries of one sequence and one key/value head; a row of its matrix products
is one (query token, query head of the group). It visits the chunks and tiles of the context that any of its rows
can see, in order, with the decode kernel's arithmetic (see `triton_chunk`), if it shall have decode's bits; else the
context is one chunk, and tiles have more rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.kv_store.reference import is_float8
from kernels.paged_attention.triton_chunk import CHUNK, attend_chunk, merge_chunk, normalise, tile_tokens
from kernels.triton_launch import INTERPRETED, next_power_of_2
from kernels.triton_tuning import attention_features, launch_options

# Below 64 rows Triton uses the tensor core instruction of decode's 16 rows, so both give the same bits; from 64
# rows on, Hopper's wgmma is faster and may round differently. Then nothing needs decode's chunks either, at whose ends
# no tile is on its way.
_EXACT_ROWS = 32
_FAST_ROWS, _FAST_ROWS_OF_SMALL_HEADS = 64, 128
_WHOLE = 2**20  # a chunk that no context is longer than


@triton.jit
def _find_tile(
    query_start_loc,  # [num_seqs + 1] int32
    num_seqs,
    tile_index,
    BLOCK_Q: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """(sequence, first query row within it) of a tile. Sequence i owns tiles from start // BLOCK_Q + i on, which leaves
    room for one partly filled tile each; surplus tiles start beyond the sequence's last row."""
    seqs = tl.arange(0, BLOCK_SEQS)
    first_token = tl.load(query_start_loc)
    starts = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    first_tiles = (starts - first_token) // BLOCK_Q + seqs
    before = (first_tiles <= tile_index) & (seqs < num_seqs)
    seq = tl.sum(before.to(tl.int32), axis=0) - 1
    first_tile = tl.max(tl.where(before, first_tiles, 0), axis=0)
    return seq, (tile_index - first_tile) * BLOCK_Q


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc"],  # parts of tensors begin anywhere
)
def _prefill_kernel(
    query,  # [num_tokens, num_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    query_start_loc,  # [num_seqs + 1] int32, into the rows of query
    sinks,  # [num_heads] float32 where HAS_SINKS
    out,  # [num_tokens, num_heads, head_dim]
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    scale,
    soft_cap,
    num_seqs,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = ROWS // GROUP_PADDED
    # The last tiles see the longest contexts: they start first.
    tile_index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_row = _find_tile(query_start_loc, num_seqs, tile_index, BLOCK_Q, BLOCK_SEQS)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    if first_row >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - query_len + first_row
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    token_rows = first_row + rows // GROUP_PADDED
    tokens = (query_start + token_rows).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP_PADDED
    mask = ((rows % GROUP_PADDED < GROUP) & (token_rows < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query + tokens[:, None] * query_stride + heads[:, None] * query_head_stride + dims[None, :]
    queries = tl.load(query_at, mask=mask, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for chunk in range(low // CHUNK, (end + CHUNK - 1) // CHUNK):
        chunk_max, chunk_total, chunk_acc = attend_chunk(
            queries,
            first_position + rows // GROUP_PADDED,
            first_position,
            key_cache + kv_head * BLOCK_SIZE * HEAD_DIM,
            value_cache + kv_head * BLOCK_SIZE * HEAD_DIM,
            block_table + seq.to(tl.int64) * table_stride,
            tl.maximum(chunk * CHUNK, low // TILE * TILE),
            low,
            tl.minimum(chunk * CHUNK + CHUNK, end),
            scale,
            soft_cap,
            NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            BLOCK_SIZE,
            HEAD_DIM,
            TILE,
            WINDOW,
            HAS_SOFT_CAP,
            FLOAT8,
            FAST,
            INTERPRETED,
        )
        maximum, total, acc = merge_chunk(maximum, total, acc, chunk_max, chunk_total, chunk_acc)
    out_at = out + tokens[:, None] * out_stride + heads[:, None] * out_head_stride + dims[None, :]
    result = normalise(maximum, total, acc, sinks + heads, rows % GROUP_PADDED < GROUP, HAS_SINKS)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: Tensor,
    exact: bool,
) -> None:
    """Attention of the rows of query [T, H, D] whose sequences are not among the first `metadata.num_decodes`, into the
    same rows of out [T, H, D].

    `exact` asks for the bits that the decode kernel would give each row.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = caches[0].shape[1:3]
    block_table = metadata.block_table[metadata.num_decodes :]
    num_seqs = block_table.shape[0]
    group_padded = next_power_of_2(num_heads // num_kv_heads)
    is_small = head_dim <= 128 and query.element_size() == 2
    fast_rows = _FAST_ROWS_OF_SMALL_HEADS if is_small else _FAST_ROWS
    rows = max(_EXACT_ROWS if exact else fast_rows, group_padded)
    warps = 4 if is_small and exact else 8
    most_rows = query.shape[0] - (0 if metadata.has_empty_decodes else metadata.num_decodes)
    num_tiles = most_rows // (rows // group_padded) + num_seqs
    _prefill_kernel[(num_tiles, num_kv_heads)](
        query,
        *caches,
        block_table,
        metadata.seq_lens[metadata.num_decodes :],
        metadata.query_start_loc[metadata.num_decodes :],
        out if params.sinks is None else params.sinks,
        out,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        params.scale,
        params.soft_cap or 1.0,
        num_seqs,
        GROUP=num_heads // num_kv_heads,
        GROUP_PADDED=group_padded,
        ROWS=rows,
        BLOCK_SEQS=next_power_of_2(num_seqs, 256),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim, 16),
        TILE=tile_tokens(head_dim, query.element_size()),
        CHUNK=CHUNK if exact else _WHOLE,
        WINDOW=params.sliding_window or 0,
        HAS_SOFT_CAP=params.soft_cap is not None,
        HAS_SINKS=params.sinks is not None,
        FLOAT8=is_float8(caches[0]),
        FAST=not exact and params.scale > 0,  # it takes the maximum before the scale
        INTERPRETED=INTERPRETED,
        enable_fp_fusion=not exact,
        **launch_options("prefill", query.device, (warps, 2), rows=rows, **attention_features(query, caches[0])),
    )
