"""Linear layers over rounded weights and rounded rows: as the definition says, and bitwise independent of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu_backend import CpuBackend
from kernels.linear.reference import quantize, round_rows
from kernels.linear.schemes import W8A8, WeightScheme, head_scheme
from kernels.reference_backend import ReferenceBackend
from tests.kernels.native_cases import DTYPES, ISAS, TOLERANCE, relative_error, same_bits

pytestmark = pytest.mark.stage0

ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 13, 15, 16, 20, 33, 64, 96, 100)
SHAPES = ((1, 1), (16, 8), (17, 33), (48, 64), (100, 65), (163, 259), (40, 640), (163, 1088))
SCHEMES = (W8A8, replace(W8A8, group=64), replace(W8A8, group=320))


def defined(x: Tensor, weight: Tensor, scheme: WeightScheme) -> Tensor:
    """[M, N] float64: whole numbers summed exactly, by groups."""
    rows, row_scales = round_rows(x, scheme.group)
    columns, column_scales = quantize(weight, scheme)
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for group in range(row_scales.shape[1]):
        part = slice(group * scheme.group, (group + 1) * scheme.group)
        sums = rows[:, part].double() @ columns[:, part].double().T
        total += sums * row_scales[:, group, None].double() * column_scales[:, group].double()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_odd_shapes_when_multiplied_then_as_defined_and_independent_of_batch(isa: str, dtype: torch.dtype) -> None:
    backend = CpuBackend(isa)
    for scheme in SCHEMES:
        for n, k in SHAPES:
            torch.manual_seed(n * 1000 + k)
            weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(128, k).to(dtype)
            x[:, k // 2] *= 50.0
            linear = backend.pack_linear(weight, bias, scheme)
            exact = linear(x, torch.float32)
            expected = defined(x, weight, scheme) + bias.double()
            assert relative_error(exact, expected) < TOLERANCE[torch.float32], (scheme, n, k)
            assert same_bits(linear(x), exact.to(dtype)), (scheme, n, k)
            for rows in ROWS:
                assert same_bits(linear(x[128 - rows :], torch.float32), exact[128 - rows :]), (scheme, n, k, rows)
                assert same_bits(linear(x[:rows]), exact[:rows].to(dtype)), (scheme, n, k, rows)
            many = torch.cat([x, x.flip(0), x])  # copied, while the others are read in place
            assert same_bits(linear(many[128:], torch.float32), torch.cat([exact.flip(0), exact])), (scheme, n, k)
            assert same_bits(linear(many, torch.float32)[:128], exact), (scheme, n, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_any_size_when_rounded_then_every_integer_and_scale_as_defined(isa: str, dtype: torch.dtype) -> None:
    """A unit weight is 127 steps of its scale, so that one product is left, and no sum."""
    k = 200
    x = (torch.randn(64, k) * torch.logspace(-24, 4, 64).unsqueeze(1)).to(dtype)
    x[3], x[4, 128:] = 0.0, 0.0
    integers, scales = round_rows(x, W8A8.group)
    unit = quantize(torch.eye(k), W8A8)[1].float().amax(1)  # the scale of each row's only number
    row_scales = scales.repeat_interleave(W8A8.group, dim=1)[:, :k]
    expected = unit * (127.0 * integers.float() * row_scales)
    actual = CpuBackend(isa).pack_linear(torch.eye(k, dtype=dtype), None, W8A8)(x, torch.float32)
    assert same_bits(actual, expected)
    assert integers.abs().amax(1)[-8:].eq(127).all()


@pytest.mark.parametrize("depth", [300, 640])
@pytest.mark.parametrize("isa", ISAS)
def test_more_rows_than_a_tile_and_threads_when_multiplied_then_rows_as_alone(isa: str, depth: int) -> None:
    weight, x = torch.randn(200, depth).bfloat16(), torch.randn(530, depth).bfloat16()
    linear = CpuBackend(isa).pack_linear(weight, None, W8A8)
    whole = linear(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(linear(x), whole)
    finally:
        torch.set_num_threads(before)
    for row in (0, 95, 96, 191, 192, 255, 256, 299, 511, 529):
        assert same_bits(linear(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("isa", ISAS)
def test_rows_and_weights_that_are_not_finite_when_multiplied_then_only_their_results_are_not(isa: str) -> None:
    weight, x = torch.randn(70, 290).bfloat16(), torch.randn(20, 290).bfloat16()
    clean = CpuBackend(isa).pack_linear(weight, None, W8A8)(x)
    weight[5, 289], x[4, 7], x[11] = float("nan"), float("nan"), float("inf")
    for backend in (CpuBackend(isa), ReferenceBackend()):
        spoilt = backend.pack_linear(weight, None, W8A8)(x)
        assert not spoilt[[4, 11]].isfinite().any()
        assert not spoilt[:, 5].isfinite().any()
        if backend.name == "cpu":
            rows = [row for row in range(20) if row not in (4, 11)]
            columns = [column for column in range(70) if column != 5]
            assert same_bits(spoilt[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_backend_and_torch_without_kernels_when_multiplied_then_as_the_native_layer(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(30, 170).to(dtype), torch.randn(30).to(dtype), torch.randn(5, 170).to(dtype)
    expected = CpuBackend().pack_linear(weight, bias, W8A8)(x)
    for backend in (ReferenceBackend(), CpuBackend("no such instruction set")):
        linear = backend.pack_linear(weight, bias, W8A8)
        assert linear(x).dtype == dtype
        assert relative_error(linear(x), expected) < TOLERANCE[dtype]


def test_gaussian_rows_when_rounded_then_error_is_what_eight_bits_allow() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(256, 1024), torch.randn(64, 1024)
    linear, expected = CpuBackend().pack_linear(weight, None, W8A8), x @ weight.T
    assert (linear(x) - expected).norm() < 0.01 * expected.norm()
    weight[:, : W8A8.group], x[:, 17] = 0.0, 300.0  # a large number spoils its own group alone
    linear, expected = CpuBackend().pack_linear(weight, None, W8A8), x @ weight.T
    assert (linear(x) - expected).norm() < 0.01 * expected.norm()


def test_strided_input_when_multiplied_then_as_contiguous() -> None:
    weight, x = torch.randn(33, 32).bfloat16(), torch.randn(9, 64).bfloat16()
    linear = CpuBackend().pack_linear(weight, None, W8A8)
    expected = linear(x[:, 3:35].clone())
    assert same_bits(linear(x[:, 3:35]), expected)
    assert same_bits(linear(x[:, 3:35].T.contiguous().T), expected)


def test_scheme_when_it_cannot_be_packed_then_value_error() -> None:
    for scheme in (replace(W8A8, group=24), replace(W8A8, bits=4)):
        with pytest.raises(ValueError, match="cannot be rounded"):
            CpuBackend().pack_linear(torch.randn(4, 48), None, scheme)


def test_head_scheme_when_layers_round_rows_then_weights_alone() -> None:
    assert head_scheme(W8A8) is not None
    assert not head_scheme(W8A8).rounds_rows
