"""The packed linear layer: against float64, and bitwise independent of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cpu_backend import CpuBackend
from kernels.linear.cpu import PackedLinear
from tests.kernels.native_cases import DOT_PRODUCTS, DTYPES, ISAS, TOLERANCE, relative_error, same_bits

pytestmark = pytest.mark.stage0

ROWS = (1, 2, 3, 5, 7, 9, 13, 33, 100)
SHAPES = ((1, 1), (16, 2), (17, 33), (48, 64), (100, 65), (163, 259), (40, 1056))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_odd_shapes_when_multiplied_then_near_float64_and_independent_of_batch(isa: str, dtype: torch.dtype) -> None:
    backend = CpuBackend(isa)
    for n, k in SHAPES:
        torch.manual_seed(n * 1000 + k)
        weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(128, k).to(dtype)
        linear = backend.pack_linear(weight, bias)
        expected = x.double() @ weight.double().T + bias.double()
        exact = linear(x, torch.float32)
        assert relative_error(exact, expected) < TOLERANCE[torch.float32], (n, k)
        assert same_bits(linear(x), exact.to(dtype)), (n, k)
        assert same_bits(linear.in_float32(x), linear(x).float()), (n, k)
        for rows in ROWS:
            start = 128 - rows
            assert same_bits(linear(x[start:], torch.float32), exact[start:]), (n, k, rows)
            assert same_bits(linear(x[:rows]), exact[:rows].to(dtype)), (n, k, rows)


@pytest.mark.parametrize(("width", "depth"), [(200, 300), (200, 608), (1000, 2080)])
@pytest.mark.parametrize("isa", ISAS)
def test_more_rows_than_a_tile_and_threads_when_multiplied_then_rows_as_alone(isa: str, width: int, depth: int) -> None:
    weight, x = torch.randn(width, depth).bfloat16(), torch.randn(275, depth).bfloat16()
    linear = CpuBackend(isa).pack_linear(weight)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(linear(x))
    finally:
        torch.set_num_threads(before)
    whole = linear(x)
    assert all(same_bits(one, whole) for one in found)
    assert relative_error(whole, x.double() @ weight.double().T) < TOLERANCE[torch.bfloat16]
    for row in (0, 95, 96, 191, 192, 249, 255, 256, 274):
        assert same_bits(linear(x[row : row + 1])[0], whole[row])
    for rows in (16, 17, 21, 32, 33, 48, 50, 256):
        assert same_bits(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("width", [992, 1152])  # of the first, up to 256 rows stay where they are
@pytest.mark.parametrize("isa", ISAS)
def test_no_bias_and_several_passes_when_multiplied_on_any_number_of_threads_then_the_same_bits(
    isa: str, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() * 1e-19 for n in (width, 530))
    x[5, 3], x[6, 3], x[7] = math.inf, math.nan, 1e19
    strided = torch.cat([x, x], 1)[:, :64]
    linear = CpuBackend(isa).pack_linear(weight)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [
                linear(x),
                linear(strided),
                torch.cat([linear(strided[:20]), linear(strided[20:120]), linear(x[120:])]),
            ]
            found.append(torch.cat([linear(x[row : row + 1]) for row in range(len(x))]))
            found += [linear.in_float32(x).bfloat16(), linear(x, torch.float32).bfloat16()]
    finally:
        torch.set_num_threads(before)
    assert found[0][7].isfinite().all()
    assert found[0][7].any()
    for one in found:
        assert torch.equal(one.nan_to_num(nan=-7.0), found[0].nan_to_num(nan=-7.0))
    for number, one in enumerate(found):
        if number % 6 < 4:  # bit for bit, NaN and zeros as well
            assert torch.equal(one.view(torch.int16), found[0].view(torch.int16))


@pytest.mark.parametrize("isa", ISAS)
def test_sums_that_are_subnormal_when_written_then_rounded_like_torch(isa: str) -> None:
    bias = torch.tensor([1e-39, -3e-39, 1e-40, 1.0] * 10).bfloat16()
    linear = CpuBackend(isa).pack_linear(torch.zeros(40, 64).bfloat16(), bias)
    for rows in (1, 9, 40):
        x = torch.ones(rows, 64).bfloat16()
        assert same_bits(linear(x), bias.expand(rows, -1).contiguous())
        assert same_bits(linear.in_float32(x), bias.float().expand(rows, -1).contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input_and_weight_when_multiplied_then_as_contiguous(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 64).to(dtype), torch.randn(9, 64).to(dtype)
    backend = CpuBackend()
    linear = backend.pack_linear(weight[:33, 8:40])
    expected = backend.pack_linear(weight[:33, 8:40].clone())(x[:, 3:35].clone())
    assert same_bits(linear(x[:, 3:35]), expected)
    assert same_bits(linear(x[:, 3:35].T.contiguous().T), expected)


def test_packed_layer_when_original_weight_is_overwritten_then_unchanged() -> None:
    weight, bias, x = torch.randn(20, 24), torch.randn(20), torch.randn(3, 24)
    linear = CpuBackend().pack_linear(weight, bias)
    before = linear(x)
    weight.fill_(float("nan"))
    bias.fill_(float("nan"))
    assert same_bits(linear(x), before)
    assert isinstance(linear, PackedLinear)
    assert (linear.in_features, linear.out_features) == (24, 20)
    assert linear.weight_nbytes == 32 * 24 * 4


def test_no_rows_when_multiplied_then_empty_result() -> None:
    assert CpuBackend().pack_linear(torch.randn(5, 3))(torch.empty(0, 3)).shape == (0, 5)


def test_wrong_width_or_dtype_when_multiplied_then_value_error() -> None:
    linear = CpuBackend().pack_linear(torch.randn(5, 3))
    for bad in (torch.randn(2, 4), torch.randn(3), torch.randn(2, 3).bfloat16()):
        with pytest.raises(ValueError, match="x must be"):
            linear(bad)
    with pytest.raises(ValueError, match="out_dtype"):
        linear(torch.randn(2, 3), torch.float16)


@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_special_numbers_when_multiplied_by_one_then_rounded_like_torch(
    isa: str, dtype: torch.dtype, depth: int
) -> None:
    values = torch.tensor(
        [0.0, -0.0, 1e-40, -3e-8, 6e-8, 6.1e-5, 65504.0, 65519.9, 7e4, 3.3e38, torch.inf, -torch.inf, torch.nan]
    )
    x = torch.zeros(len(values), depth, dtype=dtype)
    x[:, depth // 2] = values.to(dtype)
    actual = CpuBackend(isa).pack_linear(torch.ones(1, depth, dtype=dtype))(x)
    x = x[:, depth // 2 :][:, :1]
    if isa in DOT_PRODUCTS and dtype == torch.bfloat16:
        x = torch.where(x.abs() < 1e-37, 0.0, x)  # those instructions flush subnormal inputs
    assert torch.equal(actual.nan_to_num(nan=-7.0), x.nan_to_num(nan=-7.0))
    narrow = CpuBackend(isa).pack_linear(torch.ones(1, 1, dtype=torch.float16))
    assert torch.equal(narrow(x.half()).nan_to_num(nan=-7.0), x.half().nan_to_num(nan=-7.0))
