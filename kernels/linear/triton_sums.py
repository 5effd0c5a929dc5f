# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Sums over the columns of a chunk in Triton, for every form of `packing.PackedWeight`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_float8 import float8_value


@triton.jit
def _rows_tile(
    x_row,  # pointers to [BLOCK_M, 1]: column 0 of each row
    row_mask,  # [BLOCK_M, 1]
    first,
    end,  # columns from here on are not there
    COLUMNS: tl.constexpr,
):
    """x[:, first : first + COLUMNS], zeros where there is nothing."""
    columns = first + tl.arange(0, COLUMNS)[None, :]
    return tl.load(x_row + columns, mask=row_mask & (columns < end), other=0.0)


@triton.jit
def _add_product(
    x,  # [BLOCK_M, COLUMNS]: the columns from `first` on
    weight_row,  # pointers to [1, BLOCK_N]: column 0 of each output's weights (bytes where BITS is 4)
    output_mask,  # [1, BLOCK_N]
    first,
    stored,  # where the weights of these columns begin
    end,
    offset,  # of 4 bits: what has to be added to them
    acc,  # [BLOCK_M, BLOCK_N] float32
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,  # of 4 bits: the upper ones
    FLOAT8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """acc + x @ weight.T of these columns."""
    columns = tl.arange(0, COLUMNS)[:, None]
    at, mask = weight_row + (stored + columns), output_mask & (first + columns < end)
    if FLOAT8:
        weight = tl.load(at, mask=mask, other=0.0)
        if INTERPRETED:
            acc = tl.dot(float8_value(x), float8_value(weight), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, weight, acc)
    else:
        weight = tl.load(at, mask=mask, other=0)
        if BITS == 4:
            weight = ((weight.to(tl.int32) >> 4) if HIGH else (weight.to(tl.int32) & 15)) + offset
        if INTERPRETED:  # the interpreter multiplies the raw bits of bf16 operands
            acc = tl.dot(x.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _add_step(
    low,  # [BLOCK_M, STEP], or the first half of it where BITS is 4
    high,  # then the second half
    weight_row,
    scale_row,  # pointers to [1, BLOCK_N]: the first group's scale of each output
    offset_row,  # where HAS_OFFSETS: the first group's offset
    output_mask,
    start,
    end,
    acc,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    FLOAT8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """acc + the products of STEP columns: those with integers by an accumulator of their own, which is then scaled."""
    if BITS > 8:
        acc = _add_product(
            low, weight_row, output_mask, start, start, end, 0, acc, STEP, BITS, False, False, INTERPRETED
        )
    elif FLOAT8:
        # Hopper's accumulator has fewer bits than a float32 then: it must not go on for more columns than these. Not by
        # `max_num_imprecise_acc`: there the compiler adds up what an asynchronous product may not have written yet.
        part = tl.zeros(acc.shape, tl.float32)
        acc += _add_product(
            low, weight_row, output_mask, start, start, end, 0, part, STEP, BITS, False, True, INTERPRETED
        )
    else:
        part = tl.zeros(acc.shape, tl.float32)
        # Before the product, which then hides that it takes a while.
        scale = tl.load(scale_row + start // STEP, mask=output_mask, other=0.0).to(tl.float32)
        if BITS == 4:
            HALF: tl.constexpr = STEP // 2
            offset = -8
            if HAS_OFFSETS:
                offset = tl.load(offset_row + start // STEP, mask=output_mask, other=0).to(tl.int32)
            stored = start // 2
            part = _add_product(
                low, weight_row, output_mask, start, stored, end, offset, part, HALF, 4, False, False, INTERPRETED
            )
            part = _add_product(
                high, weight_row, output_mask, start + HALF, stored, end, offset, part, HALF, 4, True, False,
                INTERPRETED,
            )  # fmt: skip
        else:
            part = _add_product(
                low, weight_row, output_mask, start, start, end, 0, part, STEP, 8, False, False, INTERPRETED
            )
        acc = tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
    return acc


@triton.jit
def chunk_sum(
    x_row,
    weight_row,
    scale_row,
    offset_row,
    row_mask,
    output_mask,
    first,
    end,
    up_weight,  # where GATED: how far behind an output's weights those of its other half are
    up_scale,  # and behind its scales
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # columns at a time; a group, where weights are integers
    BITS: tl.constexpr,  # of a weight; integers have 4 or 8, and so have e4m3 numbers where FLOAT8
    HAS_OFFSETS: tl.constexpr,
    FLOAT8: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sum over one chunk's columns [first, end), float32 [BLOCK_M, BLOCK_N]; and that of the other half."""
    COLUMNS: tl.constexpr = STEP // 2 if BITS == 4 else STEP
    acc, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, end), STEP):
        low = _rows_tile(x_row, row_mask, start, end, COLUMNS)
        high = low
        if BITS == 4:
            high = _rows_tile(x_row, row_mask, start + COLUMNS, end, COLUMNS)
        acc = _add_step(
            low, high, weight_row, scale_row, offset_row, output_mask, start, end, acc,
            STEP, BITS, HAS_OFFSETS, FLOAT8, INTERPRETED,
        )  # fmt: skip
        if GATED:
            up = _add_step(
                low, high, weight_row + up_weight, scale_row + up_scale, offset_row + up_scale, output_mask, start,
                end, up, STEP, BITS, HAS_OFFSETS, FLOAT8, INTERPRETED,
            )  # fmt: skip
    return acc, up
