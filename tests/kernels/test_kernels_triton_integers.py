"""Linear layers in Triton over integers that a checkpoint brings: exactly those weights, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.backend import select_backend
from kernels.linear.packing import CHUNK, PackedWeight, pack_integers
from kernels.linear.reference import widened
from kernels.linear.schemes import IntegerWeight
from kernels.linear.triton import TritonLinear
from tests.kernels.builders import assert_close

pytestmark = [pytest.mark.stage0, pytest.mark.usefixtures("poisoned")]

# Outputs, columns, group: groups of a tile's least, of several tiles, of no power of two, and one of all columns; with
# and without a short last one; more columns than a chunk has.
SHAPES = [(1, 1, 8), (17, 33, 16), (40, 64, 32), (70, 200, 96), (65, CHUNK + 40, 128), (20, 700, 256), (24, 600, 600)]
RANGES = [(-8, 7), (-15, 15), (-128, 127)]
ROWS = (1, 64, 65)


def make_weight(
    shape: tuple[int, int, int], bounds: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> IntegerWeight:
    """Random, with both bounds in the first group and in the last, and scales of either sign."""
    n, k, group = shape
    generator = torch.Generator().manual_seed(n * 1000 + k)
    integers = torch.randint(bounds[0], bounds[1] + 1, (n, k), generator=generator).to(torch.int8)
    integers[0, 0], integers[-1, -1] = bounds
    scales = (torch.randn(n, -(-k // group), generator=generator) * 0.03).to(dtype)
    return IntegerWeight(integers.to(device), scales.to(device), group)


def with_zero_points(shape: tuple[int, int, int], device: torch.device) -> IntegerWeight:
    """What four bits of every value become where each group has a zero point of its own, from one end to the other."""
    n, k, group = shape
    groups = -(-k // group)
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    codes[:, ::group], codes[:, -1] = 0, 15
    zeros = torch.randint(0, 16, (n, groups), generator=generator)
    zeros[0], zeros[-1] = 0, 15
    integers = (codes - zeros[:, torch.arange(k) // group]).to(torch.int8)
    return replace(make_weight(shape, (-8, 7), device), integers=integers.to(device))


def stood_for(packed: PackedWeight, columns: int) -> Tensor:
    """The weights of a packed form in float64, from its own tensors."""
    numbers, step = packed.weight.long(), packed.step
    if packed.bits == 4:
        tiles = numbers.view(len(numbers), -1, step // 2)
        numbers = torch.cat([tiles & 15, tiles >> 4], dim=2).flatten(1)
        numbers = numbers + (-8 if packed.offsets is None else packed.offsets.long().repeat_interleave(step, dim=1))
    assert packed.scales is not None
    return (numbers.double() * packed.scales.double().repeat_interleave(step, dim=1)[:, : numbers.shape[1]])[
        :, :columns
    ]


@pytest.mark.parametrize("bounds", RANGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_when_packed_and_multiplied_then_the_float64_product_of_exactly_these_weights(
    shape: tuple[int, int, int], bounds: tuple[int, int], device: torch.device
) -> None:
    weight = make_weight(shape, bounds, device, torch.float16 if bounds == (-8, 7) else torch.bfloat16)
    outputs, columns, group = shape
    packed = pack_integers(replace(weight, group=group))
    assert packed is not None
    assert torch.equal(stood_for(packed, columns), widened(weight).double())
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(2)).to(device)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(device)
    layer = TritonLinear.of_integers(weight, bias)
    assert layer is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = x.to(dtype)
        wanted = rows.double() @ widened(weight).double().T + bias.double()
        if dtype is torch.float32:  # whose roundings on the way are those of terms that largely cancel each other
            terms = 1 + rows.double().abs() @ widened(weight).double().abs().T / 10
            assert_close(layer(rows) / terms, wanted / terms, dtype)
        else:
            assert_close(layer(rows), wanted, dtype)


def test_integers_when_packed_then_four_bits_wherever_sixteen_values_hold_a_group(device: torch.device) -> None:
    shape = (33, 200, 64)
    packed = pack_integers(make_weight(shape, (-8, 7), device))
    assert packed is not None
    assert (packed.bits, packed.offsets) == (4, None)
    weight = with_zero_points(shape, device)
    packed = pack_integers(weight)
    assert packed is not None
    assert packed.bits == 4
    assert torch.equal(stood_for(packed, 200), widened(weight).double())
    weight.integers[5, 199] = weight.integers[5, 192:199].min() + 16
    packed = pack_integers(weight)
    assert packed is not None
    assert packed.bits == 8
    packed = pack_integers(make_weight((33, 200, 16), (-8, 7), device))  # halves of 8 columns are no tiles
    assert packed is not None
    assert packed.bits == 8


@pytest.mark.parametrize("kind", ["zero points", "-8 to 7", "-128 to 127"])
def test_a_row_when_it_stands_among_others_then_it_has_the_same_bits_as_alone(kind: str, device: torch.device) -> None:
    shape = (70, 2 * CHUNK + 72, 128)
    bounds = (-8, 7) if kind == "-8 to 7" else (-128, 127)
    weight = with_zero_points(shape, device) if kind == "zero points" else make_weight(shape, bounds, device)
    layer = TritonLinear.of_integers(weight, None)
    assert layer is not None
    x = torch.randn(max(ROWS), shape[1], generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    assert_close(layer(x[:3]), x[:3].double() @ widened(weight).double().T, torch.bfloat16)
    alone = torch.cat([layer(x[row : row + 1]) for row in (0, 63)])
    for count in ROWS[1:]:
        assert torch.equal(layer(x[:count])[[0, 63]].view(torch.int16), alone.view(torch.int16))


def test_layouts_without_a_tile_when_packed_then_none_and_wrong_ones_are_refused(device: torch.device) -> None:
    backend = select_backend(device, "triton")
    weight = make_weight((4, 48, 8), (-8, 7), device)
    assert backend.pack_integers(weight, None, torch.bfloat16) is None
    assert backend.pack_integers(make_weight((4, 48, 72), (-8, 7), device), None, torch.bfloat16) is not None
    for wrong in (
        replace(weight, group=0),
        replace(weight, group=16),
        replace(weight, scales=weight.scales.float()),
        replace(weight, integers=weight.integers.short()),
    ):
        with pytest.raises(ValueError, match=r"groups|scales|integers"):
            backend.pack_integers(wrong, None, torch.bfloat16)
