"""How weights are quantised: small integers, symmetric, with a scale for each output row and group of columns; or fp8.

y = bias + sum over the groups in order of scale * (sum over the group's columns of x * integer), in fp32, or what that
comes to when whole numbers are summed over all groups first (see below). Every scale is a bf16 number (fp16, or bf16,
where the checkpoint brings integers and scales), so that scale * integer is exact in fp32: a quantised layer has
definite weights, and rounding them is its only error. (A processor that multiplies integers faster than a row's own
numbers may take bf16 rows as integers of 16 bits, in steps of 2^-14 of a row's largest number or less. A number of
1/128 of it or more is the same then; where a row's smaller ones would lose more than a part in 1,000 of their norm, it
is multiplied once more with what they lost: see native/twin_rows.h.)

Where weights are rounded to four bits here, the scales of an output are whole multiples, up to 15 and of either sign,
of one number: so all of its weights are that number times integers of eight bits, and whole numbers can be summed over
all groups before anything is scaled.

Where rows are rounded too, x is a whole number times a scale of the row's own group: the group's sum is a whole number
then, which every processor computes exactly, and is multiplied by the row's scale before the weight's.

fp8: both are e4m3 numbers, each row of x and each output's weights with one fp32 scale that makes its largest magnitude
448. y = bias + (sum over the columns of x * weight) * x's scale * the weight's, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Groups begin at column 0 of the weight that is packed; the last one may be shorter."""

    name: str
    bits: int
    group: int  # columns that share a scale: a multiple of 8, of 16 where rows are rounded; 0: all, however many
    rounds_rows: bool = False  # the activations too are rounded to eight bits, when they come, by rows and groups
    is_float: bool = False  # e4m3 numbers in place of integers, of weights and of activations

    @property
    def lowest(self) -> int:
        """The least integer."""
        return -8 if self.bits == 4 else -127

    @property
    def highest(self) -> int:
        """The largest integer."""
        return 7 if self.bits == 4 else 127

    @property
    def heeds_peaks(self) -> bool:
        """Whether the largest weight of an output counts for all of its scales; else each group's for its own alone."""
        return self.bits == 4 or self.group == 0

    def columns(self, k: int) -> int:
        """How many of k columns share a scale."""
        return self.group or max(k, 1)

    def whole_groups(self, columns: slice, k: int) -> slice:
        """Those of k columns that are in the groups of the given ones; where all share a scale, just these."""
        if not self.group:
            return columns
        start, stop = columns.start // self.group * self.group, -(-columns.stop // self.group) * self.group
        return slice(start, min(stop, k))


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [N, K] that came as integers: integers[n, k] * scales[n, k // group]."""

    integers: Tensor  # [N, K] int8
    scales: Tensor  # [N, ceil(K / group)] bf16 or fp16
    group: int  # columns that share a scale: a multiple of 8


INT8 = WeightScheme("int8", bits=8, group=0)
INT4 = WeightScheme("int4", bits=4, group=64)
W8A8 = WeightScheme("w8a8", bits=8, group=128, rounds_rows=True)
FLOAT8 = WeightScheme("fp8", bits=8, group=0, rounds_rows=True, is_float=True)
INTEGER_SCHEMES = {scheme.name: scheme for scheme in (INT8, INT4, W8A8)}  # all that the CPU's kernels have
SCHEMES = {**INTEGER_SCHEMES, FLOAT8.name: FLOAT8}


def head_scheme(scheme: WeightScheme | None) -> WeightScheme | None:
    """What a vocabulary projection, whose errors no layer mends, is packed with where the layers have `scheme`."""
    return None if scheme is None else INT8
