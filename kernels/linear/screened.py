"""A vocabulary projection that computes few of its logits, where the largest alone matter; see native/screen.h."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.checks import check_sampling_tensors
from kernels.linear.cpu import ROUNDED, PackedLinear
from kernels.linear.quantized import QuantizedArguments, QuantizedLinear
from kernels.linear.schemes import WeightScheme
from kernels.native.library import DTYPES, LANES, NativeLibrary
from kernels.sampling.cpu import SampleArguments, sample_arguments
from kernels.weights import Deferred

# Below so many weights there is nothing to spare.
LEAST_WEIGHTS = 1 << 16
_COLUMNS = 4 * LANES  # what the kernel looks at together
_MOST_PART = 1 / 4  # of the logits, beyond which all are computed: for rows that prefer nothing
_MOST_ROWS = 32  # more have not been measured with rows of eight bits; their rough logits take much memory
_LONGEST_PAUSE = 64  # calls that do not even try, once more and more have been in vain

# Rows of eight bits are multiplied twice as fast as bf16 ones. The longer a group, the more of that is left by what is
# done behind each; the shorter, the less is lost.
ROUGH = WeightScheme("rough", bits=8, group=256, rounds_rows=True)
# Instruction sets that multiply rows of eight bits faster than others over the same integers.
_FASTER = ("amxbf16", "avx512bf16")
# By how much a logit, or a rough one, may miss the product of its row and weights, over the product of their norms: a
# sum in fp32 of K products that are added one after the other errs by K * 2^-24 at most, and few roundings follow.
# (Rows of two bytes sum up whole numbers: two, which are rounded once, of no more than twice the norms and once.)
_SUM_ERROR = 2.0**-24
_UNSEEN = 1e-18  # a group of columns with nothing larger becomes zero, and squares of less are not counted
_MARGIN = 1.02  # over errors of the norms, which are sums too, and of the bounds
_IS_DONE, _IN_VAIN = 1, 2  # as in native/screen.h


class ScreenArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/screen_bounds.h."""

    _fields_ = [
        ("exact", QuantizedArguments),
        ("rough", QuantizedArguments),
        ("reach", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("largest", ctypes.c_double),
        ("most_pairs", ctypes.c_int64),
    ]


class ScreenedLinear:
    """A layer, and beside it `rough`, its integers of eight bits, for rows of eight bits.

    reach, size [N] float32: a logit and its rough one are no further from each other than the first times the norm of
    a row and the second times the norm of what rounding takes away from the row.
    """

    def __init__(self, library: NativeLibrary, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> None:
        """weight [N, K] in bf16, fp16 or fp32, for which `can_screen` holds; quantised if there is a scheme."""
        self.out_features, self.in_features = n, k = weight.shape
        self._screen = library.screen
        if scheme is None:
            self.layer: PackedLinear | QuantizedLinear = PackedLinear(library, weight)
            exact: ctypes.Structure = QuantizedArguments(self.layer.arguments_for(ROUNDED))
        else:
            self.layer = QuantizedLinear.quantizing(library, weight, None, scheme, is_measured=True)
            exact = self.layer.arguments_for(ROUNDED)
        if isinstance(self.layer, QuantizedLinear) and self.layer.takes_bytes:
            self.rough = self.layer.for_rounded_rows()
        else:
            rough = ROUGH if scheme is None else replace(ROUGH, group=scheme.group)
            self.rough = QuantizedLinear.quantizing(library, weight, None, rough, is_measured=True)
        assert self.rough.squares is not None
        lost, weights = self.rough.squares.double().sqrt()
        if scheme is not None:  # the same integers and scales: what is lost, the layer has lost, too
            lost, weights = torch.zeros_like(lost), weights + lost
        # These are errors of two sums; the rough weights' norm is that of the weights and of what they lack at most.
        error = 4 * (k + 1) * _SUM_ERROR
        self.reach = ((lost * (1 + error) + weights * error) * _MARGIN + math.sqrt(k) * _UNSEEN).float()
        self.size = ((weights + lost) * _MARGIN + math.sqrt(k) * _UNSEEN).float()
        self._largest = float(weights.max()) * _MARGIN
        self._arguments = ScreenArguments(
            exact,
            self.rough.arguments_for(DTYPES[torch.float32]),
            self.reach.data_ptr(),
            self.size.data_ptr(),
            self._largest,
            max(int(n // (2 * LANES) * _MOST_PART), 1),
        )
        self._last: tuple[SamplingTensors, SampleArguments] | None = None
        self._pause = 0  # calls that do not try
        self._next_pause = 1

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """All logits, as the layer gives them."""
        return self.layer(x, out_dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self.layer.in_float32(x)

    def pick(self, x: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor] | None:
        """What `KernelBackend.choose` makes of the logits of x [M, K], without most of them; None: it needs all."""
        if not math.isfinite(self._largest) or len(x) > _MOST_ROWS:
            return None
        if self._pause:
            self._pause -= 1
            return None
        x = self.layer.checked(x)
        out, is_bad = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=torch.bool)
        rows = self._rows_of(params, out, is_bad)
        addresses = ctypes.addressof(self._arguments), ctypes.addressof(rows)
        outcome = self._screen(*addresses, x.data_ptr(), x.stride(0), torch.get_num_threads())
        if outcome == _IN_VAIN:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        elif outcome == _IS_DONE:
            self._next_pause = 1
        return (out, is_bad) if outcome == _IS_DONE else None

    def _rows_of(self, params: SamplingTensors, out: Tensor, is_bad: Tensor) -> SampleArguments:
        """The kernel's; step after step comes with the same tensors, whose addresses are asked for once."""
        if self._last is None or self._last[0] is not params or len(params.index) != len(out):
            check_sampling_tensors(params, len(out))
            self._last = params, sample_arguments(params, out, is_bad, self.out_features)
        arguments = self._last[1]
        arguments.out, arguments.is_bad = out.data_ptr(), is_bad.data_ptr()
        return arguments


def can_screen(library: NativeLibrary, weight: Tensor | Deferred, scheme: WeightScheme | None) -> bool:
    """Whether `ScreenedLinear` is for weight [N, K] with that scheme."""
    n, k = weight.shape
    if scheme is not None and (
        scheme.bits != 8 or scheme.rounds_rows or scheme.group % LANES or library.isa not in _FASTER
    ):
        return False
    return n % _COLUMNS == 0 and n * k >= LEAST_WEIGHTS
