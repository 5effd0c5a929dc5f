"""The Triton sampler looks for candidates in groups of ids: every way through it gives the reference's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.backend import KernelBackend, SamplingTensors, select_backend
from kernels.reference_backend import ReferenceBackend
from tests.kernels.builders import sampling_tensors

sampler = pytest.importorskip("kernels.sampling.triton", exc_type=ImportError)

pytestmark = pytest.mark.stage0

# of the rows of one batch: everything a request may ask for, and what makes the search hard
FILTERS: dict[str, list[float]] = {
    "temperature": [1.0, 0.0, 0.7, 1.3, 1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1e-5, 1.0],
    "top_k": [0, 5, 50, 1, 0, 0, 700, 0, 40, 10**9, 20, 0],
    "top_p": [1.0, 0.5, 0.9, 1.0, 0.95, 1e-9, 1.0, 0.0, 1.0, 0.3, 0.9, 0.9999999],
    "min_p": [0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.05, 0.01, 0.0, 0.0],
}


def _normal(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 2


def _peaked(rows: int, vocab: int) -> Tensor:
    return _normal(rows, vocab) + 12 * (torch.arange(vocab) % 311 == 7)


def _rounded(rows: int, vocab: int) -> Tensor:
    return _normal(rows, vocab).bfloat16().float()  # as models give them: hundreds of equal ones


def _equal(rows: int, vocab: int) -> Tensor:
    return torch.full((rows, vocab), -3.0)


def _masked(rows: int, vocab: int) -> Tensor:
    return _normal(rows, vocab).masked_fill(torch.arange(vocab) % 50 != vocab % 50 - 1, -math.inf)


def _spoilt(rows: int, vocab: int) -> Tensor:
    logits = _normal(rows, vocab)
    logits[::2] = -math.inf
    logits[1::4, vocab // 2] = math.nan
    logits[3::4, vocab // 3] = math.inf
    return logits


def _two_values(rows: int, vocab: int) -> Tensor:
    return torch.where(torch.arange(vocab) % 3 == 1, 0.0, -0.0).repeat(rows, 1)


CONTENTS: Sequence[Callable[[int, int], Tensor]] = (_normal, _peaked, _rounded, _equal, _masked, _spoilt, _two_values)


def _mixed(vocab: int, shift: int) -> Tensor:
    """[12, vocab], one row for each column of FILTERS; over seven shifts each filter meets all contents."""
    rows = [contents(12, vocab) for contents in CONTENTS]
    return torch.stack([rows[(row + shift) % len(rows)][row] for row in range(12)])


@pytest.fixture
def backend(device: torch.device) -> KernelBackend:
    return select_backend(device, "triton")


def _batch(logits: Tensor, device: torch.device, seed: int = 0) -> tuple[Tensor, SamplingTensors]:
    rows = len(logits)
    return logits.to(device), sampling_tensors(device, rows, seed=range(seed, seed + rows), index=[3], **FILTERS)


@pytest.mark.parametrize(
    ("vocab", "shift"),
    [(1, 0), (2, 1), (97, 2), (97, 5), *((640, shift) for shift in range(7)), (9001, 3), (50_257, 4)],
)
def test_any_filter_over_any_logits_draws_the_token_of_the_reference(
    backend: KernelBackend, device: torch.device, vocab: int, shift: int
) -> None:
    logits, params = _batch(_mixed(vocab, shift), device)
    assert backend.sample(logits, params).tolist() == ReferenceBackend().sample(logits, params).tolist()


def test_a_large_vocabulary_draws_the_token_of_the_reference(backend: KernelBackend, device: torch.device) -> None:
    logits, params = _batch(_rounded(12, 151_936), device)
    chosen = torch.tensor([2, 3, 4, 8, 11], device=device)
    some = SamplingTensors(**{name: getattr(params, name)[chosen] for name in params.__dataclass_fields__})
    tokens = backend.sample(logits[chosen], some).tolist()
    assert tokens == ReferenceBackend().sample(logits[chosen], some).tolist()


@pytest.mark.parametrize(
    ("capacity", "shift"), [*((4, shift) for shift in range(7)), (1, 0), (64, 0), (64, 2), (64, 4)]
)
def test_rows_with_more_candidates_than_room_draw_the_same_tokens(
    backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch, capacity: int, shift: int
) -> None:
    logits, params = _batch(_mixed(1500, shift), device)
    monkeypatch.setattr(sampler, "_CAPACITY", capacity)
    assert backend.sample(logits, params).tolist() == ReferenceBackend().sample(logits, params).tolist()


def _huge(rows: int, vocab: int) -> Tensor:
    return torch.where(torch.arange(vocab) % 3 == 1, 3e38, 2.9e38).repeat(rows, 1)  # whose sum is not finite


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # numpy's words for x beyond what is finite
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(  # rows that are drawn from the list, and with little room rows that are not
    ("vocab", "place", "capacity"),
    [(1, 0, 8192), (97, 96, 8192), (97, 0, 4), (4500, 4499, 8192), (4500, 4200, 64)],
)
def test_any_filter_over_rows_that_are_not_finite_when_chosen_from_then_bad_and_the_others_as_sampled(
    backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch, vocab: int, place: int, capacity: int
) -> None:
    monkeypatch.setattr(sampler, "_CAPACITY", capacity)
    one_of_many = torch.arange(vocab) == place
    spoilt = [_normal(12, vocab).masked_fill(one_of_many, value) for value in (math.nan, math.inf)]
    spoilt += [
        torch.full((12, vocab), -math.inf),
        torch.full((12, vocab), -math.inf).masked_fill(one_of_many, math.nan),
    ]
    sound = [_normal(12, vocab), _huge(12, vocab), torch.full((12, vocab), -math.inf).masked_fill(one_of_many, -3.0)]
    for is_wanted, kinds in ((True, spoilt), (False, sound)):
        for rows in kinds:
            logits, params = _batch(rows, device)
            tokens, is_bad = backend.choose(logits, params)
            assert is_bad.dtype == torch.bool
            assert is_bad.tolist() == [is_wanted] * 12
            assert tokens.tolist() == ([0] * 12 if is_wanted else ReferenceBackend().sample(logits, params).tolist())


@pytest.mark.parametrize("most_groups", [1, 8, 30])
def test_a_top_k_beyond_the_number_of_groups_keeps_as_many(
    backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch, most_groups: int
) -> None:
    logits = _normal(6, 3000).to(device)
    params = sampling_tensors(device, 6, top_k=[31, 32, 33, 64, 65, 2999], top_p=[1.0, 0.8], seed=range(6))
    wanted = ReferenceBackend().sample(logits, params).tolist()
    monkeypatch.setattr(sampler, "_MOST_GROUPS", most_groups)
    assert backend.sample(logits, params).tolist() == wanted
    monkeypatch.setattr(sampler, "_CAPACITY", 16)
    assert backend.sample(logits, params).tolist() == wanted


def test_a_row_alone_draws_what_it_draws_among_others(backend: KernelBackend, device: torch.device) -> None:
    logits, params = _batch(_mixed(2500, 2), device)
    together = backend.sample(logits, params).tolist()
    for rows in ([2], [4], [11], [11, 4, 4, 2]):
        some = SamplingTensors(**{name: getattr(params, name)[rows] for name in params.__dataclass_fields__})
        assert backend.sample(logits[rows], some).tolist() == [together[row] for row in rows]


def test_scratch_memory_may_hold_anything_before(
    backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, params = _batch(_rounded(12, 1300), device)
    wanted = backend.sample(logits, params).tolist()
    empty = torch.empty
    for poison in (math.nan, -1, 10**9):

        def poisoned(*sizes: int, poison: float = poison, **keywords: torch.dtype) -> Tensor:
            made = empty(*sizes, **keywords)
            return made.fill_(poison if made.is_floating_point() or poison == poison else -(2**31))

        monkeypatch.setattr(torch, "empty", poisoned)
        tokens = backend.sample(logits, params)
        monkeypatch.setattr(torch, "empty", empty)
        assert tokens.tolist() == wanted


@pytest.mark.parametrize("capacity", [8, 8192])
def test_filters_that_end_inside_a_tie_keep_what_the_definition_keeps(
    backend: KernelBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    """Logits in equal pairs, nearly flat: a wrong end would show in some of the draws."""
    monkeypatch.setattr(sampler, "_CAPACITY", capacity)
    logits = (torch.arange(24) * 7 % 24 // 2 * 0.02).repeat(30, 1).to(device)
    params = sampling_tensors(
        device, 30, seed=range(30), top_k=[11, 0, 0], top_p=[1.0, 0.5, 1.0, 0.6], min_p=[0.0, 0.0, 0.9, 0.0, 0.0]
    )
    assert backend.sample(logits, params).tolist() == ReferenceBackend().sample(logits, params).tolist()
