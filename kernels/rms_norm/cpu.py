"""RMSNorm by the native kernel, with or without a residual add."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_norm
from kernels.native.library import DTYPES, NativeLibrary


class NormArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/src/rowwise.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride", "dtype", "rows", "hidden")),
        *((name, ctypes.c_float) for name in ("eps", "weight_offset")),
    ]


def rms_norm(library: NativeLibrary, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., hidden], weight [hidden] of x's dtype -> norm(x) * (weight_offset + weight)."""
    check_norm(x, weight)
    return _run(library, x, None, weight, (eps, weight_offset))[0]


def add_rms_norm(
    library: NativeLibrary, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x, residual [..., hidden] -> (rms_norm(x + residual), x + residual)."""
    check_norm(x, weight, residual)
    return _run(library, x, residual, weight, (eps, weight_offset))


def _run(
    library: NativeLibrary, x: Tensor, residual: Tensor | None, weight: Tensor, scalars: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Returns (normalised, sum); the sum is x itself without a residual."""
    check_dtype("weight", weight, x.dtype)
    weight = weight.contiguous()
    hidden = x.shape[-1]
    rows = _as_rows(x)
    added = None if residual is None else _as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    arguments = NormArguments(
        rows.data_ptr(),
        0 if added is None else added.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if added is None else total.data_ptr(),
        rows.stride(0),
        0 if added is None else added.stride(0),
        DTYPES[x.dtype],
        rows.shape[0],
        hidden,
        *scalars,
    )
    library.rms_norm(ctypes.addressof(arguments), torch.get_num_threads())
    return out, total


def _as_rows(x: Tensor) -> Tensor:
    """[rows, hidden] with a contiguous last dimension; a copy only where the outer dimensions cannot be one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
