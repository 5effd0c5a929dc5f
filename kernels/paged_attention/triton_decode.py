# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Decode attention in Triton: one query row per sequence, the context split over programs.

A program takes one chunk of one sequence and one key/value head, with the query heads of that group as rows of its
matrix products, so that every key is read once. A second kernel merges the chunks in order. GQA packing and the split:
Flash-Decoding (2023), vLLM's and SGLang's Triton kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.paged_attention.triton_chunk import CHUNK, attend_chunk, merge_chunk, normalise, tile_tokens
from kernels.triton_launch import INTERPRETED, next_power_of_2

# Partial results of one launch; more sequences than fit go into further launches, which changes no bits.
_SCRATCH_BYTES = 256 * 2**20


@triton.jit
def _decode_kernel(
    query,  # [num_seqs, num_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    out,  # [num_seqs, num_heads, head_dim]
    partial_acc,  # [num_seqs, num_heads, max_chunks, head_dim] float32
    partial_stats,  # [num_seqs, num_heads, max_chunks, 2] float32: maximum, total
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    scale,
    soft_cap,
    max_chunks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - WINDOW, 0)
    chunk = low // CHUNK + split
    if (chunk * CHUNK >= seq_len) & (split > 0):
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query + seq * query_stride + heads[:, None] * query_head_stride + dims[None, :]
    maximum, total, acc = attend_chunk(
        tl.load(query_at, mask=mask, other=0.0),
        tl.full([ROWS], 0, tl.int32) + (seq_len - 1),
        seq_len - 1,
        key_cache + kv_head * BLOCK_SIZE * HEAD_DIM,
        value_cache + kv_head * BLOCK_SIZE * HEAD_DIM,
        block_table + seq * table_stride,
        tl.maximum(chunk * CHUNK, low // TILE * TILE),
        low,
        tl.minimum(chunk * CHUNK + CHUNK, seq_len),
        scale,
        soft_cap,
        NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        BLOCK_SIZE,
        HEAD_DIM,
        TILE,
        WINDOW,
        HAS_SOFT_CAP,
        INTERPRETED,
    )
    if (seq_len + CHUNK - 1) // CHUNK - low // CHUNK <= 1:  # the only chunk: nothing to merge
        out_at = out + seq * out_stride + heads[:, None] * out_head_stride + dims[None, :]
        tl.store(out_at, normalise(acc, total).to(out.dtype.element_ty), mask=mask)
    else:
        slot = (seq * (NUM_KV_HEADS * GROUP) + heads) * max_chunks + split
        tl.store(partial_acc + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_stats + slot * 2, maximum, mask=rows < GROUP)
        tl.store(partial_stats + slot * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _merge_kernel(
    partial_acc,  # [num_seqs, num_heads, max_chunks, head_dim] float32
    partial_stats,  # [num_seqs, num_heads, max_chunks, 2] float32
    seq_lens,  # [num_seqs] int32
    out,  # [num_seqs, num_heads, head_dim]
    out_stride,
    out_head_stride,
    max_chunks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - WINDOW, 0)
    num_chunks = (seq_len + CHUNK - 1) // CHUNK - low // CHUNK
    if num_chunks <= 1:
        return
    row = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    first_slot = (seq * NUM_HEADS + head) * max_chunks
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for split in tl.range(0, num_chunks, num_stages=4):
        slot = first_slot + split + row
        chunk_acc = tl.load(partial_acc + slot[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        chunk_max = tl.load(partial_stats + slot * 2)
        chunk_total = tl.load(partial_stats + slot * 2 + 1)
        maximum, total, acc = merge_chunk(maximum, total, acc, chunk_max, chunk_total, chunk_acc)
    out_at = out + seq * out_stride + head * out_head_stride + dims
    tl.store(out_at, normalise(acc, total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Attention of the first `metadata.num_decodes` rows of query [T, H, D], into the same rows of out [T, H, D]."""
    num_heads, head_dim = query.shape[1:]
    window = params.sliding_window or 0
    max_chunks = triton.cdiv(metadata.max_seq_len, CHUNK)
    if window:
        max_chunks = min(max_chunks, triton.cdiv(window, CHUNK) + 1)
    max_chunks = max(max_chunks, 1)
    per_launch = max(1, _SCRATCH_BYTES // (4 * num_heads * max_chunks * head_dim))
    for first in range(0, metadata.num_decodes, per_launch):
        rows = slice(first, min(first + per_launch, metadata.num_decodes))
        tables = (metadata.block_table[rows], metadata.seq_lens[rows])
        _launch(query[rows], (key_cache, value_cache), tables, params, out[rows], max_chunks)


def _launch(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    params: AttentionParams,
    out: Tensor,
    max_chunks: int,
) -> None:
    """Both kernels over the rows given. The grids depend on host integers alone, so a graph can capture them."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = caches[0].shape[1:3]
    block_table, seq_lens = tables
    window = params.sliding_window or 0
    scratch = (num_seqs, num_heads, max_chunks) if max_chunks > 1 else (1, 1, 1)
    partial_acc = torch.empty(*scratch, head_dim, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(*scratch, 2, dtype=torch.float32, device=query.device)
    _decode_kernel[(num_seqs, num_kv_heads, max_chunks)](
        query,
        *caches,
        block_table,
        seq_lens,
        out,
        partial_acc,
        partial_stats,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        params.scale,
        params.soft_cap or 1.0,
        max_chunks,
        GROUP=num_heads // num_kv_heads,
        ROWS=next_power_of_2(num_heads // num_kv_heads, 16),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim, 16),
        TILE=tile_tokens(head_dim, query.element_size()),
        CHUNK=CHUNK,
        WINDOW=window,
        HAS_SOFT_CAP=params.soft_cap is not None,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        enable_fp_fusion=False,
        num_stages=3,
    )
    if max_chunks > 1:
        _launch_merge(partial_acc, partial_stats, seq_lens, out, window)


def _launch_merge(
    partial_acc: Tensor,  # [num_seqs, num_heads, max_chunks, head_dim] float32
    partial_stats: Tensor,  # [num_seqs, num_heads, max_chunks, 2] float32
    seq_lens: Tensor,  # [num_seqs] int32
    out: Tensor,  # [num_seqs, num_heads, head_dim]
    window: int,
) -> None:
    """Reduce the chunks of every row in their order."""
    num_seqs, num_heads, max_chunks, head_dim = partial_acc.shape
    _merge_kernel[(num_seqs, num_heads)](
        partial_acc,
        partial_stats,
        seq_lens,
        out,
        out.stride(0),
        out.stride(1),
        max_chunks,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim, 16),
        CHUNK=CHUNK,
        WINDOW=window,
        num_warps=1,
        enable_fp_fusion=False,
    )
