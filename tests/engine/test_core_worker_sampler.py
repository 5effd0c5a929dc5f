"""What happens to logits before, and log-probabilities beside, the sampling kernel; each against a naive version."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backend import KernelBackend, select_backend
from novainfer.protocol.columns import column
from novainfer.protocol.step import NewRow, StepPlan
from tests.builders import CPU, VOCAB_SIZE, limits, new_row
from workers.logprobs import gather_logprobs, top_ids_by_key, top_ids_of
from workers.request_states import RequestStates
from workers.sampler import Sampled, Sampler, process_logits

pytestmark = pytest.mark.stage0


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return select_backend(CPU)


def states_with(*rows: NewRow) -> RequestStates:
    states = RequestStates(limits(), CPU)
    states.apply(StepPlan(epoch=1, step=0, rows=column(), num_new_tokens=column(), new_rows=list(rows)))
    return states


def random_logits(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 4 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))


def sample(kernels: KernelBackend, logits: Tensor, *rows: NewRow) -> Sampled:
    order = np.array([row.row for row in rows])
    return Sampler(kernels).sample(logits.clone(), order, states_with(*rows))


def naive_penalties(logits: list[float], row: NewRow) -> list[float]:
    """Token by token, in the words of the API's documentation."""
    params, output = row.params, row.token_ids[row.prompt_len :]
    result = list(logits)
    for token_id in range(len(logits)):
        value = logits[token_id] + params.logit_bias.get(token_id, 0.0)
        if token_id in row.token_ids and params.repetition_penalty != 1.0:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token_id in output:
            value -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
        result[token_id] = value
    return result


def test_penalties_when_rows_differ_then_each_equals_the_naive_formula() -> None:
    rows = [
        new_row(0, [1, 2, 3, 1], [0], prompt_len=2, repetition_penalty=1.3),
        new_row(1, [5, 6, 6, 6, 7], [1], prompt_len=1, presence_penalty=0.7, frequency_penalty=-0.4),
        new_row(2, [5], [2], presence_penalty=1.0),
        new_row(
            3,
            [9, 8, 9, 9],
            [3],
            prompt_len=1,
            repetition_penalty=0.8,
            frequency_penalty=0.3,
            logit_bias={9: 3.0, 4: -2.0},
        ),
        new_row(4, [1, 2], [4]),
    ]
    logits = random_logits(5)
    processed = logits.clone()
    states = states_with(*rows)
    process_logits(processed, np.arange(5), states, states.output_len(np.arange(5)))
    for i, row in enumerate(rows):
        assert processed[i].tolist() == pytest.approx(naive_penalties(logits[i].tolist(), row), rel=1e-6, abs=1e-6)
    assert torch.equal(processed[4], logits[4])
    assert torch.equal(processed[2], logits[2])


def test_plain_rows_when_processed_then_nothing_is_touched() -> None:
    logits = random_logits(2)
    processed = logits.clone()
    rows = new_row(0, [1], [0]), new_row(1, [1], [1], temperature=1.0, top_p=0.5, logprobs=3)
    states = states_with(*rows)
    process_logits(processed, np.arange(2), states, states.output_len(np.arange(2)))
    assert torch.equal(processed, logits)


def test_any_row_when_sampled_in_a_batch_then_bits_equal_those_alone(kernels: KernelBackend) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 4, "logprobs": 5},
        {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 5},
        {"temperature": 1.3, "top_k": 5, "frequency_penalty": 0.5, "logprobs": 2, "seed": 6},
        {"min_p": 0.2, "temperature": 2.0, "logit_bias": {3: 5.0}, "seed": 7, "logprobs": 0},
        {"allowed_token_ids": (3, 9, 11), "temperature": 1.0, "seed": 8},
    ]
    rows = [
        new_row(i, list(range(i + 2, 2 * i + 5)), [i], prompt_len=1, choice=i % 2, **kinds[i])
        for i in range(len(kinds))
    ]
    logits = random_logits(len(rows), seed=1)
    together = sample(kernels, logits, *rows)
    assert together.logprobs is not None
    records = iter(together.logprobs.records(together.num_top.tolist()))
    for i, row in enumerate(rows):
        alone = sample(kernels, logits[i : i + 1], row)
        assert alone.token_ids.tolist() == [together.token_ids[i].item()]
        if alone.logprobs is not None:
            assert alone.logprobs.records(alone.num_top.tolist()) == [next(records)]


def test_greedy_tie_when_sampled_then_lowest_id(kernels: KernelBackend) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [9, 17]] = 2.0
    assert sample(kernels, logits, new_row(0, [1], [0])).token_ids.tolist() == [9]


def test_allowed_ids_when_sampled_then_best_of_them_wins(kernels: KernelBackend) -> None:
    logits = random_logits(1)
    allowed = (3, 5, 40)
    best = max(allowed, key=lambda i: logits[0, i].item())
    assert sample(kernels, logits, new_row(0, [1], [0], allowed_token_ids=allowed)).token_ids.tolist() == [best]
    rest = [i for i in allowed if i != best]
    banned = new_row(0, [1], [0], allowed_token_ids=allowed, banned_token_ids=(best,))
    assert sample(kernels, logits, banned).token_ids.item() in rest


def test_banned_ids_when_sampled_then_next_best_wins(kernels: KernelBackend) -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    row = new_row(0, [1], [0], banned_token_ids=tuple(order[:4]))
    assert sample(kernels, logits, row).token_ids.tolist() == [order[4]]


@pytest.mark.parametrize(("outputs", "banned"), [(0, True), (2, True), (3, False)])
def test_min_tokens_when_fewer_outputs_then_stop_ids_are_not_sampled(
    kernels: KernelBackend, outputs: int, banned: bool
) -> None:
    logits = random_logits(1)
    best, second = logits[0].argsort(descending=True).tolist()[:2]
    row = new_row(0, [1] + [2] * outputs, [0], prompt_len=1, min_tokens=3, stop_token_ids=[best])
    assert sample(kernels, logits, row).token_ids.tolist() == [second if banned else best]


def test_min_tokens_when_only_stop_ids_are_allowed_then_one_of_them_is_sampled(kernels: KernelBackend) -> None:
    row = new_row(0, [1], [0], min_tokens=3, stop_token_ids=[7], allowed_token_ids=(7,))
    sampled = sample(kernels, random_logits(1), row)
    assert sampled.token_ids.tolist() == [7]
    assert sampled.is_bad.tolist() == [False]


def test_non_finite_rows_when_sampled_then_only_they_are_bad(kernels: KernelBackend) -> None:
    logits = random_logits(5)
    clean = sample(kernels, logits, *(new_row(i, [1], [i]) for i in range(5)))
    poisoned = logits.clone()
    poisoned[1, 7] = math.nan
    poisoned[2, 7] = math.inf
    poisoned[3] = -math.inf
    poisoned[4, 60] = -math.inf  # a model that masks an id is not broken
    result = sample(kernels, poisoned, *(new_row(i, [1], [i]) for i in range(5)))
    assert result.is_bad.tolist() == [False, True, True, True, False]
    assert result.token_ids[[1, 2, 3]].tolist() == [0, 0, 0]
    assert result.token_ids[[0, 4]].tolist() == clean.token_ids[[0, 4]].tolist()


def test_logprobs_when_penalised_then_they_are_of_the_raw_distribution(kernels: KernelBackend) -> None:
    logits = random_logits(1)
    row = new_row(0, [1], [0], logit_bias={5: 100.0}, temperature=0.3, logprobs=VOCAB_SIZE)
    sampled = sample(kernels, logits, row)
    assert sampled.logprobs is not None
    (record,) = sampled.logprobs.records([20])
    expected = torch.log_softmax(logits[0].double(), 0)
    assert record.token_id == 5
    assert record.logprob == pytest.approx(expected[5].item(), abs=1e-5)
    assert len(record.top_ids) == 20
    assert sum(math.exp(x) for x in sampled.logprobs.top_logprobs[0].tolist()) == pytest.approx(1.0, abs=1e-5)


def test_logprobs_when_logits_tie_then_order_and_rank_go_by_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -3.0, 2.0]])
    (record,) = gather_logprobs(logits, torch.tensor([3]), 6).records([5])
    assert record.top_ids == [1, 3, 5, 0, 2]
    assert record.rank == 2
    assert gather_logprobs(logits.expand(6, 6), torch.arange(6), 0).ranks.tolist() == [4, 1, 5, 2, 6, 3]


def test_logprobs_when_rows_are_sliced_then_equal_to_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = random_logits(7, vocab_size=1000), torch.arange(7) * 100
    whole = gather_logprobs(logits, token_ids, 4).records([4] * 7)
    monkeypatch.setattr("workers.logprobs._MAX_SLICE", 2000)
    assert gather_logprobs(logits, token_ids, 4).records([4] * 7) == whole
    assert [gather_logprobs(logits[i : i + 1], token_ids[i : i + 1], 4).records([4])[0] for i in range(7)] == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"banned_token_ids": (3,)},
        {"temperature": 1e4, "seed": 4},
        {"repetition_penalty": 50.0},
        {"logit_bias": {5: 1000.0}},
        {"logprobs": 2},
    ],
)
def test_given_a_row_with_a_new_owner_when_the_same_rows_are_sampled_again_then_its_parameters_hold(
    kernels: KernelBackend, fields: dict[str, Any]
) -> None:
    old, other, new = new_row(0, [1, 2], [0]), new_row(1, [1, 2], [1]), new_row(0, [3, 2], [2], **fields)
    logits, rows = random_logits(2, seed=8), np.array([0, 1])
    logits[:, 3] = 50.0
    states, sampler = states_with(old, other), Sampler(kernels)
    for _ in range(2):
        first = sampler.sample(logits.clone(), rows, states)
    states.apply(StepPlan(epoch=1, step=1, rows=column(), num_new_tokens=column(), freed_rows=[0], new_rows=[new]))
    again, alone = sampler.sample(logits.clone(), rows, states), sample(kernels, logits, new, other)
    assert first.token_ids.tolist() == [3, 3]
    assert again.token_ids.tolist() == alone.token_ids.tolist()
    assert again.num_top.tolist() == alone.num_top.tolist()
    assert again.token_ids[0] != 3 or again.num_top.tolist() == [2]


@pytest.mark.parametrize("num_top", [0, 1, 4, 20, 700])
def test_top_ids_when_found_by_keys_then_as_by_values_with_ties_zeros_and_infinities(num_top: int) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(4))
    logits[1] = torch.round(logits[1])
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    logits[3], logits[3, 5] = -math.inf, 1.0
    logits[4, 3:9] = math.inf
    logits[5] = -logits[5].abs().round()
    found = top_ids_by_key(logits, num_top)
    assert torch.equal(found, top_ids_of(logits, num_top))
    assert torch.equal(found, logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top])
