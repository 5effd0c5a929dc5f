"""Quantised linear layers by the native kernel: packed and multiplied in place, never widened in memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_linear
from kernels.linear.cpu import LinearArguments, NativeLinear
from kernels.linear.schemes import WeightScheme
from kernels.native.library import DTYPES, LANES, NativeLibrary, last_dim_contiguous

_CHUNK_BYTES = 64  # as in native/integers.h
_SCALE_BYTES = 2


class QuantizedArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/quantized.h."""

    _fields_ = [("layer", LinearArguments), ("bits", ctypes.c_int64), ("group", ctypes.c_int64)]


class QuantizedLinear(NativeLinear):
    """x [M, K] -> x @ weight.T + bias [M, N] over the weights that `scheme` makes of `weight`."""

    def __init__(
        self, library: NativeLibrary, weight: Tensor, bias: Tensor | None = None, *, scheme: WeightScheme
    ) -> None:
        """weight [N, K] in bf16, fp16 or fp32 (a view of a larger one will do), bias [N] in any of them."""
        check_linear(weight, bias)
        check_dtype("weight", weight, *DTYPES)
        weight = last_dim_contiguous(weight.detach())
        packed = torch.empty(packed_bytes(weight.shape[0], weight.shape[1], scheme), dtype=torch.uint8)
        super().__init__(library.quantized_linear, weight, packed, bias)
        arguments = self._pass(lambda layer: QuantizedArguments(layer, scheme.bits, scheme.group))
        library.quantize(arguments, weight.data_ptr(), weight.stride(0), torch.get_num_threads())


def packed_bytes(rows: int, columns: int, scheme: WeightScheme) -> int:
    """Scales and integers together; rows are padded to panels, columns to steps of the kernel."""
    steps = -(-columns // (_CHUNK_BYTES * 8 // LANES // scheme.bits))
    groups = -(-columns // scheme.group)
    return -(-rows // LANES) * (groups * LANES * _SCALE_BYTES + steps * _CHUNK_BYTES)
