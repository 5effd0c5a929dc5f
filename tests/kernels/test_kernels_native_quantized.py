"""Quantised linear layers: against float64 on the weights they stand for, and bitwise independent of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu_backend import CpuBackend
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.reference import dequantize, quantize
from kernels.linear.schemes import INT4, INT8, WeightScheme, head_scheme
from kernels.reference_backend import ReferenceBackend
from tests.kernels.native_cases import (
    DTYPES,
    ISAS,
    TOLERANCE,
    TWIN_ROWS,
    relative_error,
    same_bits,
    twin_rows,
)

pytestmark = pytest.mark.stage0

ROWS = (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 16, 17, 33, 96, 100)
# Neither n nor k a multiple of a panel, a chunk or a group; one, some and many groups; more than one block of panels.
# Then some that tiles can take, k being a multiple of 32, or 64 for whole numbers: last groups that are short, an odd
# number of panels.
SHAPES = ((1, 1), (16, 8), (17, 33), (48, 64), (100, 65), (163, 259), (72, 352), (72, 640), (163, 1088))
SCHEMES = (
    INT8,
    INT4,
    replace(INT8, group=64),
    replace(INT4, group=128),
    replace(INT4, group=24),
    replace(INT8, group=288),
)


def weights_of(backend: CpuBackend, weight: Tensor, scheme: WeightScheme) -> Tensor:
    """The weights that a packed layer stands for: rows of the identity pick them out, scale * integer being exact."""
    identity = torch.eye(weight.shape[1], dtype=weight.dtype)
    picked = backend.pack_linear(weight, None, scheme)(identity, torch.float32)
    return picked.T.contiguous()


def entered(isa: str, x: Tensor, scheme: WeightScheme) -> Tensor:
    """x as integers or as it is: what the kernels multiply, in float64."""
    has_one_scale = scheme.bits == 4 or scheme.columns(x.shape[1]) >= x.shape[1]
    return twin_rows(x) if x.dtype is torch.bfloat16 and isa in TWIN_ROWS and has_one_scale else x.double()


def multiples(rows: int, columns: int, scheme: WeightScheme) -> Tensor:
    """Weights [rows, columns] that a scheme has: every integer, and of four bits every factor of a group."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(scheme.lowest, scheme.highest + 1, (rows, columns), generator=generator)
    group = scheme.columns(columns)
    integers[:, ::group] = scheme.lowest
    if scheme.bits == 8:
        return integers.float()
    factors = torch.randint(1, 16, (rows, -(-columns // group)), generator=generator)
    factors[:, 0] = 15
    return (integers * factors.repeat_interleave(group, dim=1)[:, :columns]).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_odd_shapes_when_multiplied_then_near_float64_and_independent_of_batch(isa: str, dtype: torch.dtype) -> None:
    backend = CpuBackend(isa)
    for scheme in SCHEMES:
        for n, k in SHAPES:
            torch.manual_seed(n * 1000 + k)
            weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(128, k).to(dtype)
            linear = backend.pack_linear(weight, bias, scheme)
            expected = entered(isa, x, scheme) @ weights_of(backend, weight, scheme).double().T + bias.double()
            exact = linear(x, torch.float32)
            assert relative_error(exact, expected) < TOLERANCE[torch.float32], (scheme, n, k)
            assert same_bits(linear(x), exact.to(dtype)), (scheme, n, k)
            for rows in ROWS:
                start = 128 - rows
                assert same_bits(linear(x[start:], torch.float32), exact[start:]), (scheme, n, k, rows)
                assert same_bits(linear(x[:rows]), exact[:rows].to(dtype)), (scheme, n, k, rows)
            many = torch.cat([x, x.flip(0), x])  # copied, while the others are read in place
            assert same_bits(linear(many[128:], torch.float32), torch.cat([exact.flip(0), exact])), (scheme, n, k)
            assert same_bits(linear(many, torch.float32)[:128], exact), (scheme, n, k)


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_whose_numbers_are_far_apart_when_multiplied_then_what_is_lost_is_below_an_outputs_rounding(
    isa: str, dtype: torch.dtype, scheme: WeightScheme
) -> None:
    """Outliers of many sizes, of small and of large rows; their weights may be zero, so that the rest alone counts."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 10, 30, 100, 300, 1e3, 3e3, 1e4])
    x = torch.randn(64, 512) * torch.tensor([1.0, 1e-3]).repeat(32).unsqueeze(1)
    x[:, 77] = x[:, 77].sign() * sizes.repeat_interleave(8) * x.abs().mean(dim=1)
    for weight_of_outlier in (0.0, 1.0):
        weight = torch.randn(48, 512)
        weight[:, 77] *= weight_of_outlier
        given, linear = x.to(dtype), CpuBackend(isa).pack_linear(weight.to(dtype), None, scheme)
        expected = given.double() @ weights_of(CpuBackend(isa), weight.to(dtype), scheme).double().T
        exact = linear(given, torch.float32)
        error = (exact - expected).norm(dim=1)
        assert (error < 0.3 * max(TOLERANCE[dtype], 1e-6) * expected.norm(dim=1)).all()
        for row in (0, 7, 40, 63):
            assert same_bits(linear(given[row : row + 1], torch.float32)[0], exact[row])


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("depth", [300, 1088])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_with_and_without_outliers_when_multiplied_then_bias_and_every_type_of_result_as_alone(
    isa: str, depth: int, scheme: WeightScheme
) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(530, depth), torch.randn(85, depth).bfloat16(), torch.randn(85)
    x[::4, 13] = 1e4
    linear = CpuBackend(isa).pack_linear(weight, bias, scheme)
    assert isinstance(linear, QuantizedLinear)
    rows = x.bfloat16()
    whole, exact, rounded = linear(rows), linear(rows, torch.float32), linear.in_float32(rows)
    assert same_bits(exact.bfloat16(), whole)
    assert same_bits(rounded, whole.float())
    for row in (*range(21), 255, 256, 257, 511, 512, 528, 529):
        assert same_bits(linear(rows[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in TWIN_ROWS])
def test_rows_of_sixteen_bits_when_nothing_is_below_a_128th_then_not_rounded(isa: str) -> None:
    """The products of a column with one weight are single numbers: each has to come back as it was."""
    torch.manual_seed(0)
    sign = torch.randint(0, 2, (40, 300)) * 2.0 - 1.0
    x = ((torch.rand(40, 300) * 126 + 1) * sign * torch.logspace(-15, 15, 40).unsqueeze(1)).bfloat16()
    linear = CpuBackend(isa).pack_linear(torch.eye(300).bfloat16(), None, INT8)
    scale = quantize(torch.eye(300), INT8)[1].float().amax(1)
    assert same_bits(linear(x, torch.float32), x.float() * (127 * scale))


@pytest.mark.parametrize("scheme", [INT8, INT4, replace(INT4, group=192)], ids=str)
@pytest.mark.parametrize("depth", [64, 100, 640, 2048])
def test_rows_of_two_bytes_when_multiplied_by_tiles_or_vectors_then_same_bits(depth: int, scheme: WeightScheme) -> None:
    """A sum of whole numbers has no order: the same on every instruction set that multiplies bytes."""
    torch.manual_seed(depth)
    weight, bias, x = torch.randn(85, depth).bfloat16(), torch.randn(85), torch.randn(600, depth).bfloat16()
    x[5] *= torch.logspace(-5, 5, depth).bfloat16()[torch.randperm(depth)]
    x[7, 3], x[8], x[9], x[10] = 1e5, 0.0, 1e-19, 1e-40
    linears = [CpuBackend(isa).pack_linear(weight, bias, scheme) for isa in ISAS if isa in TWIN_ROWS]
    results = [linear(x) for linear in linears]
    assert all(same_bits(result, results[0]) for result in results)
    for linear, result in zip(linears, results, strict=True):
        for row in (0, 5, 7, 8, 9, 10, 255, 256, 599):
            assert same_bits(linear(x[row : row + 1])[0], result[row]), row
        for rows in (2, 3, 4, 5, 9, 17):
            assert same_bits(linear(x[:rows]), result[:rows]), rows


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_as_many_columns_as_sums_have_room_for_when_all_numbers_are_large_then_not_one_overflows(
    isa: str, scheme: WeightScheme
) -> None:
    depth = 1 << 16
    weight = torch.ones(32, depth)
    weight[1::2] = -1.0
    for largest in (1.015625, 1.984375, 1.9921875):  # lower bytes of -128; the largest upper ones; both together
        linear = CpuBackend(isa).pack_linear(weight.bfloat16(), None, scheme)
        result = linear(torch.full((9, depth), largest).bfloat16(), torch.float32)
        integers, scales = quantize(weight[:1], scheme)
        exact = largest * depth * weight[:, 0] * (integers[0, 0] * scales[0, 0].float())
        torch.testing.assert_close(result, exact.expand(9, 32), rtol=2e-4, atol=0.0)  # a chain of sums errs, too


@pytest.mark.parametrize("scheme", [INT4, replace(INT4, group=0)], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_layers_without_columns_or_with_one_long_group_when_multiplied_then_bias_and_every_row_as_alone(
    isa: str, scheme: WeightScheme
) -> None:
    bias = torch.randn(33)
    empty = CpuBackend(isa).pack_linear(torch.randn(33, 0).bfloat16(), bias, scheme)
    for rows in (1, 3, 5, 40):
        assert same_bits(empty(torch.randn(rows, 0).bfloat16(), torch.float32), bias.expand(rows, 33))
    weight, x = torch.randn(33, 640).bfloat16(), torch.full((9, 640), 1.984375).bfloat16()
    linear = CpuBackend(isa).pack_linear(weight, None, scheme)
    whole = linear(x, torch.float32)
    assert same_bits(linear(x[:1], torch.float32), whole[:1])
    expected = x.double() @ weights_of(CpuBackend(isa), weight, scheme).double().T
    assert relative_error(whole, expected) < 1e-5


@pytest.mark.parametrize("depth", [300, 608, 1088])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_more_rows_than_a_tile_and_threads_when_multiplied_then_rows_as_alone(
    isa: str, scheme: WeightScheme, depth: int
) -> None:
    weight, x = torch.randn(200, depth).bfloat16(), torch.randn(530, depth).bfloat16()
    linear = CpuBackend(isa).pack_linear(weight, None, scheme)
    whole = linear(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(linear(x), whole)
            assert same_bits(CpuBackend(isa).pack_linear(weight, None, scheme)(x), whole)
    finally:
        torch.set_num_threads(before)
    for row in (0, 95, 96, 191, 192, 288, 299, 511, 529):
        assert same_bits(linear(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_weights_when_quantised_then_as_the_definition_says(isa: str, scheme: WeightScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(100, 331, generator=generator) * torch.logspace(-12, 3, 100).unsqueeze(1)
    weight = weight.bfloat16().float()  # whose ties are many
    weight[3] = 0.0
    integers, scales = quantize(weight, scheme)
    expected = dequantize(integers, scales, scheme)
    actual = weights_of(CpuBackend(isa), weight, scheme)
    if scheme is INT8:
        assert same_bits(actual, expected)
    else:  # equally good steps may be chosen differently
        assert (actual != expected).any(dim=1).float().mean() < 0.1
        error, least = (actual - weight).norm(dim=1), (expected - weight).norm(dim=1)
        torch.testing.assert_close(error, least, rtol=1e-5, atol=0.0)
    assert not actual[3].any()


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_every_integer_when_packed_then_it_comes_back(isa: str, scheme: WeightScheme) -> None:
    """Multiples of a power of two, the largest among them in every group: nothing is left to round."""
    weight = multiples(40, 3 * scheme.columns(256), scheme) * torch.tensor([0.5, -2.0]).repeat(20).unsqueeze(1)
    for dtype in DTYPES:
        assert same_bits(weights_of(CpuBackend(isa), weight.to(dtype), scheme), weight)


def test_gaussian_weights_when_quantised_then_error_is_what_the_bits_allow() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    backend = CpuBackend()
    errors = {scheme.name: relative_error(weights_of(backend, weight, scheme), weight) for scheme in (INT8, INT4)}
    assert errors["int8"] < 0.008
    assert errors["int4"] < 0.092
    steps = dequantize(torch.ones(256, 1024), quantize(weight, INT8)[1], INT8)
    assert ((weights_of(backend, weight, INT8) - weight).abs() <= steps.abs() / 2 * 1.0001).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
def test_strided_input_and_weight_when_multiplied_then_as_contiguous(scheme: WeightScheme, dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 64).to(dtype), torch.randn(9, 64).to(dtype)
    backend = CpuBackend()
    linear = backend.pack_linear(weight[:33, 8:40], None, scheme)
    expected = backend.pack_linear(weight[:33, 8:40].clone(), None, scheme)(x[:, 3:35].clone())
    assert same_bits(linear(x[:, 3:35]), expected)
    assert same_bits(linear(x[:, 3:35].T.contiguous().T), expected)


@pytest.mark.parametrize("depth", [90, 128])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_are_not_finite_when_multiplied_then_the_others_are_as_before(
    isa: str, scheme: WeightScheme, depth: int
) -> None:
    weight, x = torch.randn(70, depth).bfloat16(), torch.randn(20, depth).bfloat16()
    linear = CpuBackend(isa).pack_linear(weight, None, scheme)
    clean = linear(x)
    x[4, 7], x[11] = float("nan"), float("inf")
    spoilt = linear(x)
    assert spoilt[4].isnan().all()
    assert not spoilt[11].isfinite().any()
    others = [row for row in range(20) if row not in (4, 11)]
    assert same_bits(spoilt[others], clean[others])


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("isa", ISAS)
def test_a_weight_that_is_not_finite_when_quantised_then_its_row_of_results_says_so(
    isa: str, scheme: WeightScheme
) -> None:
    weight, x = torch.randn(40, 50), torch.randn(3, 50)
    weight[5, 49], weight[38, 0] = float("nan"), float("-inf")
    for linear in (backend.pack_linear(weight, None, scheme) for backend in (CpuBackend(isa), ReferenceBackend())):
        bad = linear(x).isnan()
        assert bad[:, [5, 38]].all()
        assert int(bad.sum()) == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
def test_reference_backend_and_torch_without_kernels_when_multiplied_then_as_the_native_layer(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    weight = (multiples(30, 70, scheme) / 64).to(dtype)
    bias, x = torch.randn(30).to(dtype), torch.randn(5, 70).to(dtype)
    expected = CpuBackend().pack_linear(weight, bias, scheme)(x)
    for backend in (ReferenceBackend(), CpuBackend("no such instruction set")):
        linear = backend.pack_linear(weight, bias, scheme)
        assert linear(x).dtype == dtype
        assert relative_error(linear(x), expected) < TOLERANCE[dtype]


def test_packed_layer_when_original_is_overwritten_then_unchanged_and_small() -> None:
    weight, bias, x = torch.randn(200, 256).bfloat16(), torch.randn(200), torch.randn(3, 256).bfloat16()
    for scheme, nbytes in (
        (INT8, 208 * 256 + 208 * 2),
        (INT4, 208 * 128 + 208 * (256 // INT4.group + 1) * 2),
    ):
        linear = CpuBackend().pack_linear(weight, bias, scheme)
        assert isinstance(linear, QuantizedLinear)
        before = linear(x)
        kept = weight.clone()
        weight.fill_(float("nan"))
        assert same_bits(linear(x), before)
        weight.copy_(kept)
        assert linear.weight_nbytes == nbytes


def test_head_scheme_when_layers_are_quantised_then_int8() -> None:
    assert head_scheme(None) is None
    assert head_scheme(INT4) is head_scheme(INT8) is INT8
