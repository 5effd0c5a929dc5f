"""fp8 linear layers in Triton: rows and weights rounded by the definition, sums to the last rounding of float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.backend import select_backend
from kernels.cpu_backend import CpuBackend
from kernels.linear.packing import CHUNK
from kernels.linear.reference import dequantize, quantize, round_to_float8, rounded_rows
from kernels.linear.schemes import FLOAT8, INT8, head_scheme
from kernels.linear.triton import TritonLinear
from kernels.linear.triton_float8 import round_rows
from tests.kernels.builders import assert_close

pytestmark = [pytest.mark.stage0, pytest.mark.usefixtures("poisoned")]

SHAPES = [(1, 1), (63, 70), (65, CHUNK + 1), (100, 2 * CHUNK + 200)]  # outputs, columns
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """What the definition makes of both, multiplied in float64."""
    return rounded_rows(x, FLOAT8).double() @ dequantize(*quantize(weight, FLOAT8), FLOAT8).double().T


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


def test_rows_when_rounded_then_the_definition_whatever_lies_between_which_numbers(device: torch.device) -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, way)) for way in (0.0, 500.0)]
    row = torch.cat([numbers, middle, *beside, torch.tensor([1e-6, 1e-30, 1e-42])])
    x = torch.stack([row, -row, row * 3.7, row / 1000]).to(device)  # 448 makes the scale 1
    got, scales = round_rows(x)
    wanted, wanted_scales = round_to_float8(x)
    assert torch.equal(bits(got), bits(wanted))
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(got[0, :127].float().cpu(), numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 63, 4096, 5000])
def test_random_rows_when_rounded_then_the_definition(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    wide = random(3, columns + 5, device=device, dtype=dtype) * torch.tensor([[1.0], [1e-3], [60.0]], dtype=dtype).to(
        device
    )
    got, scales = round_rows(wide[:, :columns])
    wanted, wanted_scales = round_to_float8(wide[:, :columns])
    assert torch.equal(bits(got), bits(wanted))
    assert torch.equal(scales, wanted_scales)
    assert got.float().abs().amax(1).tolist() == [448.0] * 3


def test_rows_of_zeros_when_rounded_then_scale_zero_and_of_what_is_not_finite_then_nan(device: torch.device) -> None:
    x = random(5, 70, device=device)
    x[0], x[1], x[2, 3], x[3, 69] = 0.0, 1e-20, math.nan, -math.inf
    assert torch.equal(bits(round_rows(x)[0]), bits(round_to_float8(x)[0]))
    for numbers, scales in (round_rows(x), round_to_float8(x)):
        assert bits(numbers)[:2].bitwise_and(127).max() == 0
        assert scales[:2].tolist() == [0.0, 0.0]
        assert scales[2:4].isnan().all()
        assert scales[4] == x[4].abs().max() / 448


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_a_layer_when_run_then_it_is_the_float64_product_of_the_definition(
    outputs: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random(outputs, columns, device=device, dtype=dtype) / columns**0.5
    bias, x = (
        random(outputs, device=device, dtype=dtype, seed=1),
        random(3, columns, device=device, dtype=dtype, seed=2),
    )
    wanted = product(x, weight) + bias.double()
    # Hopper's products of such numbers are added up with 13 fraction bits, 128 columns at a time.
    is_rough = device.type == "cuda" and dtype == torch.float32
    assert_close(TritonLinear.of(weight, bias, FLOAT8)(x), wanted, torch.float16 if is_rough else dtype)
    assert_close(select_backend(device, "reference").pack_linear(weight, bias, FLOAT8)(x), wanted, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", [CHUNK - 24, 2 * CHUNK + 72])
def test_a_row_when_it_stands_among_others_then_it_has_the_same_bits_as_alone(
    columns: int, has_bias: bool, device: torch.device
) -> None:
    weight = random(70, columns, device=device, dtype=torch.bfloat16) / columns**0.5
    bias = random(70, device=device, dtype=torch.bfloat16) if has_bias else None
    layer = TritonLinear.of(weight, bias, FLOAT8)
    x = random(130, columns, device=device, dtype=torch.bfloat16, seed=3)
    alone = torch.cat([layer(x[row : row + 1]) for row in (0, 1, 62)])
    assert_close(alone, product(x, weight)[[0, 1, 62]] + (0.0 if bias is None else bias.double()), torch.bfloat16)
    for count in (63, 65, 130):
        assert torch.equal(layer(x[:count])[[0, 1, 62]].view(torch.int16), alone.view(torch.int16))


def test_what_is_not_finite_when_multiplied_then_its_row_and_its_output_alone_are_nan(device: torch.device) -> None:
    weight, x = random(70, CHUNK + 64, device=device), random(5, CHUNK + 64, device=device, seed=1)
    clean = TritonLinear.of(weight, None, FLOAT8)(x)
    weight[7, 20], x[2, 5], x[3, 1050] = math.nan, math.nan, math.inf
    for rows in (x, x.repeat(14, 1)):
        spoilt = TritonLinear.of(weight, None, FLOAT8)(rows)[:5]
        assert spoilt[[2, 3]].isnan().all()
        assert spoilt[:, 7].isnan().all()
        assert torch.equal(spoilt[[0, 1, 4]][:, 8:], clean[[0, 1, 4]][:, 8:])


def test_fp8_when_packed_for_a_cpu_then_refused_and_for_the_vocabulary_then_integers() -> None:
    with pytest.raises(ValueError, match="kernel backend 'cpu' has no fp8 weights"):
        CpuBackend().pack_linear(torch.zeros(8, 128), None, FLOAT8)
    assert head_scheme(FLOAT8) is INT8
