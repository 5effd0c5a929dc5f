"""Sampling: known answers, three implementations that agree, and draws that follow the distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from kernels.backend import KernelBackend, SamplingTensors, select_backend
from kernels.sampling import reference as torch_sampling
from novainfer.sampling import reference
from novainfer.sampling.reference import DrawParams
from tests.kernels.builders import sampling_tensors

pytestmark = pytest.mark.stage0

# (counter, key, output) from Random123's kat_vectors for philox4x32 with 10 rounds
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> KernelBackend:
    if request.param == "triton":
        pytest.importorskip("triton")
    return select_backend(device, request.param)


def _row_params(params: SamplingTensors, row: int) -> DrawParams:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "index")
    return DrawParams(**{name: getattr(params, name)[row].item() for name in names})


def _wanted(logits: Tensor, params: SamplingTensors) -> list[int]:
    return [reference.sample(row.tolist(), _row_params(params, i)) for i, row in enumerate(logits)]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, output) -> None:
    assert reference.philox4x32_10(counter, key) == output
    words = torch_sampling.philox4x32_10((torch.tensor([counter[0]]), *counter[1:]), key)
    assert tuple(int(word) for word in words) == output


def test_triton_philox_gives_the_bits_of_the_definition(device: torch.device) -> None:
    pytest.importorskip("triton")
    from tests.kernels.triton_probe import philox_words

    for counter, key, output in KNOWN_ANSWERS:
        assert philox_words(counter, key, device) == list(output)


def test_gumbel_noise_of_torch_equals_pure_python() -> None:
    noise = torch_sampling.gumbel(50, seed=-7, choice=3, index=2**33 + 5, device=torch.device("cpu"))
    params = DrawParams(seed=-7, choice=3, index=2**33 + 5)
    wanted = [reference.gumbel(reference.token_bits(token_id, params)) for token_id in range(50)]
    torch.testing.assert_close(noise, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [0, 1, 2**23, 2**24 + 1, 2**32 - 1])
def test_uniform_stays_inside_the_open_interval(bits: int) -> None:
    assert 0.0 < reference.uniform(bits) <= 1.0 - 2.0**-24
    assert math.isfinite(reference.gumbel(bits))


@pytest.mark.parametrize("vocab_size", [1, 130])
def test_all_implementations_draw_the_same_token(backend: KernelBackend, device: torch.device, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(8, vocab_size, generator=generator) * 3).to(device)
    params = sampling_tensors(
        device,
        8,
        temperature=[1.0, 0.7, 0.0, 1.3],
        top_k=[0, 0, 5, 1, 40],
        top_p=[1.0, 0.6, 0.9, 1.0, 0.35, 1.0, 0.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 1.0],
        seed=[0, -1, 2**63 - 1, 12345],
        choice=[0, 1, 127],
        index=[0, 1, 2**31, 2**32 + 1],
    )
    assert backend.sample(logits, params).tolist() == _wanted(logits, params)


def test_a_vocabulary_over_several_slices_is_searched_whole(backend: KernelBackend, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 9001, generator=generator).to(device)
    logits[0, 9000] = 50.0
    params = sampling_tensors(device, 3, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 50], top_p=[1.0, 1.0, 0.8], seed=[3])
    tokens = backend.sample(logits, params).tolist()
    assert tokens == _wanted(logits, params)
    assert tokens[0] == 9000


def test_a_row_does_not_depend_on_the_batch(backend: KernelBackend, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 40, generator=generator).to(device)
    columns = {"top_k": [0, 3, 0], "top_p": [0.5, 1.0, 1.0], "seed": [5, 6, 7]}
    together = backend.sample(logits, sampling_tensors(device, 3, **columns)).tolist()
    for row in (0, 1):
        alone = {name: [values[row % len(values)]] for name, values in columns.items()}
        assert backend.sample(logits[row : row + 1], sampling_tensors(device, 1, **alone)).tolist() == [together[row]]


def test_greedy_ties_go_to_the_lowest_id(backend: KernelBackend, device: torch.device) -> None:
    logits = torch.zeros(2, 70, device=device)
    logits[0, [69, 33, 41]] = 2.0
    assert backend.sample(logits, sampling_tensors(device, 2, temperature=[0.0])).tolist() == [33, 0]


EQUAL = [1.0] * 8
MIXED = [0.0, 2.0, 1.0, 2.0, -1.0]
INF = math.inf
EDGE_CASES: list[tuple[list[float], dict[str, float], set[int]]] = [
    # ties are kept from the lowest id on
    (EQUAL, {}, set(range(8))),
    (EQUAL, {"top_k": 3}, {0, 1, 2}),
    (EQUAL, {"top_p": 0.5}, {0, 1, 2, 3}),
    (EQUAL, {"top_p": 0.51}, {0, 1, 2, 3, 4}),
    (EQUAL, {"top_k": 4, "top_p": 0.5}, {0, 1}),
    (EQUAL, {"min_p": 1.0}, set(range(8))),
    ([0.0, -0.0, 0.0, -5.0], {"top_k": 2}, {0, 1}),
    # filters at their limits
    (MIXED, {"top_k": 1}, {1}),
    (MIXED, {"top_p": 0.0}, {1}),
    (MIXED, {"top_k": 5}, set(range(5))),
    (MIXED, {"top_k": 99}, set(range(5))),
    (MIXED, {"min_p": 1.0}, {1, 3}),
    (MIXED, {"min_p": 0.3}, {1, 2, 3}),
    (MIXED, {"top_k": 2, "min_p": 0.3}, {1, 3}),
    # impossible ids
    ([-INF, 0.0, -INF, 0.0], {}, {1, 3}),
    ([-INF, math.nan, 1.0], {}, {2}),
    ([-INF, math.nan, 1.0], {"top_k": 2, "top_p": 0.9}, {2}),
    ([-INF] * 5, {"top_p": 0.5}, {0}),
    ([-INF] * 5, {"temperature": 0.0}, {0}),
]


@pytest.mark.parametrize(("logits", "columns", "support"), EDGE_CASES)
def test_filters_leave_exactly_the_ids_that_the_definition_names(logits, columns, support) -> None:
    backend = select_backend(torch.device("cpu"), "reference")
    params = sampling_tensors(
        torch.device("cpu"), 150, seed=range(150), **{name: [value] for name, value in columns.items()}
    )
    rows = torch.tensor([logits]).repeat(150, 1)
    assert set(backend.sample(rows, params).tolist()) == support
    assert _wanted(rows, params) == backend.sample(rows, params).tolist()


def test_edge_cases_in_one_batch_give_the_tokens_of_the_definition(
    backend: KernelBackend, device: torch.device
) -> None:
    rows = torch.full((len(EDGE_CASES), 8), -INF, device=device)
    for row, (logits, _, _) in zip(rows, EDGE_CASES, strict=True):
        row[: len(logits)] = torch.tensor(logits)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [case[1].get(name, off) for case in EDGE_CASES] for name, off in defaults.items()}
    params = sampling_tensors(device, len(EDGE_CASES), seed=range(1, 100), **columns)
    tokens = backend.sample(rows, params).tolist()
    assert tokens == _wanted(rows, params)
    assert all(token in support for token, (_, _, support) in zip(tokens, EDGE_CASES, strict=True))


@pytest.mark.parametrize("column", ["seed", "choice", "index"])
def test_draws_follow_the_softmax(column: str) -> None:
    probabilities = [0.5, 0.25, 0.15, 0.07, 0.03]
    logits = [math.log(probability) for probability in probabilities]
    counts = Counter(reference.sample(logits, DrawParams(**{column: value})) for value in range(2000))
    chi_square = sum((counts[i] - 2000 * p) ** 2 / (2000 * p) for i, p in enumerate(probabilities))
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001; the seeds are fixed


def test_wrong_arguments_are_refused(backend: KernelBackend, device: torch.device) -> None:
    params = sampling_tensors(device, 2)
    with pytest.raises(ValueError, match=r"temperature must have shape \[3\]"):
        backend.sample(torch.zeros(3, 4, device=device), params)
    with pytest.raises(ValueError, match=r"logits must be torch\.float32"):
        backend.sample(torch.zeros(2, 4, device=device, dtype=torch.float16), params)
    with pytest.raises(ValueError, match="at least one column"):
        backend.sample(torch.zeros(2, 0, device=device), params)


def test_no_rows_give_no_tokens(backend: KernelBackend, device: torch.device) -> None:
    tokens = backend.sample(torch.zeros(0, 4, device=device), sampling_tensors(device, 0))
    assert tokens.shape == (0,)
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("name", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("vocab", [1, 5, 16, 37, 4099])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_or_leave_nothing_when_chosen_from_then_bad_and_the_others_as_sampled(
    name: str, vocab: int, temperature: float, device: torch.device
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    if name == "cpu":
        device = torch.device("cpu")
    backend = select_backend(device, name)
    good = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)).to(device)
    rows = good.repeat(4, 1)
    rows[2, vocab - 1], rows[3, vocab // 2], rows[5] = math.nan, math.inf, -math.inf
    rows[4, : vocab - 1] = -math.inf  # a mask, of which the last id is left
    params = sampling_tensors(device, 8, temperature=[temperature], seed=[1])
    tokens, is_bad = backend.choose(rows, params)
    assert is_bad.tolist() == [False, False, True, True, False, True, False, False]
    assert tokens[is_bad].tolist() == [0, 0, 0]
    assert tokens[~is_bad].tolist() == backend.sample(rows, params)[~is_bad].tolist()
    assert int(tokens[4]) == vocab - 1
