# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear layers in Triton whose sums do not depend on the number of rows; weights as they are, or small integers.

K is cut into chunks at fixed places. A chunk is summed in the order of K by one accumulator of the tensor cores, the
chunks' sums are added in order. Few rows are too little work for a GPU: then each chunk is a program of its own and a
second kernel adds up, in the same order as one program does that goes through all chunks for many rows. So a row gets
the same bits in both ways; which way it goes depends on the number of rows, what comes out does not. Fixed splits for
batch invariance: Thinking Machines, 2025; here for GEMM as `paged_attention.triton_chunk` has them for attention.

Tiles of BLOCK_M rows differ in size alone: from 64 rows on Hopper's instruction is the same for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import checks
from kernels.linear.reference import quantize
from kernels.linear.schemes import WeightScheme
from kernels.triton_launch import INTERPRETED

CHUNK = 1024  # columns; a constant, since the bits depend on it. A multiple of every scheme's group
BLOCK_N = 64  # outputs of a program: a constant for the same reason
_FEW_ROWS = 64
_MANY_ROWS = 128
_BLOCK_K = 64  # columns at a time where weights are no integers


@triton.jit
def _group_sum(
    x_row,  # pointers to [BLOCK_M, 1]: column 0 of each row
    weight_row,  # pointers to [1, BLOCK_N]: column 0 of each output's weights (bytes where BITS is 4)
    row_mask,  # [BLOCK_M, 1]
    output_mask,  # [1, BLOCK_N]
    first,  # column of x
    stored,  # the same of the weights
    end,  # columns from here on are not there
    acc,  # [BLOCK_M, BLOCK_N] float32
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,  # 4, 8, or 16 and 32: no integers
    HIGH: tl.constexpr,  # of 4 bits: the upper ones
    INTERPRETED: tl.constexpr,
):
    """acc + x[:, first : first + COLUMNS] @ weight.T of these columns."""
    columns = tl.arange(0, COLUMNS)
    there = first + columns < end
    x = tl.load(x_row + (first + columns)[None, :], mask=row_mask & there[None, :], other=0.0)
    weight = tl.load(weight_row + (stored + columns)[:, None], mask=output_mask & there[:, None], other=0)
    if BITS == 4:
        weight = ((weight.to(tl.int32) >> 4) if HIGH else (weight.to(tl.int32) & 15)) - 8
    if INTERPRETED:  # the interpreter multiplies the raw bits of bf16 operands
        return tl.dot(x.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")


@triton.jit
def _chunk_sum(
    x_row,
    weight_row,
    scale_row,  # pointers to [1, BLOCK_N]: the first group's scale of each output
    row_mask,
    output_mask,
    first,
    end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # columns at a time; a group, where weights are integers
    BITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sum over one chunk's columns [first, end), float32 [BLOCK_M, BLOCK_N]."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, tl.minimum(first + CHUNK, end), STEP):
        if BITS == 4:
            HALF: tl.constexpr = STEP // 2
            stored = start // 2
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            part = _group_sum(
                x_row, weight_row, row_mask, output_mask, start, stored, end, part, HALF, 4, False, INTERPRETED
            )
            part = _group_sum(
                x_row, weight_row, row_mask, output_mask, start + HALF, stored, end, part, HALF, 4, True, INTERPRETED
            )
        elif BITS == 8:
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            part = _group_sum(
                x_row, weight_row, row_mask, output_mask, start, start, end, part, STEP, 8, False, INTERPRETED
            )
        else:
            acc = _group_sum(
                x_row, weight_row, row_mask, output_mask, start, start, end, acc, STEP, BITS, False, INTERPRETED
            )
        if BITS <= 8:
            scale = tl.load(scale_row + start // STEP, mask=output_mask, other=0.0).to(tl.float32)
            acc = tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
    return acc


@triton.jit
def _linear_kernel(
    x,  # [num_rows, K]
    weight,  # [N, K], or [N, K / 2] bytes of two columns: see `pack_nibbles`
    scales,  # [N, groups] where weights are integers
    bias,  # [N] where HAS_BIAS
    out,  # [num_rows, N]
    partial,  # [chunks, num_rows, N] float32 where SPLIT
    num_rows,
    x_stride,
    out_stride,
    weight_stride,
    scale_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Neighbours share the weights' tile: rows count up first.
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    outputs = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    row_mask, output_mask = rows < num_rows, outputs < N
    x_row, weight_row = x + rows * x_stride, weight + outputs * weight_stride
    scale_row = scales + outputs * scale_stride
    if SPLIT:
        chunk = tl.program_id(2)
        acc = _chunk_sum(
            x_row, weight_row, scale_row, row_mask, output_mask, chunk * CHUNK, K,
            BLOCK_M, BLOCK_N, CHUNK, STEP, BITS, INTERPRETED,
        )  # fmt: skip
        at = partial + (chunk.to(tl.int64) * num_rows + rows) * N + outputs
        tl.store(at, acc, mask=row_mask & output_mask)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, CHUNK):
            total += _chunk_sum(
                x_row, weight_row, scale_row, row_mask, output_mask, first, K,
                BLOCK_M, BLOCK_N, CHUNK, STEP, BITS, INTERPRETED,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=output_mask, other=0.0).to(tl.float32)
        tl.store(out + rows * out_stride + outputs, total.to(out.dtype.element_ty), mask=row_mask & output_mask)


@triton.jit
def _add_chunks_kernel(
    partial,  # [chunks, num_rows, N] float32
    bias,  # [N] where HAS_BIAS
    out,  # [num_rows, N]
    num_rows,
    out_stride,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < N
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        total += tl.load(partial + (chunk * num_rows + row) * N + outputs, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), mask=mask)


def pack_nibbles(integers: Tensor, group: int) -> Tensor:
    """integers [N, K] int8 within -8..7 -> [N, ceil(K / group) * group / 2] uint8, each plus 8.

    In a group of columns, byte j holds column j (lower four bits) and column j + group / 2: so each half of a group is
    one tile of bytes, without reordering.
    """
    padded = torch.nn.functional.pad(integers, (0, -integers.shape[1] % group))
    halves = (padded.to(torch.int16) + 8).view(len(integers), -1, 2, group // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).to(torch.uint8).flatten(1).contiguous()


class TritonLinear:
    """See `kernels.backend.Linear`: a row's bits depend on that row alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: WeightScheme | None = None) -> None:
        """weight [N, K]; with a scheme (of 8 or 4 bits, rows as they are) it is rounded to integers here.

        Raises ValueError for another scheme.
        """
        checks.check_linear(weight, bias)
        if scheme is not None and (scheme.rounds_rows or CHUNK % scheme.group):
            raise ValueError(f"kernel backend 'triton' has no {scheme.name} weights")
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._step = _BLOCK_K if scheme is None else scheme.group
        self._bits = 8 * weight.element_size() if scheme is None else scheme.bits
        self._weight = self._scales = weight
        if scheme is not None:
            integers, scales = quantize(weight, scheme)
            self._weight = pack_nibbles(integers, scheme.group) if scheme.bits == 4 else integers.contiguous()
            self._scales = scales.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] in x's dtype."""
        checks.check_shape("x", x, [None, self.in_features])
        checks.check_dtype("x", x, *checks.ACTIVATION_DTYPES)
        checks.check_last_dim_contiguous("x", x)
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        if len(x):
            self._launch(x, out)
        return out

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()

    def _launch(self, x: Tensor, out: Tensor) -> None:
        num_rows, chunks = len(x), triton.cdiv(self.in_features, CHUNK)
        split = num_rows <= _FEW_ROWS and chunks > 1
        block_m = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
        partial = (
            torch.empty(chunks, num_rows, self.out_features, dtype=torch.float32, device=x.device) if split else out
        )
        bias = out if self._bias is None else self._bias
        grid = (triton.cdiv(num_rows, block_m), triton.cdiv(self.out_features, BLOCK_N), chunks if split else 1)
        _linear_kernel[grid](
            x,
            self._weight,
            self._scales,
            bias,
            out,
            partial,
            num_rows,
            x.stride(0),
            out.stride(0),
            self._weight.stride(0),
            self._scales.stride(0),
            N=self.out_features,
            K=self.in_features,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            CHUNK=CHUNK,
            STEP=self._step,
            BITS=self._bits,
            HAS_BIAS=self._bias is not None,
            SPLIT=split,
            INTERPRETED=INTERPRETED,
            num_warps=block_m // 16,
            num_stages=4,
            enable_fp_fusion=False,
        )
        if split:
            self._add_chunks(partial, bias, out, chunks)

    def _add_chunks(self, partial: Tensor, bias: Tensor, out: Tensor, chunks: int) -> None:
        block = 1024
        _add_chunks_kernel[(len(out), triton.cdiv(self.out_features, block))](
            partial,
            bias,
            out,
            len(out),
            out.stride(0),
            N=self.out_features,
            CHUNKS=chunks,
            BLOCK=block,
            HAS_BIAS=self._bias is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
