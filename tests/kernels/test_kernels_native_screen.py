"""Tokens picked from few logits: those that all logits would have chosen, or none at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.cpu_backend import CpuBackend
from kernels.linear import screened
from kernels.linear.cpu import PackedLinear
from kernels.linear.screened import ScreenedLinear
from kernels.native.library import load_library
from tests.kernels.builders import sampling_tensors
from tests.kernels.native_cases import CPU, DTYPES, ISAS

pytestmark = pytest.mark.stage0

SHAPES = ((64, 1), (320, 96), (4096, 160), (9600, 128))
TEMPERATURES = ([0.0], [1.0], [0.0, 0.7, 1.3, 1e-3, 30.0])


def params(num_rows: int, **columns: list[float]) -> SamplingTensors:
    """Greedy rows, unless others are asked for."""
    seeds = {"temperature": [0.0], "seed": [5, -9, 2**62], "index": [0, 7, 2**33], "choice": [0, 0, 3]}
    return sampling_tensors(CPU, num_rows, **{**seeds, **columns})


def chosen(backend: CpuBackend, head: PackedLinear, x: Tensor, rows: SamplingTensors) -> tuple[Tensor, Tensor]:
    """From all logits."""
    return backend.choose(head.in_float32(x), rows)


def assert_picks(backend: CpuBackend, head: ScreenedLinear, x: Tensor, rows: SamplingTensors) -> None:
    """Something is picked, and it is what all logits say."""
    picked = backend.pick(head, x, lambda: rows)
    assert picked is not None
    wanted = chosen(backend, head, x, rows)
    assert picked[0].tolist() == wanted[0].tolist()
    assert picked[1].tolist() == wanted[1].tolist() == [False] * len(x)


def loosened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few outputs are all wanted, mostly, which is no reason to give up here."""
    monkeypatch.setattr(screened, "_MOST_PART", 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_random_rows_of_every_number_when_picked_then_tokens_are_those_of_all_logits(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    for n, k in SHAPES:
        torch.manual_seed(n + k)
        head = ScreenedLinear(library, torch.randn(n, k).to(dtype))
        for rows in (1, 2, 5, 16, 19, 40):
            for temperature in TEMPERATURES:
                x = (torch.randn(rows, 2 * k) * torch.logspace(-3, 1, rows)[:, None]).to(dtype)[:, ::2]
                assert_picks(backend, head, x, params(rows, temperature=temperature))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_outputs_that_hardly_differ_when_picked_then_ties_go_to_the_lowest_id(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(3)
    base = torch.randn(1, 256)
    weight = (base * (1 + 1e-3 * torch.randn(1280, 1)) + 1e-3 * torch.randn(1280, 256)).to(dtype)
    weight[[700, 900, 1111]] = weight[123].clone()
    head = ScreenedLinear(library, weight)
    x = torch.cat([base, weight[123:124].float(), -base, torch.randn(6, 256)]).to(dtype)
    for temperature in TEMPERATURES:
        assert_picks(backend, head, x, params(len(x), temperature=temperature))
    same = ScreenedLinear(library, weight[:1].expand(1280, 256).contiguous())
    picked = backend.pick(same, x, lambda: params(len(x)))
    assert picked is not None
    assert picked[0].tolist() == [0] * len(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_numbers_that_eight_bits_lose_when_they_decide_then_they_do(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight of each group is so large that the others become zero, and meets nothing in a row; and such rows."""
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(4)
    weight, x = torch.randn(640, 256), torch.randn(7, 256)
    weight[:, ::128] = 1500.0
    x[:, ::128] = 0.0
    head = ScreenedLinear(library, weight.to(dtype))
    for temperature in TEMPERATURES:
        assert_picks(backend, head, x.to(dtype), params(7, temperature=temperature))
    weight[:, ::128] = 1e-3 * torch.randn(640, 2)
    x[:, ::128] = 1000.0
    x[3:, 5::64] = 3.0
    assert_picks(backend, ScreenedLinear(library, weight.to(dtype)), x.to(dtype), params(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_logits_when_compared_with_rough_ones_then_no_further_away_than_was_said(isa: str, dtype: torch.dtype) -> None:
    library = load_library(isa)
    torch.manual_seed(5)
    for scale in (0.02, 3.0):
        weight = (torch.randn(640, 1056) * scale * torch.logspace(-2, 0, 640)[:, None]).to(dtype)
        weight[::7, ::130] *= 20
        head = ScreenedLinear(library, weight)
        x = (torch.randn(9, 1056) * torch.tensor([1.0] * 8 + [1e-3])[:, None]).to(dtype)
        x[4:, ::97] *= 100
        exact = x.double() @ weight.double().T
        reach = x.double().norm(dim=1, keepdim=True) * head.reach.double()
        for logits in (head.rough(x, torch.float32), head(x, torch.float32)):
            assert bool(((logits.double() - exact).abs() <= reach).all())
        assert float((reach / exact.abs().amax(1, keepdim=True)).mean()) < 0.1  # or nothing would be spared


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_or_nearly_so_when_picked_then_all_logits_are_wanted(dtype: torch.dtype) -> None:
    backend, library = CpuBackend(), load_library()
    torch.manual_seed(6)
    weight, x = torch.randn(640, 64).to(dtype), torch.randn(3, 64).to(dtype)
    head = ScreenedLinear(library, weight)
    largest = torch.finfo(dtype).max
    for value in (math.nan, math.inf, -math.inf, largest):
        spoilt = x.clone()
        spoilt[1, 7] = value
        assert backend.pick(head, spoilt, lambda: params(3)) is None
        broken = weight.clone()
        broken[5, 3] = value
        assert backend.pick(ScreenedLinear(library, broken), x, lambda: params(3)) is None
    x[2] = 0.0
    assert backend.pick(head, x, lambda: params(3)) is None
    assert backend.pick(head, x[:2] * 1e-30, lambda: params(2)) is None
    assert backend.pick(head, x[:2], lambda: params(2, temperature=[1e-38])) is None


def test_rows_with_filters_when_picked_then_all_logits_are_wanted() -> None:
    backend = CpuBackend()
    torch.manual_seed(7)
    head = ScreenedLinear(load_library(), torch.randn(6400, 64))
    x = torch.randn(2, 64)
    for given in ({"top_k": [0, 40]}, {"top_p": [1.0, 0.9]}, {"min_p": [0.0, 0.1]}):
        wanted = params(2, temperature=[0.1], **given)
        assert backend.pick(head, x, lambda wanted=wanted: wanted) is None  # type: ignore[misc]
    assert_picks(backend, head, x, params(2, temperature=[0.1], top_k=[6400, 9000]))
    assert_picks(backend, head, x, params(2, top_k=[3], top_p=[0.5], min_p=[0.5]))


def test_row_that_prefers_nothing_when_picked_then_all_logits_are_wanted() -> None:
    head = ScreenedLinear(load_library(), torch.ones(6400, 64))
    assert CpuBackend().pick(head, torch.ones(1, 64), lambda: params(1)) is None


def test_head_when_packed_then_screened_if_that_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened, "LEAST_WEIGHTS", 64 * 64)
    backend, x = CpuBackend(), torch.randn(1, 64)
    for num_outputs, is_screened in ((64, True), (63, False), (96, False), (128, True)):
        head = backend.pack_head(torch.randn(num_outputs, 64))
        assert isinstance(head, ScreenedLinear) is is_screened
        assert is_screened or backend.pick(head, x, lambda: params(1)) is None
    assert not isinstance(backend.pack_head(torch.randn(64, 32)), ScreenedLinear)
