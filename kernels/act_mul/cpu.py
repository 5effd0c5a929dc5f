"""Gated activation by the native kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.backend import ACTIVATIONS
from kernels.checks import check_act_mul
from kernels.native.library import DTYPES, NativeLibrary


class ActMulArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/rowwise.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        *((name, ctypes.c_int64) for name in ("stride", "dtype", "activation", "rows", "width")),
    ]


def act_mul_arguments(gate_up: Tensor, out: Tensor, activation: str) -> ActMulArguments:
    """For the kernel; the caller keeps the tensors."""
    return ActMulArguments(
        *(gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0), DTYPES[gate_up.dtype]),
        *(ACTIVATIONS.index(activation), *out.shape),
    )


def act_mul(library: NativeLibrary, gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [num_tokens, 2 * width], gate first -> [num_tokens, width], computed in fp32, rounded once."""
    width = check_act_mul(gate_up, activation)
    out = torch.empty((gate_up.shape[0], width), dtype=gate_up.dtype)
    arguments = act_mul_arguments(gate_up, out, activation)
    library.act_mul(ctypes.addressof(arguments), torch.get_num_threads())
    return out
