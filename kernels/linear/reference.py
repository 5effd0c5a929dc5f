"""Linear layers and their quantisation in plain torch, for processors or element types without a native kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_linear, check_shape
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.weights import Deferred, made, peaks_of

_LARGEST_FACTOR = 15
_CANDIDATES = (1, 0, -1, -2)  # factors of a group that are tried, beside the usual one
SMALLEST_NUMBER = 1e-18  # a group that holds nothing larger becomes zero: squares would underflow
LARGEST_FLOAT8 = 448.0  # of e4m3
_ROWS_AT_ONCE = 1024  # bounds the memory that quantising takes


class TorchLinear:
    """x [M, K] -> [M, N] by torch. Correct, but a row's bits may depend on M."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_linear(weight, bias)
        self._weight = weight  # [N, K]
        self._bias = bias  # [N] or None
        self.out_features, self.in_features = weight.shape
        self.weight_nbytes = weight.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] -> [M, N] in out_dtype, float32 or by default x's dtype."""
        check_shape("x", x, [None, self.in_features])
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, self._weight, self._bias)
        bias = None if self._bias is None else self._bias.to(out_dtype)
        return F.linear(x.to(out_dtype), self._weight.to(out_dtype), bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()


class DequantizedLinear:
    """A quantised layer that holds its weights in fp32: right to the last rounding, but no smaller than before."""

    def __init__(
        self,
        make: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]],
        weight: Tensor,
        bias: Tensor | None,
        scheme: WeightScheme | None = None,
    ) -> None:
        """make: the linear layer in fp32 that is to multiply; weight [N, K] float32: what is stood for, bias [N].

        scheme: what the weights were quantised with, which may round rows too.
        """
        check_linear(weight, bias)
        self._scheme = scheme
        self._linear = make(weight, None if bias is None else bias.float())
        self.out_features, self.in_features = weight.shape
        self.weight_nbytes = weight.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] -> [M, N] in out_dtype, by default x's."""
        rows = x.float() if self._scheme is None else rounded_rows(x, self._scheme)
        return self._linear(rows).to(out_dtype or x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()


def quantize(weight: Tensor | Deferred, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> integers [N, K] int8, scales [N, groups] bf16: the definition of what every backend does.

    For fp8 e4m3 numbers and scales [N] float32. Where two steps are equally good but for rounding, another backend may
    choose the other one. A scale is NaN where its group holds a number that is not finite. Columns that come with their
    outputs' peaks become what they become in the whole weight, if they are whole groups of it.
    """
    rows = made(weight)
    peaks = peaks_of(weight) if scheme.heeds_peaks else None
    if peaks is None:
        peaks = torch.zeros(len(rows), device=rows.device)
    parts = zip(torch.split(rows, _ROWS_AT_ONCE), torch.split(peaks, _ROWS_AT_ONCE), strict=True)
    make = _float8_bits if scheme.is_float else _quantize
    numbers, scales = zip(*(make(part.float(), scheme, peak.unsqueeze(1)) for part, peak in parts), strict=True)
    joined = torch.cat(numbers)
    return joined.view(torch.float8_e4m3fn) if scheme.is_float else joined, torch.cat(scales)


def find_peaks(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest finite magnitude of each output of weight [N, K] as numbers in dtype: [N] float32."""
    peaks = [rows.to(dtype).abs().amax(1) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    found = torch.cat(peaks).float()
    for row in (~found.isfinite()).nonzero().flatten().tolist():  # hardly ever one
        found[row] = weight[row].to(dtype).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return found


def dequantize(integers: Tensor, scales: Tensor, scheme: WeightScheme) -> Tensor:
    """The weights that a quantised layer stands for: [N, K] float32, exactly (fp8: each rounded once)."""
    if scheme.is_float:
        return integers.float() * scales.unsqueeze(1)
    return widened(IntegerWeight(integers, scales, scheme.columns(integers.shape[1])))


def widened(weight: IntegerWeight) -> Tensor:
    """[N, K] float32, exactly."""
    scales = weight.scales.float().repeat_interleave(weight.group, dim=1)
    return weight.integers.float() * scales[:, : weight.integers.shape[1]]


def round_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [M, K] -> integers [M, K] int8 within 127, scales [M, groups] float32; NaN where a group is not finite."""
    rows, columns = x.shape
    groups = F.pad(x.float(), (0, -columns % group)).view(rows, -1, group)
    largest = groups.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
    usable = largest > SMALLEST_NUMBER
    most = torch.full_like(largest, 127.0)  # a number in its place would be multiplied by the reciprocal
    inverse = (most / largest.where(usable, 1.0)).where(usable, 0.0)
    integers = (groups * inverse).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    scales = (largest / most).where(usable, 0.0) + (groups * 0.0).sum(-1, keepdim=True)
    return integers.flatten(1)[:, :columns], scales.squeeze(-1)


def widened_rows(x: Tensor, group: int) -> Tensor:
    """What rounded rows stand for: [M, K] float32."""
    integers, scales = round_rows(x, group)
    return integers.float() * scales.repeat_interleave(group, dim=1)[:, : x.shape[1]]


def round_to_float8(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 numbers [M, K], 448 being a row's largest; scales [M] float32, NaN where a row is not finite.

    peaks [M, 1] float32: what 448 is where a row has nothing larger.
    """
    finite = x.float().nan_to_num(0.0, 0.0, 0.0)
    largest = finite.abs().amax(1, keepdim=True)
    if peaks is not None:
        largest = largest.maximum(peaks)
    usable = largest > SMALLEST_NUMBER
    most = torch.full_like(largest, LARGEST_FLOAT8)
    inverse = (most / largest.where(usable, 1.0)).where(usable, 0.0)
    numbers = (finite * inverse).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    scales = (largest / most).where(usable, 0.0) + (x.float() * 0.0).sum(1, keepdim=True)
    return numbers, scales.squeeze(1)


def _float8_bits(weight: Tensor, _: WeightScheme, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """`round_to_float8`, the numbers as uint8, which everything in torch knows."""
    numbers, scales = round_to_float8(weight, peaks)
    return numbers.view(torch.uint8), scales


def rounded_rows(x: Tensor, scheme: WeightScheme) -> Tensor:
    """What activations [M, K] become under a scheme: [M, K] float32."""
    if scheme.is_float:
        numbers, scales = round_to_float8(x)
        return numbers.float() * scales.unsqueeze(1)
    return widened_rows(x, scheme.columns(x.shape[1])) if scheme.rounds_rows else x.float()


def _quantize(weight: Tensor, scheme: WeightScheme, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """peaks [N, 1]: zeros where there are no columns elsewhere."""
    rows, columns = weight.shape
    group = scheme.columns(columns)
    groups = F.pad(weight, (0, -columns % group)).view(rows, -1, group)
    at = groups.nan_to_num(0.0, 0.0, 0.0).abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, at)
    size = largest.abs().maximum(peaks.unsqueeze(1)) if scheme.bits == 8 else largest.abs()
    usable = size > SMALLEST_NUMBER
    found = size / scheme.highest if scheme.bits == 8 else _search(groups, largest.where(usable, 0.0), peaks, scheme)
    scales = found.where(usable, 0.0).bfloat16()
    integers = (groups / scales.float()).where(usable, 0.0).round().clamp(scheme.lowest, scheme.highest)
    scales = scales + (groups * 0.0).sum(-1, keepdim=True).bfloat16()
    return integers.nan_to_num(0.0).to(torch.int8).flatten(1)[:, :columns], scales.squeeze(-1)


def _search(groups: Tensor, largest: Tensor, peaks: Tensor, scheme: WeightScheme) -> Tensor:
    """A scale for each group of [N, groups, group] whose largest weight is `largest`, given peaks: [N, groups, 1].

    It is the output's unit times a whole number up to 15, of either sign: the one that loses least, of those by which
    the largest weight becomes about 8. So all of an output's weights are its unit times integers of eight bits. A unit
    has four significant bits, so that scales are bf16 numbers.
    """
    unit = largest.abs().amax(1, keepdim=True).maximum(peaks.unsqueeze(1)) / (_LARGEST_FACTOR * -scheme.lowest)
    unit = ((unit.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)
    values = groups / unit
    usual = (largest.abs() / unit / -scheme.lowest).round()
    least, best = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for step in _CANDIDATES:
        for sign in (-1.0, 1.0):
            factor = (usual + step).clamp(1, _LARGEST_FACTOR) * torch.where(largest > 0, sign, -sign)
            away = values - (values / factor).round().clamp(scheme.lowest, scheme.highest) * factor
            lost = away.square().sum(-1, keepdim=True)
            best, least = factor.where(lost < least, best), lost.minimum(least)
    return best * unit
