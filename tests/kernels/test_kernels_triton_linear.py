"""Linear layers in Triton against float64, and a row's bits whatever stands in the other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.linear.packing import CHUNK, pack_nibbles
from kernels.linear.reference import dequantize, find_peaks, quantize
from kernels.linear.schemes import INT4, INT8, W8A8, WeightScheme
from kernels.linear.triton import TritonLinear
from kernels.weights import Deferred
from tests.kernels.builders import assert_close

pytestmark = [pytest.mark.stage0, pytest.mark.usefixtures("poisoned")]

SHAPES = [(1, 1), (63, 70), (100, 129), (3, CHUNK), (65, CHUNK + 1), (130, 2 * CHUNK + 200)]  # outputs, columns
ROWS = (1, 2, 63, 64, 65, 130)
SCHEMES: list[WeightScheme | None] = [None, INT8, INT4]


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def widened(weight: Tensor, scheme: WeightScheme | None) -> Tensor:
    """The weights that the layer stands for, in float64."""
    if scheme is None:
        return weight.double()
    integers, scales = quantize(weight, scheme)
    return dequantize(integers, scales, scheme).double()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name if scheme else "whole")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_a_layer_when_run_then_it_is_the_float64_product_to_the_last_rounding(
    outputs: int, columns: int, dtype: torch.dtype, scheme: WeightScheme | None, device: torch.device
) -> None:
    weight = random(outputs, columns, dtype=dtype, device=device) / columns**0.5
    bias = random(outputs, dtype=dtype, device=device, seed=1)
    x = random(3, columns, dtype=dtype, device=device, seed=2)
    wanted = x.double() @ widened(weight, scheme).T + bias.double()
    assert_close(TritonLinear.of(weight, bias, scheme)(x), wanted, dtype)


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
def test_halves_that_come_with_their_outputs_peaks_when_multiplied_then_their_weights_are_those_of_the_whole(
    scheme: WeightScheme, device: torch.device
) -> None:
    weight, units = random(65, 256, dtype=torch.float32, device=device), torch.eye(256, device=device)
    weight[::2, 200] = 9.0

    def half(columns: slice) -> Tensor:
        own = Deferred((65, 128), weight.dtype, lambda: weight[:, columns], lambda: find_peaks(weight, weight.dtype))
        return TritonLinear.of(own, None, scheme)(units[columns, columns])

    picked = torch.cat([half(slice(0, 128)), half(slice(128, 256))])
    assert torch.equal(picked, TritonLinear.of(weight, None, scheme)(units))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name if scheme else "whole")
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_when_it_stands_among_others_then_it_has_the_same_bits_as_alone(
    scheme: WeightScheme | None, has_bias: bool, device: torch.device
) -> None:
    columns, outputs = 2 * CHUNK + 72, 100
    weight = random(outputs, columns, dtype=torch.bfloat16, device=device) / columns**0.5
    layer = TritonLinear.of(weight, random(outputs, dtype=torch.bfloat16, device=device) if has_bias else None, scheme)
    x = random(max(ROWS), columns, dtype=torch.bfloat16, device=device, seed=3)
    alone = torch.cat([layer(x[row : row + 1]) for row in (0, 1, 62)])
    for count in ROWS[2:]:
        among = layer(x[:count])
        assert torch.equal(among[[0, 1, 62]].view(torch.int16), alone.view(torch.int16))


def test_rows_beyond_when_they_are_not_finite_then_no_other_row_hears_of_it(device: torch.device) -> None:
    weight = random(65, CHUNK + 64, dtype=torch.float32, device=device)
    layer = TritonLinear.of(weight, None)
    x = random(5, CHUNK + 64, dtype=torch.float32, device=device)
    clean = layer(x)
    x[2] = float("nan")
    assert torch.equal(layer(x)[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_a_view_with_a_stride_when_multiplied_then_its_rows_are(device: torch.device) -> None:
    layer = TritonLinear.of(random(20, 64, dtype=torch.float32, device=device), None)
    wide = random(4, 100, dtype=torch.float32, device=device)
    assert torch.equal(layer(wide[:, :64]), layer(wide[:, :64].contiguous()))
    assert layer(wide[:0, :64]).shape == (0, 20)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_four_bits_when_packed_then_each_half_of_a_group_is_in_its_half_of_the_bytes(columns: int) -> None:
    integers = torch.randint(-8, 8, (3, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = pack_nibbles(integers, 64)
    low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
    whole = torch.cat([low.view(3, -1, 32), high.view(3, -1, 32)], dim=2).flatten(1)
    assert torch.equal(whole[:, :columns], integers)


def test_a_scheme_that_rounds_rows_when_packed_then_it_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="no w8a8 weights"):
        TritonLinear.of(random(8, 128, dtype=torch.float32, device=device), None, W8A8)
