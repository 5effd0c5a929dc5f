"""A real checkpoint (the demo model, or --model-path) through the whole engine against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from novainfer import LLM, SamplingParams

pytestmark = [pytest.mark.parity, pytest.mark.hf]

CONVERSATIONS = [
    "What is NovaInfer?",
    "What is 34 plus 58?",
    "Spell the word garden.",
    "Count from 11 to 19.",
    "Tell me a short story about a cat.",
    "Give me JSON with name Peter and age 42.",
    "Describe how NovaInfer handles a request, step by step.",
    "Hi! Who are you and what can you do?",
]
NEW_TOKENS = 64
CLEAR_MARGIN = 0.05  # between transformers' two highest logits, in bf16


def generate(model_path: Path, dtype: str) -> list[dict[str, Any]]:
    """Our greedy tokens, all prompts in one batch."""
    with LLM(str(model_path), dtype=dtype, num_blocks=256, max_num_seqs=8) as llm:
        prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in CONVERSATIONS]
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        return llm.generate(prompts, params, use_tqdm=False)


@torch.inference_mode()
def reference_logits(model_path: Path, dtype: torch.dtype, result: dict[str, Any]) -> torch.Tensor:
    """transformers' logits at each of our output positions, given our tokens: [NEW_TOKENS, vocab] float32."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    ids = torch.tensor([result["prompt_token_ids"] + result["token_ids"]])
    return model(ids).logits[0, len(result["prompt_token_ids"]) - 1 : -1].float()


def test_given_fp32_when_decoded_greedily_then_tokens_and_logprobs_are_those_of_transformers(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for result in generate(model_path, "float32"):
        prompt = torch.tensor([result["prompt_token_ids"]])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert result["token_ids"] == output[0, prompt.shape[1] :].tolist()
        expected = reference_logits(model_path, torch.float32, result).log_softmax(-1)
        chosen = expected[torch.arange(NEW_TOKENS), torch.tensor(result["token_ids"])]
        ours = torch.tensor([entry["logprob"] for entry in result["logprobs"]])
        assert (ours - chosen).abs().max() < 1e-4


def test_given_bf16_when_transformers_margin_is_clear_then_our_token_is_its_token(model_path: Path) -> None:
    num_clear = 0
    for result in generate(model_path, "bfloat16"):
        top = reference_logits(model_path, torch.bfloat16, result).topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > CLEAR_MARGIN
        ours = torch.tensor(result["token_ids"])
        assert torch.equal(ours[clear], top.indices[clear, 0])
        num_clear += int(clear.sum())
    assert num_clear > NEW_TOKENS * len(CONVERSATIONS) // 2
