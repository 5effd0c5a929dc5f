# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The arithmetic that the decode and the exact prefill kernel share, so that both give a query row the same bits.

The context is cut into chunks of CHUNK tokens at fixed positions. Inside a chunk an online softmax runs over tiles
of a fixed size; chunks are merged in order. So the order of operations of a row depends on its position alone:
neither on the batch, nor on how a prompt was chunked, nor on which kernel computed it. Tiles and chunks that a row
cannot see change none of its bits. The row sums go through `tl.dot` like the outputs, because `tl.sum` adds in an
order that depends on how the rows are spread over warps. Online softmax: Milakov and Gimelshein, 2018; the split
over the context: Flash-Decoding, 2023.

FAST: for a prefill that need not have decode's bits, the same with fewer operations for each score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_float8 import float8_value
from kernels.triton_launch import next_power_of_2

CHUNK = 256  # tokens; a constant, since the bits depend on it


def tile_tokens(head_dim: int, itemsize: int) -> int:
    """Keys per tile: 16 KiB of keys where that gives 16 to 64 tokens. Part of the order of operations, so a constant of
    the model."""
    return min(64, max(16, 16384 // (next_power_of_2(head_dim, 16) * itemsize)))


@triton.jit
def softmax_base(maximum):
    """What to subtract before exp2; 0 where nothing has been seen, since -inf - -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _attend_tile(
    query,  # [ROWS, BLOCK_D]
    positions,  # [ROWS] int32
    key_head,
    value_head,
    block_row,
    start,  # the tile's first position
    low,
    end,
    scale,
    soft_cap,
    maximum,  # [ROWS], the state so far
    sums,  # [ROWS, 16]; FAST: [ROWS]
    acc,  # [ROWS, BLOCK_D]
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FLOAT8: tl.constexpr,  # keys and values are e4m3 numbers
    MASKED: tl.constexpr,  # False: every row sees every position of the tile. It changes no bits where that is so
    FAST: tl.constexpr,  # scale is above 0
    INTERPRETED: tl.constexpr,
):
    """One tile of `attend_chunk`: the state after it."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    dtype = query.dtype
    dims, keys_at = tl.arange(0, query.shape[1]), start + tl.arange(0, TILE)
    in_head, readable = dims < HEAD_DIM, (keys_at >= low) & (keys_at < end)
    if BLOCK_SIZE >= TILE:
        block = tl.load(block_row + start // BLOCK_SIZE).to(tl.int64)
        slots = block * BLOCK_STRIDE + (start % BLOCK_SIZE + tl.arange(0, TILE)) * HEAD_DIM
    else:
        blocks = tl.load(block_row + keys_at // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        slots = blocks * BLOCK_STRIDE + (keys_at % BLOCK_SIZE) * HEAD_DIM
    key_mask, value_mask = in_head[:, None], in_head[None, :]
    if MASKED:
        key_mask, value_mask = key_mask & readable[None, :], value_mask & readable[:, None]
    keys = tl.load(key_head + slots[None, :] + dims[:, None], mask=key_mask, other=0.0)
    values = tl.load(value_head + slots[:, None] + dims[None, :], mask=value_mask, other=0.0)
    if FLOAT8 and INTERPRETED:
        query, keys, values = query.to(tl.float32), float8_value(keys), float8_value(values)
    elif INTERPRETED:  # the interpreter multiplies the raw bits of bf16 operands
        query, keys, values = query.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    else:  # every e4m3 number is one of every activation's type
        keys, values = keys.to(dtype), values.to(dtype)

    scores = tl.dot(query, keys, input_precision="ieee")
    if HAS_SOFT_CAP:
        scores = _soft_capped(scores * scale, soft_cap)
    elif not FAST:
        scores = scores * scale
    factor = LOG2_E if HAS_SOFT_CAP or not FAST else scale * LOG2_E
    if not FAST:
        scores = scores * LOG2_E
    if MASKED:
        visible = readable[None, :] & (keys_at[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (keys_at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    if FAST:  # a score's multiplication and subtraction, which the compiler makes one fma
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
        base = softmax_base(new_maximum)
        weights = tl.exp2(scores * factor - base[:, None])
    else:
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = softmax_base(new_maximum)
        weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(maximum - base)
    if FAST:
        sums = sums * kept + tl.sum(weights, axis=1)
    weights = weights.to(dtype)
    ones = tl.full([TILE, 16], 1.0, dtype)
    if INTERPRETED:
        weights, ones = weights.to(tl.float32), ones.to(tl.float32)
    if not FAST:
        sums = tl.dot(weights, ones, sums * kept[:, None], input_precision="ieee")
    acc = tl.dot(weights, values, acc * kept[:, None], input_precision="ieee")
    return new_maximum, sums, acc


@triton.jit
def _soft_capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)"""
    small = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / soft_cap))  # from exp(-2|x|): cannot overflow
    capped = soft_cap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0.0, -capped, capped)


@triton.jit
def attend_chunk(
    query,  # [ROWS, BLOCK_D]
    positions,  # [ROWS] int32: position of each row's query
    first_position,  # the least of them
    key_head,  # pointer to this head's keys in block 0
    value_head,  # pointer to this head's values in block 0
    block_row,  # pointer to [max_blocks] int32: block_table of the sequence
    first,  # first position to visit, a multiple of TILE
    low,  # positions below were given up (sliding window) and are not read
    end,  # positions from here on are not read
    scale,
    soft_cap,
    BLOCK_STRIDE: tl.constexpr,  # elements from one cache block to the next
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = off
    HAS_SOFT_CAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    FAST: tl.constexpr,  # see above
    INTERPRETED: tl.constexpr,
):
    """Online softmax over positions [first, end) of one chunk: whole tiles that all rows see, then those with a mask.

    Returns (maximum [ROWS] in units of log2, total [ROWS], weighted values [ROWS, BLOCK_D]), all fp32.
    """
    ROWS: tl.constexpr = query.shape[0]
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    # 16 equal columns: the narrowest matrix that tl.dot takes
    sums = tl.zeros([ROWS], tl.float32) if FAST else tl.zeros([ROWS, 16], tl.float32)
    acc = tl.zeros([ROWS, query.shape[1]], tl.float32)
    masked_from = first
    if WINDOW == 0:
        masked_from = first + tl.maximum(tl.minimum(end, first_position + 1) - first, 0) // TILE * TILE
        for start in range(first, masked_from, TILE):
            maximum, sums, acc = _attend_tile(
                query, positions, key_head, value_head, block_row, start, low, end, scale, soft_cap, maximum, sums, acc,
                BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, TILE, 0, HAS_SOFT_CAP, FLOAT8, False, FAST, INTERPRETED,
            )  # fmt: skip
    for start in range(masked_from, end, TILE):
        maximum, sums, acc = _attend_tile(
            query, positions, key_head, value_head, block_row, start, low, end, scale, soft_cap, maximum, sums, acc,
            BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, HAS_SOFT_CAP, FLOAT8, True, FAST, INTERPRETED,
        )  # fmt: skip
    return maximum, sums if FAST else tl.max(sums, axis=1), acc


@triton.jit
def merge_chunk(maximum, total, acc, chunk_max, chunk_total, chunk_acc):
    """Merge the next chunk [rows], [rows], [rows, BLOCK_D] into the state of the chunks before it, of the same shapes.

    The explicit `fma` leaves the compiler no choice of how to contract, which could differ between two kernels.
    """
    new_maximum = tl.maximum(maximum, chunk_max)
    base = softmax_base(new_maximum)
    kept = tl.exp2(maximum - base)
    added = tl.exp2(chunk_max - base)
    total = tl.fma(total, kept, chunk_total * added)
    kept_rows = tl.broadcast_to(kept[:, None], acc.shape)
    acc = tl.fma(acc, kept_rows, chunk_acc * added[:, None])
    return new_maximum, total, acc


@triton.jit
def normalise(
    maximum,  # [rows], in units of log2
    total,  # [rows]
    acc,  # [rows, BLOCK_D]
    sink_at,  # pointers to the rows' sinks, where HAS_SINKS
    mask,  # [rows]
    HAS_SINKS: tl.constexpr,
):
    """acc / total; rows that saw no key become 0. A sink is the score of one more key, which has no value."""
    if HAS_SINKS:
        LOG2_E: tl.constexpr = 1.4426950408889634
        sink = tl.load(sink_at, mask=mask, other=0.0) * LOG2_E
        base = softmax_base(tl.maximum(maximum, sink))
        kept = tl.exp2(maximum - base)
        total = tl.fma(total, kept, tl.exp2(sink - base))
        acc = acc * kept[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
