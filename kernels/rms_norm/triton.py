# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""RMSNorm in Triton: one program per row, statistics in fp32, so a row's bits depend on the row alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_launch import next_power_of_2, warps_for


@triton.jit
def _rms_norm_kernel(
    x,  # [num_outer, num_inner, hidden]
    residual,  # [num_outer, num_inner, hidden] like x, contiguous; unused without HAS_RESIDUAL
    weight,  # [hidden]
    out,  # [num_outer, num_inner, hidden], contiguous
    total,  # [num_outer, num_inner, hidden], contiguous: x + residual; unused without HAS_RESIDUAL
    outer_stride,
    inner_stride,
    num_inner,
    eps,
    weight_offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    x_at = x + row // num_inner * outer_stride + row % num_inner * inner_stride + columns
    value = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * HIDDEN + columns, rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean_square = tl.sum(value * value, axis=0) / HIDDEN
    normed = value * tl.rsqrt(mean_square + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:  # noqa: SIM108 - Triton needs the statement
        normed = normed * (weight_offset + scale)
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * HIDDEN + columns, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., hidden], weight [hidden] -> norm(x) * (weight_offset + weight), contiguous."""
    return _launch(x, None, weight, eps, weight_offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x, residual [..., hidden] -> (rms_norm(x + residual), x + residual), both contiguous."""
    return _launch(x, residual.contiguous(), weight, eps, weight_offset)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """(norm, sum); the sum is x itself where there is no residual."""
    hidden = x.shape[-1]
    # Heads of a fused projection arrive as strided [T, H, D] views; other strided inputs are copied.
    rows = x if x.ndim == 3 else x.reshape(-1, 1, hidden)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    num_rows = rows.shape[0] * rows.shape[1]
    if num_rows == 0:
        return out, total
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(num_rows,)](
        rows,
        rows if residual is None else residual,
        weight,
        out,
        total,
        rows.stride(0),
        rows.stride(1),
        rows.shape[1],
        eps,
        weight_offset,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_OFFSET=weight_offset != 0.0,
        num_warps=warps_for(block),
        enable_fp_fusion=False,
    )
    return out, total
