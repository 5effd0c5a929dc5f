# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Rows rounded to eight-bit floating point in Triton, each by itself: `reference.round_to_float8` says to what."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.reference import LARGEST_FLOAT8, SMALLEST_NUMBER
from kernels.triton_float8 import float8_bits
from kernels.triton_launch import next_power_of_2, warps_for

_BLOCK = 4096


@triton.jit
def _round_rows_kernel(
    x,  # [num_rows, K]
    numbers,  # [num_rows, K] float8, contiguous
    scales,  # [num_rows] float32
    x_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    most, spoilt = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        is_finite = tl.abs(value) < float("inf")
        most = tl.maximum(most, tl.where(is_finite, tl.abs(value), 0.0))
        spoilt = tl.where(is_finite, spoilt, 1)
    largest = tl.max(most, axis=0)
    usable = largest > SMALLEST
    inverse = tl.where(usable, tl.div_rn(tl.full([], LARGEST, tl.float32), tl.where(usable, largest, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(largest, tl.full([], LARGEST, tl.float32)), 0.0)
    tl.store(scales + row, tl.where(tl.max(spoilt, axis=0) > 0, float("nan"), scale))
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0) * inverse
        number = float8_bits(tl.minimum(tl.maximum(value, -LARGEST), LARGEST)).to(tl.float8e4nv, bitcast=True)
        tl.store(numbers + row * K + columns, number, mask=columns < K)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 numbers [M, K], scales [M] float32; NaN where a row is not finite."""
    num_rows, k = x.shape
    numbers = torch.empty(num_rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = min(_BLOCK, next_power_of_2(k))
    _round_rows_kernel[(num_rows,)](
        x,
        numbers,
        scales,
        x.stride(0),
        K=k,
        BLOCK=block,
        LARGEST=LARGEST_FLOAT8,
        SMALLEST=SMALLEST_NUMBER,
        num_warps=warps_for(block),
        enable_fp_fusion=False,
    )
    return numbers, scales
