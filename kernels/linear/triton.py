# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Linear layers in Triton whose sums do not depend on the number of rows; weights as they are, small integers or fp8.

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
from kernels.act_mul.triton import act_mul, gated
from kernels.backend import ACTIVATIONS
from kernels.linear.packing import CHUNK, PackedWeight, pack_integers, pack_rounded, pack_whole
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.linear.triton_float8 import round_rows
from kernels.linear.triton_sums import chunk_sum
from kernels.triton_launch import INTERPRETED
from kernels.triton_tuning import launch_options
from kernels.weights import Deferred, made

BLOCK_N = 64  # outputs of a program: a constant, since the bits may depend on it
_FEW_ROWS = 64
_MANY_ROWS = 128
_NO_ACTIVATION = -1


@triton.jit
def _finished(
    total,  # float32
    row_scale,  # of the rows, where FLOAT8
    scale_at,  # pointers to the outputs' scales
    bias_at,  # pointers to the outputs' bias, where HAS_BIAS
    output_mask,
    FLOAT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """What becomes of a sum over all columns."""
    if FLOAT8:
        total = total * row_scale * tl.load(scale_at, mask=output_mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_at, mask=output_mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _rounded_and_gated(
    gate,  # float32
    up,  # float32
    out,  # a pointer to numbers of the type that both are rounded to first, as they would be in memory
    ACTIVATION: tl.constexpr,
):
    """act(gate) * up."""
    gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
    return gated(gate, up, ACTIVATION)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [num_rows, K]
    row_scales,  # [num_rows] float32 where FLOAT8
    weight,  # as in `packing.PackedWeight`
    scales,  # [N, groups] where weights are integers, [N, 1] where FLOAT8
    offsets,  # [N, groups] where HAS_OFFSETS
    bias,  # [N] where HAS_BIAS
    out,  # [num_rows, N], or half of it where an activation is taken
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
    HAS_OFFSETS: tl.constexpr,
    FLOAT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # see `gated`: of the outputs' first half, times the second; -1: none. Not where SPLIT
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION >= 0
    WIDTH: tl.constexpr = N // 2 if GATED else N
    # Neighbours share the weights' tile: rows count up first.
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    outputs = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    row_mask, output_mask = rows < num_rows, outputs < WIDTH
    x_row, weight_row = x + rows * x_stride, weight + outputs * weight_stride
    scale_row, offset_row = scales + outputs * scale_stride, offsets + outputs * scale_stride
    up_weight, up_scale = WIDTH * weight_stride, WIDTH * scale_stride
    if SPLIT:
        chunk = tl.program_id(2)
        acc, _ = chunk_sum(
            x_row, weight_row, scale_row, offset_row, row_mask, output_mask, chunk * CHUNK, K, up_weight, up_scale,
            BLOCK_M, BLOCK_N, CHUNK, STEP, BITS, HAS_OFFSETS, FLOAT8, GATED, INTERPRETED,
        )  # fmt: skip
        at = partial + (chunk.to(tl.int64) * num_rows + rows) * N + outputs
        tl.store(at, acc, mask=row_mask & output_mask)
    else:
        total, up_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, CHUNK):
            acc, up = chunk_sum(
                x_row, weight_row, scale_row, offset_row, row_mask, output_mask, first, K, up_weight, up_scale,
                BLOCK_M, BLOCK_N, CHUNK, STEP, BITS, HAS_OFFSETS, FLOAT8, GATED, INTERPRETED,
            )  # fmt: skip
            total += acc
            up_total += up
        row_scale = tl.load(row_scales + rows, mask=row_mask, other=0.0) if FLOAT8 else 1.0
        total = _finished(total, row_scale, scale_row, bias + outputs, output_mask, FLOAT8, HAS_BIAS)
        if GATED:
            up_bias = bias + outputs + WIDTH
            up_total = _finished(up_total, row_scale, scale_row + up_scale, up_bias, output_mask, FLOAT8, HAS_BIAS)
            total = _rounded_and_gated(total, up_total, out, ACTIVATION)
        tl.store(out + rows * out_stride + outputs, total.to(out.dtype.element_ty), mask=row_mask & output_mask)


@triton.jit
def _chunks_total(
    partial,  # [chunks, num_rows, N] float32
    num_rows,
    row,
    outputs,  # [BLOCK]
    mask,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of all chunks in order, float32 [BLOCK]."""
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        total += tl.load(partial + (chunk * num_rows + row) * N + outputs, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _add_chunks_kernel(
    partial,  # [chunks, num_rows, N] float32
    row_scales,  # [num_rows] float32 where FLOAT8
    scales,  # [N] where FLOAT8
    bias,  # [N] where HAS_BIAS
    out,  # [num_rows, N], or half of it where an activation is taken
    num_rows,
    out_stride,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOAT8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    WIDTH: tl.constexpr = N // 2 if ACTIVATION >= 0 else N
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < WIDTH
    row_scale = tl.load(row_scales + row) if FLOAT8 else 1.0
    total = _chunks_total(partial, num_rows, row, outputs, mask, N, CHUNKS, BLOCK)
    total = _finished(total, row_scale, scales + outputs, bias + outputs, mask, FLOAT8, HAS_BIAS)
    if ACTIVATION >= 0:
        up = _chunks_total(partial, num_rows, row, outputs + WIDTH, mask, N, CHUNKS, BLOCK)
        up = _finished(up, row_scale, scales + outputs + WIDTH, bias + outputs + WIDTH, mask, FLOAT8, HAS_BIAS)
        total = _rounded_and_gated(total, up, out, ACTIVATION)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), mask=mask)


class TritonLinear:
    """See `kernels.backend.Linear`: a row's bits depend on that row alone."""

    def __init__(self, packed: PackedWeight, columns: int, bias: Tensor | None) -> None:
        """columns: K of the weight [N, K] that is packed; bias [N]."""
        checks.check_linear(packed.weight, bias)
        self.out_features, self.in_features = len(packed.weight), columns
        self._packed = packed
        self._bias = bias
        self._bias_pointer = packed.weight if bias is None else bias

    @classmethod
    def of(cls, weight: Tensor | Deferred, bias: Tensor | None, scheme: WeightScheme | None = None) -> TritonLinear:
        """Over weight [N, K]; with a scheme it is rounded here. Raises ValueError for a scheme without a kernel."""
        checks.check_linear(weight, bias)
        packed = pack_whole(made(weight)) if scheme is None else pack_rounded(weight, scheme)
        return cls(packed, weight.shape[1], bias)

    @classmethod
    def of_integers(cls, weight: IntegerWeight, bias: Tensor | None) -> TritonLinear | None:
        """Over exactly these weights; None where `pack_integers` cannot take them."""
        checks.check_linear(weight.integers, bias)
        packed = pack_integers(weight)
        return None if packed is None else cls(packed, weight.integers.shape[1], bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] in x's dtype."""
        return self._run(x, _NO_ACTIVATION)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()

    def gate_up(self, x: Tensor, activation: str) -> Tensor:
        """x [M, K] -> act(first half of the outputs) * second half, [M, N / 2]: the bits of `act_mul(self(x))`.

        Raises ValueError for an odd N, or an activation that is none of `kernels.backend.ACTIVATIONS`.
        """
        if self.out_features % 2 or activation not in ACTIVATIONS:
            raise ValueError(f"no activation '{activation}' of the first half of {self.out_features} outputs")
        if len(x) > _FEW_ROWS and self._packed.has_integers:  # two tiles and their groups' sums overflow the registers
            return act_mul(self(x), activation)
        return self._run(x, ACTIVATIONS.index(activation))

    def _run(self, x: Tensor, activation: int) -> Tensor:
        checks.check_shape("x", x, [None, self.in_features])
        checks.check_dtype("x", x, *checks.ACTIVATION_DTYPES)
        checks.check_last_dim_contiguous("x", x)
        width = self.out_features if activation == _NO_ACTIVATION else self.out_features // 2
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        if len(x):
            self._launch(x, out, activation)
        return out

    def _launch(self, x: Tensor, out: Tensor, activation: int) -> None:
        packed, num_rows, chunks = self._packed, len(x), triton.cdiv(self.in_features, CHUNK)
        # Pointers that are not read point to the weights.
        row_scales = packed.weight
        if packed.is_float8:
            x, row_scales = round_rows(x)
        split = num_rows <= _FEW_ROWS and chunks > 1
        block_m = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
        partial = (
            torch.empty(chunks, num_rows, self.out_features, dtype=torch.float32, device=x.device) if split else out
        )
        scales = packed.weight if packed.scales is None else packed.scales
        offsets = packed.weight if packed.offsets is None else packed.offsets
        width = self.out_features if split else out.shape[1]
        gated = activation != _NO_ACTIVATION and not split
        grid = (triton.cdiv(num_rows, block_m), triton.cdiv(width, BLOCK_N), chunks if split else 1)
        _linear_kernel[grid](
            x,
            row_scales,
            packed.weight,
            scales,
            offsets,
            self._bias_pointer,
            out,
            partial,
            num_rows,
            x.stride(0),
            out.stride(0),
            packed.weight.stride(0),
            scales.stride(0),
            N=self.out_features,
            K=self.in_features,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            CHUNK=CHUNK,
            STEP=packed.step,
            BITS=packed.bits,
            HAS_OFFSETS=packed.offsets is not None,
            FLOAT8=packed.is_float8,
            HAS_BIAS=self._bias is not None,
            ACTIVATION=activation if gated else _NO_ACTIVATION,
            SPLIT=split,
            INTERPRETED=INTERPRETED,
            enable_fp_fusion=False,
            **launch_options(
                "linear",
                x.device,
                (block_m // 16, 4 if out.element_size() == 2 else 2),  # four tiles of 128 float32 rows do not fit
                bits=packed.bits,
                float8=int(packed.is_float8),
                itemsize=out.element_size(),
                rows=block_m,
                gated=int(gated),
            ),
        )
        if split:
            self._add_chunks(partial, row_scales, out, activation)

    def _add_chunks(self, partial: Tensor, row_scales: Tensor, out: Tensor, activation: int) -> None:
        block = 1024
        scales = self._packed.weight if self._packed.scales is None else self._packed.scales
        _add_chunks_kernel[(len(out), triton.cdiv(out.shape[1], block))](
            partial,
            row_scales,
            scales,
            self._bias_pointer,
            out,
            len(out),
            out.stride(0),
            N=self.out_features,
            CHUNKS=len(partial),
            BLOCK=block,
            FLOAT8=self._packed.is_float8,
            HAS_BIAS=self._bias is not None,
            ACTIVATION=activation,
            num_warps=4,
            enable_fp_fusion=False,
        )
