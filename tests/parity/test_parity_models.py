"""Every family against transformers: same greedy tokens, log-probabilities within 1e-4, on one rank and on several."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from novainfer import LLM, SamplingParams
from tests.parity.builders import FAMILIES, FOREIGN_FAMILIES
from tests.parity.harness import (
    CPU,
    DEVICE,
    NUM_TOKENS,
    Generation,
    largest_difference,
    load,
    paged_greedy,
    ragged_prompts,
    transformers_greedy,
)
from tests.parity.ray_groups import run_groups
from workers.models.transformers_backend import TransformersModel
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
# What a rank computes is compared for every family; through Ray, one for each way to cut weights among ranks.
ON_RAY = ("llama3", "qwen2", "gemma3", "qwen3_moe")
Build = Callable[[str], Path]
Expect = Callable[[str], Generation]


def assert_same(ours: Generation, theirs: Generation) -> None:
    assert ours.tokens == theirs.tokens
    assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_family_given_ragged_prompts_when_decoded_greedily_then_equals_transformers(
    name: str, checkpoint: Build, expected: Expect
) -> None:
    model, kernels = load(checkpoint(name), device=DEVICE, model_backend="native")
    assert_same(paged_greedy(model, kernels, ragged_prompts(), NUM_TOKENS, device=DEVICE), expected(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_given_ragged_prompts_when_run_by_the_whole_engine_then_equals_transformers(
    name: str, checkpoint: Build, expected: Expect
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(checkpoint(name)), num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        results = llm.generate(ragged_prompts(), greedy, use_tqdm=False)
    assert [result["token_ids"] for result in results] == expected(name).tokens


@pytest.mark.parametrize("name", [*FOREIGN_FAMILIES, "gemma2", "qwen3_moe"])
def test_transformers_backend_given_ragged_prompts_when_decoded_greedily_then_equals_transformers(
    name: str, checkpoint: Build, expected: Expect
) -> None:
    model, kernels = load(checkpoint(name), model_backend="auto" if name in FOREIGN_FAMILIES else "transformers")
    assert isinstance(model, TransformersModel)
    assert_same(paged_greedy(model, kernels, ragged_prompts(), NUM_TOKENS), expected(name))


def test_longrope_given_long_service_when_prompts_outgrow_pretraining_then_equals_transformers(
    checkpoint: Build,
) -> None:
    folder = checkpoint("phi3_longrope")
    prompts = ragged_prompts(shortest=129)  # pretrained length 128: transformers uses the long factors from the start
    model, kernels = load(folder, max_model_len=512)
    assert_same(paged_greedy(model, kernels, prompts, 16, budget=200), transformers_greedy(folder, prompts, 16))


def _run_rank(rank: int, world_size: int, store: str, folders: dict[str, str], out: str) -> None:
    """One rank of a tensor-parallel group decodes every family and writes down what it saw."""
    torch.set_num_threads(1)
    tp = TensorParallel.init(rank, world_size, f"file://{store}", CPU)
    generations = {}
    for name, folder in folders.items():
        model, kernels = load(Path(folder), tp)
        generations[name] = asdict(paged_greedy(model, kernels, ragged_prompts(), NUM_TOKENS, budget=64))
    Path(out, f"{rank}.json").write_text(json.dumps(generations))
    tp.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        pytest.param(2, FAMILIES, id="2"),
        pytest.param(4, ["mistral", "olmo2", "qwen3_moe"], id="4"),  # more ranks than key/value heads
    ],
)
def test_families_given_several_ranks_when_decoded_greedily_then_equal_transformers(
    world_size: int, names: list[str], checkpoint: Build, expected: Expect, tmp_path: Path
) -> None:
    folders = {name: str(checkpoint(name)) for name in names}
    context = multiprocessing.get_context("spawn")
    arguments = (world_size, str(tmp_path / "store"), folders, str(tmp_path))
    ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world_size
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    assert all(generations == seen[0] for generations in seen)
    for name in names:
        assert_same(Generation(**seen[0][name]), expected(name))


@pytest.mark.timeout(600)
def test_families_given_two_ranks_on_ray_when_run_by_the_whole_engine_then_equal_transformers(
    checkpoint: Build, expected: Expect, tmp_path: Path
) -> None:
    folders = {name: str(checkpoint(name)) for name in ON_RAY}
    process = multiprocessing.get_context("spawn").Process(target=run_groups, args=(folders, 2, str(tmp_path)))
    process.start()
    process.join()
    assert process.exitcode == 0
    for name in ON_RAY:
        assert_same(Generation(**json.loads((tmp_path / f"{name}.json").read_text())), expected(name))
