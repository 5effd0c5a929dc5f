"""RMSNorm by the native kernel, with or without a residual add."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_norm
from kernels.native.library import DTYPES, NativeLibrary


class NormArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/rowwise.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride", "dtype", "rows", "hidden")),
        *((name, ctypes.c_float) for name in ("eps", "weight_offset")),
    ]


def norm_arguments(
    x: Tensor,  # [rows, hidden]
    weight: Tensor,
    out: Tensor,
    eps: float,
    weight_offset: float,
    residual: Tensor | None = None,  # [rows, hidden]
    total: Tensor | None = None,
) -> NormArguments:
    """For the kernel; the caller keeps the tensors."""
    return NormArguments(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if total is None else total.data_ptr(),
        *(x.stride(0), 0 if residual is None else residual.stride(0), DTYPES[x.dtype], *x.shape),
        *(eps, weight_offset),
    )


def rms_norm(library: NativeLibrary, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., hidden], weight [hidden] of x's dtype -> norm(x) * (weight_offset + weight)."""
    if not _fits(x, weight):
        check_norm(x, weight)
        check_dtype("weight", weight, x.dtype)
        weight = weight.contiguous()
    rows = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = norm_arguments(rows, weight, out, eps, weight_offset)
    library.rms_norm(ctypes.addressof(arguments), torch.get_num_threads())
    return out


def add_rms_norm(
    library: NativeLibrary, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x, residual [..., hidden] -> (rms_norm(x + residual), x + residual)."""
    if not (_fits(x, weight) and _fits(residual, weight) and x.shape == residual.shape):
        check_norm(x, weight, residual)
        check_dtype("weight", weight, x.dtype)
        weight = weight.contiguous()
    rows, added = _as_rows(x), _as_rows(residual)
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    arguments = norm_arguments(rows, weight, out, eps, weight_offset, added, total)
    library.rms_norm(ctypes.addressof(arguments), torch.get_num_threads())
    return out, total


def _fits(x: Tensor, weight: Tensor) -> bool:
    """A quick look that usual arguments pass; the checks that explain what is wrong take longer than a short row."""
    if x.dtype is not weight.dtype or x.dtype not in DTYPES or weight.dim() != 1:
        return False
    return x.dim() > 0 and x.shape[-1] == weight.shape[0] and x.stride(-1) == 1 == weight.stride(0)


def _as_rows(x: Tensor) -> Tensor:
    """[rows, hidden] with a contiguous last dimension; a copy only where the outer dimensions cannot be one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
