# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Decode attention in Triton: one query row per sequence, the context split over programs.

A work item is one chunk of one sequence; a program takes items one after another, for one key/value head, with the
query heads of that group as rows of its matrix products, so that every key is read once. A second kernel merges the
chunks in order. The list of items is made on the device, from the lengths there: the host knows no more of them than
how many sequences there are and how long one may be, so the same launches serve every batch, in a graph too, and a long
sequence among short ones costs what its own chunks cost. GQA packing and the split: Flash-Decoding (2023), vLLM's and
SGLang's Triton kernels; lists of work: FlashInfer (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.kv_store.reference import is_float8
from kernels.paged_attention.triton_chunk import CHUNK, attend_chunk, merge_chunk, normalise, tile_tokens
from kernels.triton_launch import INTERPRETED, has_dependent_launch, next_power_of_2, num_processors
from kernels.triton_tuning import attention_features, launch_options

# Partial results of one launch: this, or so much of a GPU's memory. More sequences than are sure to fit go into further
# launches, which changes no bits.
_SCRATCH_BYTES = 256 * 2**20
_SCRATCH_SHARE = 1 / 128
_PROGRAMS_PER_PROCESSOR = 16  # several at once on each, and some to follow those that have less to do


@triton.jit
def _num_chunks(seq_lens, low, CHUNK: tl.constexpr):
    """Chunks that sequences of these lengths see; one where there is no context, whose result is zeros."""
    return tl.maximum((seq_lens + CHUNK - 1) // CHUNK - low // CHUNK, 1)


@triton.jit
def _low(seq_lens, WINDOW: tl.constexpr):
    """The first position that the last token of each sequence sees."""
    return tl.maximum(seq_lens - WINDOW, 0) if WINDOW > 0 else seq_lens * 0


@triton.jit(do_not_specialize=["num_seqs"])
def _list_kernel(
    seq_lens,  # [num_seqs] int32
    starts,  # [num_seqs + 1] int32, written: each sequence's first item
    items,  # [capacity] int32, written: the sequence of each item
    num_seqs,
    BLOCK: tl.constexpr,  # not below num_seqs
    WRITTEN: tl.constexpr,  # items at a time
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SKIPS_EMPTY: tl.constexpr,  # sequences without context have no item
):
    seq = tl.program_id(0)
    others = tl.arange(0, BLOCK)
    lengths = tl.load(seq_lens + others, mask=others < num_seqs, other=0)
    is_listed = others < num_seqs
    if SKIPS_EMPTY:
        is_listed = is_listed & (lengths > 0)
    counts = tl.where(is_listed, _num_chunks(lengths, _low(lengths, WINDOW), CHUNK), 0)
    start = tl.sum(tl.where(others < seq, counts, 0), axis=0)
    count = tl.sum(tl.where(others == seq, counts, 0), axis=0)
    tl.store(starts + seq, start)
    if seq == num_seqs - 1:
        tl.store(starts + num_seqs, start + count)
    for first in range(0, count, WRITTEN):
        at = first + tl.arange(0, WRITTEN)
        tl.store(items + start + at, tl.full([WRITTEN], 0, tl.int32) + seq, mask=at < count)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _decode_kernel(
    query,  # [num_seqs, num_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table,  # [num_seqs, max_blocks] int32
    seq_lens,  # [num_seqs] int32
    starts,  # [num_seqs + 1] int32: see `_list_kernel`
    items,  # [capacity] int32
    sinks,  # [num_heads] float32 where HAS_SINKS
    out,  # [num_seqs, num_heads, head_dim]
    partial_acc,  # [capacity, num_heads, head_dim] float32
    partial_stats,  # [capacity, num_heads, 2] float32: maximum, total
    num_seqs,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    scale,
    soft_cap,
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
    HAS_SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,  # the next kernel may start already, and wait
    INTERPRETED: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), tl.load(starts + num_seqs), tl.num_programs(0)):
        seq = tl.load(items + item).to(tl.int64)
        seq_len, first_item = tl.load(seq_lens + seq), tl.load(starts + seq)
        low = _low(seq_len, WINDOW)
        chunk = low // CHUNK + item - first_item
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
            FLOAT8,
            False,  # FAST
            INTERPRETED,
        )
        if _num_chunks(seq_len, low, CHUNK) == 1:  # the only chunk: nothing to merge
            out_at = out + seq * out_stride + heads[:, None] * out_head_stride + dims[None, :]
            result = normalise(maximum, total, acc, sinks + heads, rows < GROUP, HAS_SINKS)
            tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
        else:
            slot = tl.cast(item, tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(partial_acc + slot[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_stats + slot * 2, maximum, mask=rows < GROUP)
            tl.store(partial_stats + slot * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _merge_kernel(
    partial_acc,  # [capacity, num_heads, head_dim] float32
    partial_stats,  # [capacity, num_heads, 2] float32
    starts,  # [num_seqs + 1] int32
    sinks,  # [num_heads] float32 where HAS_SINKS
    out,  # [num_seqs, num_heads, head_dim]
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_item, end_item = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end_item - first_item <= 1:
        return
    row = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for item in tl.range(first_item, end_item, num_stages=4):
        slot = tl.cast(item, tl.int64) * NUM_HEADS + head + row
        chunk_acc = tl.load(partial_acc + slot[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        chunk_max = tl.load(partial_stats + slot * 2)
        chunk_total = tl.load(partial_stats + slot * 2 + 1)
        maximum, total, acc = merge_chunk(maximum, total, acc, chunk_max, chunk_total, chunk_acc)
    out_at = out + seq * out_stride + head * out_head_stride + dims
    result = normalise(maximum, total, acc, sinks + head + row, row == 0, HAS_SINKS)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The work items of some sequences, on the device; made once for all layers of a step that have the same window."""

    starts: Tensor  # [num_seqs + 1] int32
    items: Tensor  # [capacity] int32, of which starts[-1] are set

    @classmethod
    def of(cls, seq_lens: Tensor, max_seq_len: int, window: int, skips_empty: bool = False) -> WorkList:
        """seq_lens [num_seqs] int32, none of them above max_seq_len; window 0: there is none. skips_empty: nothing is
        written for sequences of length 0, zeros otherwise.
        """
        num_seqs, device = len(seq_lens), seq_lens.device
        starts = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
        items = torch.empty(num_seqs * max_chunks(max_seq_len, window), dtype=torch.int32, device=device)
        _list_kernel[(num_seqs,)](
            seq_lens,
            starts,
            items,
            num_seqs,
            BLOCK=next_power_of_2(num_seqs, 256),
            WRITTEN=128,
            WINDOW=window,
            CHUNK=CHUNK,
            SKIPS_EMPTY=skips_empty,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return cls(starts, items)


def max_chunks(max_seq_len: int, window: int) -> int:
    """The most that one sequence has."""
    chunks = -(-max_seq_len // CHUNK)
    return max(min(chunks, -(-window // CHUNK) + 1) if window else chunks, 1)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Attention of the first `metadata.num_decodes` sequences, whose rows stand first in query [T, H, D], into the same
    rows of out [T, H, D].
    """
    num_heads, head_dim = query.shape[1:]
    window = params.sliding_window or 0
    row_bytes = 4 * num_heads * (head_dim + 2) * max_chunks(metadata.max_seq_len, window)
    per_launch = max(1, _scratch_bytes(query.device) // row_bytes)
    for first in range(0, metadata.num_decodes, per_launch):
        rows = slice(first, min(first + per_launch, metadata.num_decodes))
        seq_lens = metadata.seq_lens[rows]
        key = ("decode work", window, rows.start, rows.stop)
        if key not in metadata.derived:
            skips_empty = metadata.has_empty_decodes
            metadata.derived[key] = WorkList.of(seq_lens, metadata.max_seq_len, window, skips_empty)
        work = metadata.derived[key]
        assert isinstance(work, WorkList)
        _launch(query[rows], (key_cache, value_cache), (metadata.block_table[rows], seq_lens), work, params, out[rows])


def _scratch_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _SCRATCH_BYTES
    return max(_SCRATCH_BYTES, int(torch.cuda.get_device_properties(device).total_memory * _SCRATCH_SHARE))


def _launch(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    work: WorkList,
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Both kernels over the rows given. The grids depend on host integers alone, so a graph can capture them."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = caches[0].shape[1:3]
    block_table, seq_lens = tables
    window, capacity = params.sliding_window or 0, len(work.items)
    is_merged = capacity > num_seqs
    slots = capacity if is_merged else 1
    partial_acc = torch.empty(slots, num_heads, head_dim, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(slots, num_heads, 2, dtype=torch.float32, device=query.device)
    programs = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors(query.device), num_kv_heads)
    _decode_kernel[(min(capacity, programs), num_kv_heads)](
        query,
        *caches,
        block_table,
        seq_lens,
        work.starts,
        work.items,
        out if params.sinks is None else params.sinks,
        out,
        partial_acc,
        partial_stats,
        num_seqs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        params.scale,
        params.soft_cap or 1.0,
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
        HAS_SINKS=params.sinks is not None,
        FLOAT8=is_float8(caches[0]),
        DEPENDENT=has_dependent_launch(query.device),
        INTERPRETED=INTERPRETED,
        enable_fp_fusion=False,
        **_options(query, caches[0]),
    )
    if is_merged:
        _launch_merge(partial_acc, partial_stats, work.starts, params.sinks, out)


def _options(query: Tensor, key_cache: Tensor) -> dict[str, int]:
    """Several programs on a processor, each waiting for its own keys, read faster than one that asks far ahead: with
    two stages an H100 has three of them where it has two with five, and reads 9 % more. Widening e4m3 numbers takes
    more registers than that leaves; with fewer it has four, and reads another 20 % more.
    """
    options = launch_options("decode", query.device, (4, 2), **attention_features(query, key_cache))
    is_small = query.shape[-1] <= 128 and query.element_size() == 2
    return options | ({"maxnreg": 128} if is_small and is_float8(key_cache) else {})


def _launch_merge(
    partial_acc: Tensor,  # [capacity, num_heads, head_dim] float32
    partial_stats: Tensor,  # [capacity, num_heads, 2] float32
    starts: Tensor,  # [num_seqs + 1] int32
    sinks: Tensor | None,  # [num_heads] float32
    out: Tensor,  # [num_seqs, num_heads, head_dim]
) -> None:
    """Reduce the chunks of every row in their order."""
    num_seqs, num_heads, head_dim = out.shape
    dependent = has_dependent_launch(out.device)
    _merge_kernel[(num_seqs, num_heads)](
        partial_acc,
        partial_stats,
        starts,
        out if sinks is None else sinks,
        out,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim, 16),
        HAS_SINKS=sinks is not None,
        DEPENDENT=dependent,
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if dependent else {}),
    )
