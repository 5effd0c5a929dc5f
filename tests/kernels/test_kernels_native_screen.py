"""Tokens picked from few logits: those that all logits would have chosen, or none at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.cpu_backend import CpuBackend
from kernels.linear import screened
from kernels.linear.reference import widened_rows
from kernels.linear.schemes import INT4, INT8, W8A8, WeightScheme
from kernels.linear.screened import ScreenedLinear
from kernels.native.library import load_library
from tests.kernels.builders import sampling_tensors
from tests.kernels.native_cases import CPU, DTYPES, ISAS, TWIN_ROWS

pytestmark = pytest.mark.stage0

SHAPES = ((64, 1), (320, 96), (4096, 160), (9600, 128))
TEMPERATURES = ([0.0], [1.0], [0.0, 0.7, 1.3, 1e-3, 30.0])
# Whose heads can be screened, quantised or not.
HEADS = [(isa, dtype, None) for isa in ISAS for dtype in DTYPES] + [
    (isa, dtype, INT8) for isa in ISAS for dtype in DTYPES if isa != "avx512vnni" or dtype != torch.bfloat16
]


def params(num_rows: int, **columns: list[float]) -> SamplingTensors:
    """Greedy rows, unless others are asked for."""
    seeds = {"temperature": [0.0], "seed": [5, -9, 2**62], "index": [0, 7, 2**33], "choice": [0, 0, 3]}
    return sampling_tensors(CPU, num_rows, **{**seeds, **columns})


def chosen(backend: CpuBackend, head: ScreenedLinear, x: Tensor, rows: SamplingTensors) -> tuple[Tensor, Tensor]:
    """From all logits."""
    return backend.choose(head.in_float32(x), rows)


def assert_picks(backend: CpuBackend, head: ScreenedLinear, x: Tensor, rows: SamplingTensors) -> None:
    """Something is picked, and it is what all logits say."""
    picked = backend.pick(head, x, lambda: rows)
    assert picked is not None
    wanted = chosen(backend, head, x, rows)
    assert picked[0].tolist() == wanted[0].tolist()
    assert picked[1].tolist() == wanted[1].tolist() == [False] * len(x)


def head_row(head: ScreenedLinear) -> Tensor:
    """A row [1, K] that prefers one output by far."""
    return 100.0 * head.rough(torch.eye(head.in_features), torch.float32)[:, -1:].T.contiguous()


def loosened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few outputs are all wanted, mostly, which is no reason to give up here."""
    monkeypatch.setattr(screened, "_MOST_PART", 1.0)


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_random_rows_of_every_number_when_picked_then_tokens_are_those_of_all_logits(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    for n, k in SHAPES:
        torch.manual_seed(n + k)
        head = ScreenedLinear(library, torch.randn(n, k).to(dtype), scheme)
        for rows in (1, 2, 5, 9, 12, 15, 16, 19, 32):
            for temperature in TEMPERATURES:
                x = (torch.randn(rows, 2 * k) * torch.logspace(-3, 1, rows)[:, None]).to(dtype)[:, ::2]
                assert_picks(backend, head, x, params(rows, temperature=temperature))


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_outputs_that_hardly_differ_when_picked_then_ties_go_to_the_lowest_id(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(3)
    base = torch.randn(1, 256)
    weight = (base * (1 + 1e-3 * torch.randn(1280, 1)) + 1e-3 * torch.randn(1280, 256)).to(dtype)
    weight[[700, 900, 1111]] = weight[123].clone()
    head = ScreenedLinear(library, weight, scheme)
    x = torch.cat([base, weight[123:124].float(), -base, torch.randn(6, 256)]).to(dtype)
    for temperature in TEMPERATURES:
        assert_picks(backend, head, x, params(len(x), temperature=temperature))
    same = ScreenedLinear(library, weight[:1].expand(1280, 256).contiguous(), scheme)
    picked = backend.pick(same, x, lambda: params(len(x)))
    assert picked is not None
    assert picked[0].tolist() == [0] * len(x)


@pytest.mark.parametrize("isa", ISAS)
def test_noise_that_is_rounded_away_when_picked_then_the_lowest_of_what_it_makes_equal(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    temperature = 2.0**-18
    weight = torch.zeros(64, 4)
    weight[3, 0], weight[20, 0] = 4194304.5 * temperature, 4194310 * temperature
    head, x = ScreenedLinear(load_library(isa), weight), torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(5, 1)
    rows = params(5, temperature=[temperature], seed=[966, 1138, 2071, 2747, 2768], index=[0], choice=[0])
    assert_picks(CpuBackend(isa), head, x, rows)


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_logits_that_differ_by_rounding_alone_when_picked_then_their_own_bits_decide(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each output has the same products in another order, and they sum to almost nothing."""
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    for k in (97, 128, 480):
        torch.manual_seed(k)
        numbers = torch.randn(k) * torch.logspace(-4, 2, k)
        numbers[1::2] = -numbers[: k - k % 2 : 2]
        numbers[-1] *= 1 - k % 2
        weight = torch.stack([numbers[torch.randperm(k)] for _ in range(640)]).to(dtype)
        head, x = ScreenedLinear(library, weight, scheme), torch.full((20, k), 0.05, dtype=dtype)
        x[3:] *= torch.arange(1, 18)[:, None]
        if scheme is None:  # integers cancel out
            assert len(set(head.in_float32(x)[0].tolist())) > 3
        assert_picks(backend, head, x, params(20))
        assert_picks(backend, head, x, params(20, temperature=[1e-3]))


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_numbers_that_eight_bits_lose_when_they_decide_then_they_do(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight of each group is so large that the others become zero, and meets nothing in a row; and such rows."""
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(4)
    weight, x = torch.randn(640, 256), torch.randn(7, 256)
    weight[:, ::128] = 1500.0
    x[:, ::128] = 0.0
    head = ScreenedLinear(library, weight.to(dtype), scheme)
    for temperature in TEMPERATURES:
        assert_picks(backend, head, x.to(dtype), params(7, temperature=temperature))
    weight[:, ::128] = 1e-3 * torch.randn(640, 2)
    x[:, ::128] = 1000.0
    x[3:, 5::64] = 3.0
    assert_picks(backend, ScreenedLinear(library, weight.to(dtype), scheme), x.to(dtype), params(7))


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
        lost = weight.double() - head.rough(torch.eye(1056, dtype=dtype), torch.float32).double().T
        # Rows that meet most of what rounding took away from an output, and that eight bits hold as they are.
        worst = (127 / 128 * lost[::50] / lost[::50].abs().amax(1, keepdim=True) * 128).round()
        worst[:, ::128] = 127
        x = torch.cat([x, (worst / 128).to(dtype)])
        lost_of_rows = (x.double() - widened_rows(x, screened.ROUGH.group).double()).norm(dim=1, keepdim=True)
        assert float(lost_of_rows[9:].max()) == 0.0
        reach = x.double().norm(dim=1, keepdim=True) * head.reach.double() + lost_of_rows * head.size.double()
        logits = head(x, torch.float32).double()
        error = (head.rough(x, torch.float32).double() - logits).abs() / reach
        assert float(error.max()) <= 1.0
        assert float(error[9:].amax(1).min()) > 0.7  # so near are these rows
        assert float((reach[:9] / logits[:9].abs().amax(1, keepdim=True)).mean()) < 0.1  # or nothing would be spared


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_logits_of_integers_when_compared_with_rough_ones_then_rows_alone_lose(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None
) -> None:
    library = load_library(isa)
    torch.manual_seed(13)
    weight = (torch.randn(640, 1056) * torch.logspace(-2, 0, 640)[:, None]).to(dtype)
    head = ScreenedLinear(library, weight, scheme)
    x = torch.randn(9, 1056).to(dtype)
    x[4:, ::97] *= 100
    whole = (torch.randint(-127, 128, (9, 1056)) / 128).to(dtype)  # rows that eight bits hold as they are
    whole[:, ::128] = 127 / 128
    group = screened.ROUGH.group if scheme is None else scheme.columns(1056)
    for rows in (x, whole):
        lost = (rows.double() - widened_rows(rows, group).double()).norm(dim=1, keepdim=True)
        assert bool(lost.max()) is (rows is x)
        reach = rows.double().norm(dim=1, keepdim=True) * head.reach.double() + lost * head.size.double()
        error = (head.rough(rows, torch.float32).double() - head(rows, torch.float32).double()).abs()
        assert bool((error <= reach).all())
        if scheme is not None and rows is whole:
            assert float((error / head(rows, torch.float32).abs().amax(1, keepdim=True)).max()) < 1e-5


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in TWIN_ROWS])
def test_rows_that_the_layer_rounds_when_that_decides_then_it_does(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What 70.5 and 71.5 lose in whole steps raises a logit from 26 to 52, which no row of eight bits tells."""
    loosened(monkeypatch)
    x, weight = torch.full((1, 128), 320.0), torch.zeros(640, 128)
    x[0, 0], x[0, 1:27], x[0, 27:53] = 16384.0, 70.5, 71.5
    weight[100, 1:27], weight[100, 27:53] = -1.0, 1.0
    weight[500, 99] = 47.0 / 320.0
    head = ScreenedLinear(load_library(isa), weight.bfloat16(), INT8)
    logits = head.in_float32(x.bfloat16())[0]
    assert 45.0 < float(logits[500]) < float(logits[100]) == 52.0
    assert abs(float(head.rough(x.bfloat16(), torch.float32)[0, 100])) < 45.0
    assert_picks(CpuBackend(isa), head, x.bfloat16(), params(1))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_whose_small_numbers_decide_beside_large_ones_when_picked_then_few_logits_suffice(isa: str) -> None:
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(11)
    weight = torch.randn(6400, 512)
    weight[:, ::128] = 0.0
    for num_rows in (1, 2, 3, 20):
        x = torch.randn(num_rows, 512) + 0.5 * weight[torch.randint(6400, (num_rows,))]
        x[:, ::128] = 80.0  # so that eight bits lose a fifth of the others
        assert_picks(backend, ScreenedLinear(library, weight.bfloat16()), x.bfloat16(), params(num_rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_outputs_that_bounds_cannot_tell_from_the_best_when_picked_then_few_logits_suffice(
    isa: str, temperature: float
) -> None:
    """Each could be larger than the least that the best one could be, and none than what that is."""
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(0)
    signs = torch.randn(256).sign()  # rows of such numbers lose nothing in eight bits
    direction = signs / signs.norm()
    apart = torch.randn(4096, 256)
    apart -= (apart @ direction)[:, None] * direction
    reach = ScreenedLinear(library, apart.bfloat16(), None).reach.median()
    along = torch.full((4096,), 8.2) * reach
    along[1234] = 10.0 * reach
    head = ScreenedLinear(library, (apart + along[:, None] * direction).bfloat16(), None)
    x = signs.repeat(9, 1).bfloat16()
    assert_picks(backend, head, x, params(9, temperature=[temperature]))
    assert backend.pick(head, x, lambda: params(9))[0].tolist() == [1234] * 9


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
    for given in ({"top_k": [0, 300]}, {"top_p": [1.0, 0.9]}, {"min_p": [0.0, 0.1]}):
        wanted = params(2, temperature=[0.1], **given)
        assert backend.pick(head, x, lambda wanted=wanted: wanted) is None  # type: ignore[misc]
    assert_picks(backend, head, x, params(2, temperature=[0.1], top_k=[6400, 9000]))
    assert_picks(backend, head, x, params(2, top_k=[3], top_p=[0.5], min_p=[0.5]))


@pytest.mark.parametrize(("isa", "dtype", "scheme"), HEADS)
def test_rows_with_top_k_and_other_filters_when_picked_then_tokens_are_those_of_all_logits(
    isa: str, dtype: torch.dtype, scheme: WeightScheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loosened(monkeypatch)
    backend, library = CpuBackend(isa), load_library(isa)
    torch.manual_seed(10)
    weight = torch.randn(3200, 96)
    weight[1000:1040] = weight[200]  # more ties than some of them keep
    head = ScreenedLinear(library, weight.to(dtype), scheme)
    for scale in (0.01, 0.3, 3.0):
        x = torch.cat([scale * torch.randn(20, 96), scale * weight[200:201]]).to(dtype)
        for index in range(0, 300, 100):
            columns = {
                "temperature": [1.0, 0.6, 0.0, 1e-3, 5.0],
                "top_k": [1, 20, 40, 7, 33, 90],
                "top_p": [1.0, 0.95, 0.3, 0.0],
                "min_p": [0.0, 0.05, 0.0],
                "index": [index, index + 1],
            }
            assert_picks(backend, head, x, params(21, **columns))
        assert_picks(backend, head, x, params(21, temperature=[1.0, 0.2], top_k=[0, 50, 0]))


def test_rows_that_prefer_nothing_when_picked_again_and_again_then_all_logits_are_wanted_and_few_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(8)
    backend, rows = CpuBackend(), params(1)
    head = ScreenedLinear(load_library(), torch.cat([torch.ones(6400, 64), torch.randn(6400, 64)]))
    flat, peaked = torch.ones(1, 64), head_row(head)
    asked: list[Tensor] = []
    tried: list[int] = []  # which of these calls
    screen = head._screen

    def watched(*arguments: int) -> int:
        tried.append(len(asked))
        return screen(*arguments)

    def is_picked(x: Tensor) -> bool:
        asked.append(x)
        return backend.pick(head, x, lambda: rows) is not None

    monkeypatch.setattr(head, "_screen", watched)
    assert not any(is_picked(flat) for _ in range(20))
    assert tried == [1, 3, 6, 11, 20]
    assert not any(is_picked(peaked) for _ in range(16))
    assert is_picked(peaked)
    assert not is_picked(flat)
    assert not is_picked(peaked)  # as after the first failure: one call
    assert_picks(backend, head, peaked, rows)


def test_more_rows_than_a_step_of_decodes_has_when_picked_then_all_logits_are_wanted() -> None:
    torch.manual_seed(9)
    head = ScreenedLinear(load_library(), torch.randn(6400, 64))
    x = head_row(head).expand(33, 64).contiguous()
    assert_picks(CpuBackend(), head, x[:32], params(32))
    assert CpuBackend().pick(head, x, lambda: params(33)) is None


def test_threads_that_come_and_go_when_picked_then_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    loosened(monkeypatch)
    torch.manual_seed(12)
    backend, head = CpuBackend(), ScreenedLinear(load_library(), torch.randn(19200, 256).bfloat16())
    x = torch.randn(20, 256).bfloat16()
    wanted = chosen(backend, head, x, params(20))[0].tolist()
    threads = torch.get_num_threads()
    try:
        for call in range(60):
            torch.set_num_threads((4, 2, 3, 1)[call % 4])
            picked = backend.pick(head, x, lambda: params(20))
            assert picked is not None
            assert picked[0].tolist() == wanted
    finally:
        torch.set_num_threads(threads)


def test_params_that_are_not_for_these_rows_when_picked_then_refused() -> None:
    head = ScreenedLinear(load_library(), torch.randn(640, 64))
    with pytest.raises(ValueError, match="temperature"):
        head.pick(torch.randn(2, 64), params(1))
    with pytest.raises(ValueError, match="x must be"):
        head.pick(torch.randn(2, 32), params(2))


@pytest.mark.parametrize("isa", ISAS)
def test_head_when_packed_then_screened_if_that_may_pay(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened, "LEAST_WEIGHTS", 64 * 64)
    backend, x = CpuBackend(isa), torch.randn(1, 64)
    for num_outputs, is_screened in ((64, True), (63, False), (96, False), (128, True)):
        head = backend.pack_head(torch.randn(num_outputs, 64))
        assert isinstance(head, ScreenedLinear) is is_screened
        assert is_screened or backend.pick(head, x, lambda: params(1)) is None
    assert not isinstance(backend.pack_head(torch.randn(64, 32)), ScreenedLinear)
    weight = torch.randn(64, 64)
    has_faster = isa in ("amxbf16", "avx512bf16")
    assert isinstance(backend.pack_head(weight, INT8), ScreenedLinear) is has_faster
    assert not any(isinstance(backend.pack_head(weight, scheme), ScreenedLinear) for scheme in (INT4, W8A8))
