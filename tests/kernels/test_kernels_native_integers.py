"""Linear layers made of integers and scales that a checkpoint brings: exactly those weights, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu_backend import CpuBackend
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.reference import widened
from kernels.linear.schemes import IntegerWeight
from kernels.reference_backend import ReferenceBackend
from tests.kernels.native_cases import DTYPES, ISAS, TOLERANCE, relative_error, same_bits

pytestmark = pytest.mark.stage0

# Rows and columns that fill no panel, chunk or group; groups of one chunk, of many, and one of all columns; with and
# without a short last one; of more columns than a block of tiles has.
SHAPES = ((1, 1, 8), (17, 33, 8), (40, 64, 32), (100, 100, 104), (163, 260, 32), (72, 416, 128), (24, 608, 608))
RANGES = ((-8, 7), (-15, 15), (-127, 127), (-128, 127))
SCALE_DTYPES = (torch.bfloat16, torch.float16)
ROWS = (1, 2, 5, 8, 13, 96)


def make_weight(n: int, k: int, group: int, bounds: tuple[int, int], dtype: torch.dtype) -> IntegerWeight:
    """Random, with both bounds among the integers, and scales of either sign."""
    generator = torch.Generator().manual_seed(n * 1000 + k)
    integers = torch.randint(bounds[0], bounds[1] + 1, (n, k), generator=generator).to(torch.int8)
    integers[0, 0], integers[-1, -1] = bounds
    scales = (torch.randn(n, -(-k // group), generator=generator) * 0.03).to(dtype)
    return IntegerWeight(integers, scales, group)


def exact_weights(weight: IntegerWeight) -> Tensor:
    """scale * integer in float64, column by column."""
    columns = torch.arange(weight.integers.shape[1]) // weight.group
    return weight.integers.double() * weight.scales.double()[:, columns]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_integers_and_scales_when_packed_then_exactly_these_weights_multiply(
    isa: str, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    backend = CpuBackend(isa)
    for n, k, group in SHAPES:
        for bounds in RANGES:
            weight = make_weight(n, k, group, bounds, scale_dtype)
            linear = backend.pack_integers(weight, None, dtype)
            assert isinstance(linear, QuantizedLinear)
            picked = linear(torch.eye(k, dtype=dtype), torch.float32).T
            assert torch.equal(picked.double(), exact_weights(weight)), (n, k, group, bounds)
            assert same_bits(widened(weight), picked.contiguous()), (n, k, group, bounds)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_odd_shapes_when_multiplied_then_near_float64_and_independent_of_batch(
    isa: str, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    backend = CpuBackend(isa)
    for n, k, group in SHAPES:
        for bounds in RANGES:
            weight = make_weight(n, k, group, bounds, scale_dtype)
            bias, x = torch.randn(n).to(dtype), torch.randn(96, k).to(dtype)
            linear = backend.pack_integers(weight, bias, dtype)
            exact = linear(x, torch.float32)
            expected = x.double() @ exact_weights(weight).T + bias.double()
            assert relative_error(exact, expected) < TOLERANCE[torch.float32], (n, k, group, bounds)
            assert same_bits(linear(x), exact.to(dtype)), (n, k, group, bounds)
            for rows in ROWS:
                assert same_bits(linear(x[96 - rows :], torch.float32), exact[96 - rows :]), (n, k, group, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_layer_of_eight_bits_when_its_integers_fit_four_then_both_widths_have_the_same_bits(isa: str) -> None:
    """An integer that does not fit, in the last row, makes a layer of eight bits: the other rows must not notice."""
    backend = CpuBackend(isa)
    for dtype in DTYPES:
        narrow = make_weight(40, 96, 32, (-8, 7), torch.float16)
        wide = IntegerWeight(narrow.integers.clone(), narrow.scales, narrow.group)
        x = torch.randn(9, 96).to(dtype)
        sizes = []
        for lowest in (-9, -128):
            wide.integers[-1, 0] = lowest
            four, eight = (backend.pack_integers(weight, None, dtype) for weight in (narrow, wide))
            assert same_bits(four(x, torch.float32)[:, :-1], eight(x, torch.float32)[:, :-1])
            sizes.append((four.weight_nbytes, eight.weight_nbytes))
        assert sizes == [(48 * (48 + 3 * 2), 48 * (96 + 3 * 2))] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_without_native_kernels_when_given_integers_then_near_the_native_layer(dtype: torch.dtype) -> None:
    weight, bias = make_weight(30, 70, 32, (-128, 127), torch.float16), torch.randn(30).to(dtype)
    x = torch.randn(5, 70).to(dtype)
    expected = CpuBackend().pack_integers(weight, bias, dtype)(x)
    for backend in (ReferenceBackend(), CpuBackend("no such instruction set")):
        linear = backend.pack_integers(weight, bias, dtype)
        assert linear(x).dtype == dtype
        assert relative_error(linear(x), expected) < TOLERANCE[dtype]


def test_packed_layer_when_originals_are_overwritten_then_unchanged() -> None:
    weight, bias, x = make_weight(20, 64, 32, (-8, 7), torch.bfloat16), torch.randn(20), torch.randn(3, 64)
    linear = CpuBackend().pack_integers(weight, bias, torch.float32)
    before = linear(x)
    weight.integers.zero_()
    weight.scales.zero_()
    bias.zero_()
    assert same_bits(linear(x), before)


def test_scales_that_are_not_finite_when_packed_then_their_rows_of_results_say_so() -> None:
    weight = make_weight(20, 64, 32, (-8, 7), torch.float16)
    weight.scales[3, 1], weight.scales[18, 0] = float("nan"), float("inf")
    result = CpuBackend().pack_integers(weight, None, torch.float32)(torch.randn(4, 64))
    assert not result[:, [3, 18]].isfinite().any()
    assert int(result.isfinite().sum()) == 4 * 18


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": 12}, "groups of 12 columns"),
        ({"group": 0}, "groups of 0 columns"),
        ({"scales": torch.ones(20, 3, dtype=torch.float16)}, "scales must have shape"),
        ({"scales": torch.ones(20, 2)}, "scales must be"),
        ({"integers": torch.ones(20, 64, dtype=torch.int16)}, "integers must be"),
    ],
)
def test_integers_that_the_kernel_cannot_take_when_packed_then_value_error(
    changes: dict[str, object], reason: str
) -> None:
    given = {"integers": torch.ones(20, 64, dtype=torch.int8), "scales": torch.ones(20, 2).half(), "group": 32}
    with pytest.raises(ValueError, match=reason):
        CpuBackend().pack_integers(IntegerWeight(**{**given, **changes}), None, torch.float32)  # type: ignore[arg-type]
