"""Linear layers by the native kernel: weights packed once, every row's bits independent of the batch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_linear
from kernels.native.library import DTYPES, LANES, NativeLibrary, last_dim_contiguous, panel_shape
from kernels.weights import ALIGNMENT, Deferred, made

_HEAD = ALIGNMENT  # bytes before a packed weight: whether it is coded
ROUNDED = 3  # float32 that holds what the weight's dtype would; see native/linear.h


class LinearArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/linear.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("out_dtype", ctypes.c_int64),
        ("is_coded", ctypes.c_int64),
    ]


class NativeLinear:
    """x [M, K] -> x @ weight.T + bias [M, N], summed in fp32 in one order for every M, rounded once.

    Holds a packed copy of the weight and a copy of the bias: the originals may be released.
    """

    def __init__(
        self,
        function: Callable[..., int],
        shape: tuple[int, int],
        dtype: torch.dtype,
        packed: Tensor,
        bias: Tensor | None,
        *,
        head: int = 0,
    ) -> None:
        """function: the kernel; packed: what it reads, behind `head` bytes, in place of a weight [N, K] = shape."""
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.weight_nbytes = packed.nbytes - head
        self._function = function
        self._packed = packed
        self._head = head
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self._structs: dict[int, ctypes.Structure] = {}  # by the output's number
        self._addresses: dict[int, int] = {}

    def _pass(self, make: Callable[[LinearArguments], ctypes.Structure]) -> None:
        """Keep the kernel's arguments, made of a layer's, for every type of result."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        numbers = (self._packed.data_ptr() + self._head, bias, self.out_features, self.in_features, DTYPES[self.dtype])
        for code in (DTYPES[self.dtype], DTYPES[torch.float32], ROUNDED):
            self._structs[code] = make(LinearArguments(*numbers, code))
            self._addresses[code] = ctypes.addressof(self._structs[code])

    @property
    def arguments(self) -> ctypes.Structure:
        """The kernel's, for an output in the weight's dtype; they live as long as this object."""
        return self.arguments_for(DTYPES[self.dtype])

    def arguments_for(self, out_code: int) -> ctypes.Structure:
        """The same for another output: float32, or `ROUNDED`."""
        return self._structs[out_code]

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self._run(x, ROUNDED, torch.float32)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] in the weight's dtype -> [M, N] in out_dtype, float32 or by default x's dtype."""
        dtype = out_dtype or self.dtype
        if dtype not in (self.dtype, torch.float32):
            raise ValueError(f"out_dtype must be {self.dtype} or torch.float32, got {dtype}")
        return self._run(x, DTYPES[dtype], dtype)

    def checked(self, x: Tensor) -> Tensor:
        """x as kernels read it. Raises ValueError if it is not [M, K] in the weight's dtype."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype is not self.dtype:
            raise ValueError(f"x must be [*, {self.in_features}] in {self.dtype}, got {list(x.shape)} in {x.dtype}")
        return x if x.stride(1) == 1 else x.contiguous()

    def _run(self, x: Tensor, out_code: int, dtype: torch.dtype) -> Tensor:
        x = self.checked(x)
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=dtype)
        self._function(
            self._addresses[out_code], x.data_ptr(), x.stride(0), out.data_ptr(), rows, torch.get_num_threads()
        )
        return out


class PackedLinear(NativeLinear):
    """The weight as it is, bit by bit; where it is bf16, in twelve bits if the instruction set has a way for that.

    See native/coded.h: what few rows wait for is the memory that weights come from.
    """

    def __init__(self, library: NativeLibrary, weight: Tensor | Deferred, bias: Tensor | None = None) -> None:
        """weight [N, K] in bf16, fp16 or fp32 (a view of a larger one will do), bias [N] in any of them."""
        check_linear(weight, bias)
        check_dtype("weight", weight, *DTYPES)
        n, k = weight.shape
        # An even number of panels: some instruction sets lay two side by side.
        plain_bytes = (
            math.prod((-(-n // (2 * LANES)) * 2, *panel_shape(k, LANES, weight.dtype))) * weight.dtype.itemsize
        )

        def pack() -> Tensor:
            rows = last_dim_contiguous(made(weight).detach())
            shape = (n, k, rows.stride(0), DTYPES[rows.dtype], torch.get_num_threads())
            coded_bytes = library.code_linear(rows.data_ptr(), None, *shape)
            packed = library.weight_memory.zeros((_HEAD + (coded_bytes or plain_bytes),), torch.uint8)
            packed[0] = coded_bytes > 0
            function = library.code_linear if coded_bytes else library.pack_linear
            function(rows.data_ptr(), packed.data_ptr() + _HEAD, *shape)
            return packed

        packed = library.weight_memory.bytes_of(f"{weight.dtype} {n} {k}", pack)
        super().__init__(library.linear, (n, k), weight.dtype, packed, bias, head=_HEAD)
        self.is_coded = bool(packed[0])
        self._pass(self._with_coding)

    def _with_coding(self, layer: LinearArguments) -> LinearArguments:
        layer.is_coded = self.is_coded
        return layer
