"""Columns of a weight that lie apart, as on ranks, are quantised to what they become in the whole weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.backend import KernelBackend
from kernels.cpu_backend import CpuBackend
from kernels.linear.packing import pack_rounded
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.reference import dequantize, find_peaks, quantize
from kernels.linear.schemes import FLOAT8, INT4, INT8, W8A8, WeightScheme
from kernels.reference_backend import ReferenceBackend
from kernels.weights import Deferred
from tests.kernels.native_cases import DTYPES, ISAS, same_bits

pytestmark = pytest.mark.stage0

SCHEMES = (INT8, INT4, replace(INT4, group=128), W8A8, FLOAT8)
BACKENDS = [pytest.param(ReferenceBackend, id="reference"), *(pytest.param(partial(CpuBackend, i), id=i) for i in ISAS)]
CUTS = (0, 128, 384, 650)  # the last part ends in a short group


def uneven(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Weights whose columns differ in size by so much that every part of them has another largest one."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[:, :128] *= 0.01
    weight[::3, 400] = 20.0
    weight[1::7, 300] = -8.0
    weight[5, 384:] = 0.0
    weight[6] *= 1e-20  # nothing but zeros
    weight[7, :384] *= 1e-20  # zeros because of what lies elsewhere
    return weight.to(dtype)


def part_of(weight: Tensor, start: int, stop: int) -> Deferred:
    part = weight[:, start:stop]
    return Deferred(tuple(part.shape), part.dtype, lambda: part, lambda: find_peaks(weight, weight.dtype))


def parts_of(weight: Tensor) -> list[Deferred]:
    return [part_of(weight, start, stop) for start, stop in pairwise(CUTS)]


def stood_for(backend: KernelBackend, weight: Tensor | Deferred, scheme: WeightScheme) -> Tensor:
    """[N, K] float32: what rows of the identity pick out of a packed layer, scale * integer being exact."""
    identity = torch.eye(weight.shape[1], dtype=weight.dtype)
    linear = backend.pack_linear(weight, None, scheme)
    picked = linear(identity, torch.float32) if isinstance(linear, QuantizedLinear) else linear(identity)
    return picked.T.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.group}")
def test_columns_that_lie_apart_when_quantised_then_integers_and_scales_of_the_whole(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    weight = uneven(40, CUTS[-1], dtype)
    integers, scales = quantize(weight, scheme)
    parts = [quantize(part, scheme) for part in parts_of(weight)]
    assert torch.equal(torch.cat([part.float() for part, _ in parts], dim=1), integers.float())
    if scheme.group:
        assert torch.equal(torch.cat([own for _, own in parts], dim=1), scales)
    else:
        assert all(torch.equal(own, scales) for _, own in parts)
    alone = torch.cat([dequantize(*quantize(part.make(), scheme), scheme) for part in parts_of(weight)], dim=1)
    assert torch.equal(alone, dequantize(integers, scales, scheme)) is not scheme.heeds_peaks


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", BACKENDS)
def test_columns_that_lie_apart_when_packed_then_weights_of_the_whole(
    make: partial[KernelBackend], dtype: torch.dtype, scheme: WeightScheme
) -> None:
    backend, weight = make(), uneven(40, CUTS[-1], dtype)
    whole = stood_for(backend, weight, scheme)
    assert same_bits(torch.cat([stood_for(backend, part, scheme) for part in parts_of(weight)], dim=1), whole)


@pytest.mark.parametrize("make", BACKENDS)
def test_columns_whose_groups_have_scales_of_their_own_when_packed_then_nothing_elsewhere_counts(
    make: partial[KernelBackend],
) -> None:
    backend, weight = make(), uneven(40, CUTS[-1], torch.float32)
    x = torch.randn(3, 256)
    linears = [backend.pack_linear(part, None, W8A8) for part in (part_of(weight, 128, 384), weight[:, 128:384])]
    assert same_bits(linears[0](x), linears[1](x))


@pytest.mark.parametrize("scheme", [INT8, INT4, FLOAT8], ids=lambda scheme: scheme.name)
def test_columns_that_lie_apart_when_packed_for_triton_then_integers_and_scales_of_the_whole(
    scheme: WeightScheme, device: torch.device
) -> None:
    weight = uneven(40, CUTS[-1], torch.bfloat16).to(device)
    whole, parts = pack_rounded(weight, scheme), [pack_rounded(part, scheme) for part in parts_of(weight)]
    assert torch.equal(torch.cat([part.weight.view(torch.uint8) for part in parts], 1), whole.weight.view(torch.uint8))
    assert whole.scales is not None
    scales = [part.scales for part in parts if part.scales is not None]
    if scheme.is_float:
        assert all(torch.equal(own, whole.scales) for own in scales)
    else:
        assert torch.equal(torch.cat(scales, dim=1), whole.scales)


def test_peaks_when_found_then_the_largest_finite_magnitude_of_the_numbers_that_are_quantised() -> None:
    weight = torch.tensor(
        [[1.0, -3.001, 2.0], [float("inf"), 0.0, -1.0], [float("nan"), 70000.0, 5.0], [0.0, 0.0, 0.0]]
    )
    assert find_peaks(weight, torch.float32).tolist() == pytest.approx([3.001, 1.0, 70000.0, 0.0])
    peaks = find_peaks(weight, torch.float16)  # which holds no 70,000
    assert (peaks.dtype, peaks[1:].tolist()) == (torch.float32, [1.0, 5.0, 0.0])
    assert peaks[0] == weight[0].half().abs().max()
