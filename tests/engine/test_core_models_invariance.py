"""A token's bits depend on its own history alone: not on the batch, nor on how its prompt was cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kernels.native.program import NativeProgram
from tests.parity.builders import build_checkpoint
from tests.parity.harness import load, paged_greedy, ragged_prompts
from workers.models import decoder

pytestmark = pytest.mark.stage0

NUM_TOKENS = 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "qwen3_moe"])
def test_model_given_any_batch_and_chunking_when_decoded_then_logprobs_have_the_same_bits(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model, kernels = load(build_checkpoint(name, tmp_path / name), dtype=dtype)
    prompts = ragged_prompts()
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, budget=512) for prompt in prompts]
    for budget in (7, 16, 512):
        together = paged_greedy(model, kernels, prompts, NUM_TOKENS, budget)
        assert together.tokens == [generation.tokens[0] for generation in alone]
        assert together.logprobs == [generation.logprobs[0] for generation in alone]
    token_by_token = paged_greedy(model, kernels, [prompts[5]], NUM_TOKENS, budget=1)
    assert token_by_token == alone[5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "is_recorded"),
    [("qwen3", True), ("gemma2", True), ("gemma3", True), ("olmo2", False), ("qwen3_moe", False)],
)
def test_model_given_layers_recorded_as_one_call_when_run_then_they_have_the_bits_of_each_called_by_itself(
    name: str, is_recorded: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, prompts = build_checkpoint(name, tmp_path / name), ragged_prompts()
    runs: list[int] = []
    run = NativeProgram.run

    def counted(self: NativeProgram, positions: Tensor, *arguments: Any) -> None:
        runs.append(len(positions))
        run(self, positions, *arguments)

    monkeypatch.setattr(NativeProgram, "run", counted)
    together = paged_greedy(*load(checkpoint, dtype=dtype), prompts, NUM_TOKENS, 16)
    assert bool(runs) == is_recorded
    monkeypatch.setattr(decoder, "record_layers", lambda *arguments: None)
    assert paged_greedy(*load(checkpoint, dtype=dtype), prompts, NUM_TOKENS, 16) == together


@pytest.mark.parametrize("budget", [5, 16, 512])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "qwen3_moe", "starcoder2"])
def test_model_given_the_tokens_that_are_wanted_when_run_then_their_bits_are_those_of_a_step_that_keeps_all(
    name: str, budget: int, tmp_path: Path
) -> None:
    model, kernels = load(build_checkpoint(name, tmp_path / name), dtype="bfloat16")
    prompts = ragged_prompts()
    every = paged_greedy(model, kernels, prompts, NUM_TOKENS, budget)
    assert paged_greedy(model, kernels, prompts, NUM_TOKENS, budget, keeps_all=False) == every


def test_transformers_model_given_any_batch_when_decoded_then_logprobs_have_the_same_bits(tmp_path: Path) -> None:
    model, kernels = load(build_checkpoint("starcoder2", tmp_path / "model"))
    prompts = ragged_prompts()
    together = paged_greedy(model, kernels, prompts, NUM_TOKENS, 16)
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, budget=512) for prompt in prompts]
    assert together.logprobs == [generation.logprobs[0] for generation in alone]
