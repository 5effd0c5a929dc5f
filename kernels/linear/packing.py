"""How the Triton kernels want the weights of a linear layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_dtype, check_shape
from kernels.linear.reference import quantize
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.weights import Deferred

CHUNK = 1024  # columns that are summed at a stretch: a multiple of every step
_WHOLE_STEP = 64
_LONGEST_STEP = 128  # of integers. A larger group is summed in parts of so many columns, each scaled by itself
_SHORTEST_STEP = 16  # what a tensor core takes at once
_SHORTEST_NIBBLES = 2 * _SHORTEST_STEP  # of four bits: each half is a tile


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K]: numbers as they are, or integers times a scale for each output and step of columns; or fp8."""

    weight: Tensor  # [N, K], or [N, ceil(K / step) * step / 2] bytes: see `pack_nibbles`
    bits: int  # of a number: 4 or 8 are integers, unless they are e4m3 numbers
    step: int  # columns that the kernel multiplies at a time: a power of two
    scales: Tensor | None = None  # [N, ceil(K / step)] bf16 or fp16; of e4m3 numbers [N, 1] float32
    offsets: Tensor | None = None  # shaped as the integers' scales, int8: added to four bits; None: -8

    @property
    def is_float8(self) -> bool:
        """Whether weights are e4m3 numbers: rows have to be, too."""
        return self.weight.dtype is torch.float8_e4m3fn

    @property
    def has_integers(self) -> bool:
        """Whether weights are integers times scales."""
        return self.bits <= 8 and not self.is_float8


def pack_whole(weight: Tensor) -> PackedWeight:
    """weight [N, K] in a floating point type, as it is."""
    return PackedWeight(weight, 8 * weight.element_size(), _WHOLE_STEP)


def pack_rounded(weight: Tensor | Deferred, scheme: WeightScheme) -> PackedWeight:
    """What `scheme` makes of weight [N, K]. Raises ValueError for a scheme without a kernel."""
    if scheme.is_float:
        numbers, scales = quantize(weight, scheme)
        return PackedWeight(numbers, scheme.bits, _LONGEST_STEP, scales.unsqueeze(1))
    if scheme.rounds_rows or (scheme.group and CHUNK % scheme.group):
        raise ValueError(f"kernel backend 'triton' has no {scheme.name} weights")
    integers, scales = quantize(weight, scheme)
    step = step_of(scheme)
    packed = pack_nibbles(integers, step) if scheme.bits == 4 else integers.contiguous()
    return PackedWeight(
        packed, scheme.bits, step, _of_steps(scales, weight.shape[1], scheme.columns(weight.shape[1]), step)
    )


def step_of(scheme: WeightScheme) -> int:
    """Columns that share a scale here, of integers: a group, or a part of one."""
    return math.gcd(scheme.group, _LONGEST_STEP)  # gcd(0, x) is x


def pack_integers(weight: IntegerWeight) -> PackedWeight | None:
    """Exactly these weights: in four bits where a group's integers span no more than 16 values, else in eight.

    None where a group is too short for a tile. Raises ValueError on shapes or dtypes that are none of `IntegerWeight`.
    """
    check_shape("integers", weight.integers, [None, None])
    check_dtype("integers", weight.integers, torch.int8)
    check_dtype("scales", weight.scales, torch.bfloat16, torch.float16)
    n, k = weight.integers.shape
    if weight.group <= 0:
        raise ValueError(f"groups have {weight.group} columns")
    check_shape("scales", weight.scales, [n, -(-k // weight.group)])
    step = _LONGEST_STEP if weight.group >= k else math.gcd(weight.group, _LONGEST_STEP)
    if step < _SHORTEST_STEP:
        return None
    scales = _of_steps(weight.scales, k, weight.group, step)
    lowest, highest = _bounds(weight.integers, step)
    if step < _SHORTEST_NIBBLES or (highest.short() - lowest > 15).any():
        return PackedWeight(weight.integers.contiguous(), 8, step, scales)
    if (lowest >= -8).all() and (highest <= 7).all():
        return PackedWeight(pack_nibbles(weight.integers, step), 4, step, scales)
    columns = lowest.repeat_interleave(step, dim=1)[:, :k]
    nibbles = (weight.integers.short() - columns - 8).to(torch.int8)
    return PackedWeight(pack_nibbles(nibbles, step), 4, step, scales, lowest)


def pack_nibbles(integers: Tensor, group: int) -> Tensor:
    """integers [N, K] int8 within -8..7 -> [N, ceil(K / group) * group / 2] uint8, each plus 8.

    In a group of columns, byte j holds column j (lower four bits) and column j + group / 2: so each half of a group is
    one tile of bytes, without reordering.
    """
    padded = F.pad(integers, (0, -integers.shape[1] % group))
    halves = (padded.to(torch.int16) + 8).view(len(integers), -1, 2, group // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).to(torch.uint8).flatten(1).contiguous()


def _of_steps(scales: Tensor, columns: int, group: int, step: int) -> Tensor:
    """scales [N, groups] -> those of the steps that groups are cut into: [N, ceil(columns / step)]."""
    steps = torch.arange(-(-columns // step), device=scales.device)
    return scales.index_select(1, steps * step // group)


def _bounds(integers: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The least and the largest integer of each output and step: [N, steps] int8."""
    n, k = integers.shape
    last = integers[:, -1:].expand(n, -k % step)  # more of what is there changes no bound
    return torch.cat([integers, last], dim=1).view(n, -1, step).aminmax(dim=2)
