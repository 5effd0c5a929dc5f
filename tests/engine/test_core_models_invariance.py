"""A token's bits depend on its own history alone: not on the batch, nor on how its prompt was cut into chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.builders import build_checkpoint
from tests.parity.harness import load, paged_greedy, ragged_prompts

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


def test_transformers_model_given_any_batch_when_decoded_then_logprobs_have_the_same_bits(tmp_path: Path) -> None:
    model, kernels = load(build_checkpoint("starcoder2", tmp_path / "model"))
    prompts = ragged_prompts()
    together = paged_greedy(model, kernels, prompts, NUM_TOKENS, 16)
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, budget=512) for prompt in prompts]
    assert together.logprobs == [generation.logprobs[0] for generation in alone]
