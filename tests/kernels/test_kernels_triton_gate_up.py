"""Gate-up and its activation in one launch: the bits of the layer and the activation one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.backend import ACTIVATIONS, select_backend
from kernels.linear import triton
from kernels.linear.packing import CHUNK
from kernels.linear.schemes import FLOAT8, INT4, INT8, IntegerWeight, WeightScheme
from kernels.linear.triton import TritonLinear
from kernels.triton_backend import TritonBackend

pytestmark = [pytest.mark.stage0, pytest.mark.usefixtures("poisoned")]

WIDTH = 70  # of gate and of up: no multiple of a tile
SCHEMES: list[WeightScheme | None] = [None, INT8, INT4, FLOAT8]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check_same_bits(layer: TritonLinear, x: Tensor, activation: str) -> None:
    backend = TritonBackend(x.device)
    wanted = backend.act_mul(layer(x), activation)
    got = backend.gate_up(layer, x, activation)
    assert got.dtype is x.dtype
    assert not wanted.isnan().any()
    assert torch.equal(got.view(BITS[x.dtype]), wanted.view(BITS[x.dtype]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name if scheme else "whole")
@pytest.mark.parametrize("columns", [100, CHUNK + 40])
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_gate_up_when_run_as_one_then_the_bits_of_two(
    rows: int, columns: int, scheme: WeightScheme | None, device: torch.device
) -> None:
    weight = random(2 * WIDTH, columns, device=device) / columns**0.5
    layer = TritonLinear.of(weight, random(2 * WIDTH, device=device, seed=1), scheme)
    check_same_bits(layer, random(rows, columns, device=device, seed=2) * 3, "silu")


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [100, CHUNK + 40])
def test_every_activation_and_type_when_run_as_one_then_the_bits_of_two(
    columns: int, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    layer = TritonLinear.of(random(2 * WIDTH, columns, device=device, dtype=dtype) / columns**0.5, None)
    check_same_bits(layer, random(5, columns, device=device, dtype=dtype, seed=2) * 3, activation)


@pytest.mark.parametrize("columns", [100, CHUNK + 40])
def test_integers_with_zero_points_when_run_as_one_then_the_bits_of_two(columns: int, device: torch.device) -> None:
    generator, groups = torch.Generator().manual_seed(0), -(-columns // 32)
    codes = torch.randint(0, 16, (2 * WIDTH, columns), generator=generator)
    zeros = torch.randint(0, 16, (2 * WIDTH, groups), generator=generator).repeat_interleave(32, 1)[:, :columns]
    scales = random(2 * WIDTH, groups, device=device) / columns**0.5
    layer = TritonLinear.of_integers(IntegerWeight((codes - zeros).to(device, torch.int8), scales, 32), None)
    assert layer is not None
    check_same_bits(layer, random(5, columns, device=device, seed=2), "silu")


def test_gate_up_when_it_is_run_then_the_activation_is_no_launch_of_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("the activation came after the layer")

    monkeypatch.setattr(triton, "act_mul", refuse)
    x = random(65, 2 * CHUNK, device=device)
    layers = {scheme: TritonLinear.of(random(8, 2 * CHUNK, device=device), None, scheme) for scheme in SCHEMES}
    for scheme, layer in layers.items():
        assert layer.gate_up(x[:64], "silu").shape == (64, 4)
        if scheme in (None, FLOAT8):
            assert layer.gate_up(x, "silu").shape == (65, 4)
        assert layer.gate_up(x[:0], "silu").shape == (0, 4)
    with pytest.raises(AssertionError, match="came after"):
        layers[INT8].gate_up(x, "silu")


def test_a_layer_of_the_vendor_when_gated_then_one_after_the_other(device: torch.device) -> None:
    x, weight = random(5, 100, device=device), random(2 * WIDTH, 100, device=device, seed=1) / 10
    for backend in (TritonBackend(device, exact=False), select_backend(device, "reference")):
        layer = backend.pack_linear(weight)
        assert not isinstance(layer, TritonLinear)
        assert torch.equal(backend.gate_up(layer, x, "silu"), backend.act_mul(layer(x), "silu"))


def test_what_has_no_two_halves_or_no_such_activation_when_gated_then_refused(device: torch.device) -> None:
    x = random(2, 16, device=device)
    with pytest.raises(ValueError, match="first half of 3 outputs"):
        TritonLinear.of(random(3, 16, device=device), None).gate_up(x, "silu")
    with pytest.raises(ValueError, match="no activation 'relu'"):
        TritonLinear.of(random(4, 16, device=device), None).gate_up(x, "relu")
