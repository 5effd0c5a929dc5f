"""Quantised linear layers by the native kernel: packed and multiplied in place, never widened in memory."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_linear, check_shape
from kernels.linear.cpu import LinearArguments, NativeLinear
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.native.library import DTYPES, LANES, NativeLibrary, last_dim_contiguous
from kernels.weights import Deferred, made, peaks_of

_CHUNK_BYTES = 64  # as in native/integers.h
_SCALE_BYTES = 2
_TWIN_COLUMNS = 1 << 16  # whose products of bytes are below 2^31 together
_FACTOR_GROUP = 255  # columns whose bytes add up to 16 bits


class QuantizedArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/quantized.h."""

    _fields_ = [
        ("layer", LinearArguments),
        *((name, ctypes.c_int64) for name in ("bits", "group", "full_range", "half_scales", "row_bits")),
    ]


@dataclass(frozen=True, slots=True)
class Layout:
    """How integers and scales are packed."""

    bits: int
    group: int  # columns that share a scale, a multiple of what a step of the kernel takes
    full_range: bool = False  # -128 is among the integers of eight bits
    half_scales: bool = False  # scales in fp16, else bf16
    row_bits: int = 0  # activations are rounded to integers of 8 bits, or bf16 ones may be to 16; 0: neither
    is_measured: bool = False  # `QuantizedLinear.squares` lie behind both

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Scales and integers together; rows are padded to panels, columns to steps of the kernel."""
        steps = -(-columns // (_CHUNK_BYTES * 8 // LANES // self.bits))
        scales = -(-columns // self.group) + int(self.bits == 4 and self.row_bits == 16)  # beside factors, outputs' own
        return -(-rows // LANES) * (scales * LANES * _SCALE_BYTES + steps * _CHUNK_BYTES)

    def arguments(self, layer: LinearArguments) -> QuantizedArguments:
        """The kernel's."""
        numbers = (self.bits, self.group, self.full_range, self.half_scales, self.row_bits)
        return QuantizedArguments(layer, *numbers)

    def square_bytes(self, rows: int) -> int:
        """What lies behind them."""
        return 2 * rows * torch.float32.itemsize if self.is_measured else 0


class QuantizedLinear(NativeLinear):
    """x [M, K] -> x @ weight.T + bias [M, N] over weights that are integers times scales.

    squares [2, N] float32, if they were asked for: each output's sums, of the squares of what rounding has taken away
    from its weights, and of its weights.
    """

    def __init__(
        self,
        library: NativeLibrary,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None,
        layout: Layout,
        pack: Callable[[int, int | None], object],
    ) -> None:
        """A weight [N, K] = shape under activations of dtype.

        pack fills it, given the addresses of its arguments and, if they are wanted, of the squares.
        """
        self._layout = layout
        num_bytes = layout.packed_bytes(*shape)

        def fill(packed: Tensor) -> None:
            layer = LinearArguments(packed.data_ptr(), 0, *shape, DTYPES[dtype], DTYPES[dtype])
            arguments = layout.arguments(layer)
            pack(ctypes.addressof(arguments), packed.data_ptr() + num_bytes if layout.is_measured else None)

        packed = library.weight_memory.filled((num_bytes + layout.square_bytes(shape[0]),), torch.uint8, fill)
        super().__init__(library.quantized_linear, shape, dtype, packed, bias)
        self.squares = packed[num_bytes:].view(torch.float32).view(2, -1) if layout.is_measured else None
        self._pass(layout.arguments)

    @property
    def takes_bytes(self) -> bool:
        """Whether rows of eight bits could be multiplied by what is packed as well."""
        return self._layout.row_bits == 16 and self._layout.bits == 8 and self.dtype is torch.bfloat16

    def for_rounded_rows(self) -> QuantizedLinear:
        """The same packed weights over activations that are rounded to eight bits, where `takes_bytes` holds."""
        other = copy.copy(self)
        other._layout, other._structs, other._addresses = replace(self._layout, row_bits=8), {}, {}
        other._pass(other._layout.arguments)
        return other

    @classmethod
    def quantizing(
        cls,
        library: NativeLibrary,
        weight: Tensor | Deferred,
        bias: Tensor | None,
        scheme: WeightScheme,
        *,
        is_measured: bool = False,
    ) -> QuantizedLinear:
        """What `scheme` makes of weight [N, K] in bf16, fp16 or fp32 (a view will do); bias [N] in any of them.

        is_measured: with squares.
        """
        check_linear(weight, bias)
        check_dtype("weight", weight, *DTYPES)
        n, k = weight.shape
        if scheme.rounds_rows and (scheme.bits != 8 or scheme.group % LANES):
            raise ValueError(f"rows cannot be rounded to {scheme.bits} bits in groups of {scheme.group}")
        group = scheme.group or max(-(-k // LANES), 1) * LANES
        layout = Layout(scheme.bits, group, row_bits=_row_bits(scheme, k, weight.dtype), is_measured=is_measured)

        def pack(arguments: int, squares: int | None) -> None:
            rows = last_dim_contiguous(made(weight).detach())
            peaks, peaks_at = peaks_of(weight) if scheme.heeds_peaks else None, None
            if peaks is not None:
                check_shape("peaks", peaks, (n,))
                check_dtype("peaks", peaks, torch.float32)
                peaks = peaks.contiguous()
                peaks_at = peaks.data_ptr()
            library.quantize(arguments, rows.data_ptr(), rows.stride(0), peaks_at, squares, torch.get_num_threads())

        return cls(library, (n, k), weight.dtype, bias, layout, pack)

    @classmethod
    def of_integers(
        cls, library: NativeLibrary, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Exactly the given weights, in four bits where all integers fit, for activations in dtype; bias [N]."""
        n, k = weight.integers.shape
        check_linear(weight.integers, bias)
        check_dtype("integers", weight.integers, torch.int8)
        check_dtype("scales", weight.scales, torch.bfloat16, torch.float16)
        if dtype not in DTYPES or weight.group <= 0 or weight.group % 8:
            raise ValueError(f"groups of {weight.group} columns under activations in {dtype} cannot be packed")
        check_shape("scales", weight.scales, [n, -(-k // weight.group)])
        integers, scales = weight.integers.contiguous(), weight.scales.contiguous()
        lowest, highest = (int(bound) for bound in integers.aminmax())
        bits = 4 if lowest >= -8 and highest <= 7 else 8
        layout = Layout(bits, weight.group, lowest == -128, scales.dtype is torch.float16)

        def pack(arguments: int, _: int | None) -> None:
            library.pack_integers(arguments, integers.data_ptr(), scales.data_ptr(), torch.get_num_threads())

        return cls(library, (n, k), dtype, bias, layout, pack)


def _row_bits(scheme: WeightScheme, columns: int, dtype: torch.dtype) -> int:
    """16 leaves bf16 activations as they are but for the last bits of small ones: native/twin_rows.h."""
    if scheme.rounds_rows:
        return 8
    group = scheme.columns(columns)
    is_apt = group <= _FACTOR_GROUP if scheme.bits == 4 else group >= columns
    return 16 if is_apt and columns <= _TWIN_COLUMNS and dtype is torch.bfloat16 else 0
