"""The offline `LLM` over a quantised KV cache: tokens depend on the request alone, and receipts can be verified."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from novainfer import LLM, SamplingParams
from novainfer.checkpoint import WEIGHT_FILES, model_digest, resolve_checkpoint
from novainfer.entrypoints.verify import EXIT_DIFFERENT, EXIT_EQUAL, verify_command
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash

pytestmark = pytest.mark.stage1

QUESTIONS = ("What is NovaInfer?", "What is 23 plus 45?", "Count from 5 to 9.", "Spell gateway.", "What is a worker?")
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.0, seed=2, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.5, top_k=50, seed=3, n=2, max_tokens=24, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, seed=4, max_tokens=24, logprobs=0),
    SamplingParams(temperature=3.0, seed=5, max_tokens=24, logprobs=0),
]
Results = list[dict[str, Any]]


def ask(llm: LLM) -> Results:
    return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], PARAMS, use_tqdm=False)


def said(results: Results) -> list[list[list[tuple[int, float]]]]:
    """The tokens of every choice, each with its log-probability."""
    return [
        [[(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]] for choice in result["choices"]]
        for result in results
    ]


@pytest.fixture(scope="module", params=["none", "int8"])
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(weights: str) -> tuple[Results, str]:
    """Every question by itself, and the mode."""
    with LLM("demo", quantization=weights, kv_cache_dtype="int8", max_num_seqs=2, max_model_len=512) as llm:
        results = []
        for question, params in zip(QUESTIONS, PARAMS, strict=True):
            results += llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        return results, llm.mode


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "block_size": 32, "threads_per_worker": 2},
        {"num_blocks": 12, "max_model_len": 192, "speculation": "prompt-lookup"},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_given_any_batch_chunking_cache_or_memory_when_run_then_the_same_tokens(
    weights: str, alone: tuple[Results, str], options: dict[str, Any]
) -> None:
    options = {"max_model_len": 512, **options}
    with LLM("demo", quantization=weights, kv_cache_dtype="int8", **options) as llm:
        assert said(ask(llm)) == said(alone[0])
        assert said(ask(llm)) == said(alone[0])  # now with what is cached
        assert llm.mode == alone[1]


def test_given_a_quantised_cache_when_asked_then_the_mode_says_so_and_probabilities_are_others(
    weights: str, alone: tuple[Results, str]
) -> None:
    types = "bfloat16 kv-int8" if weights == "none" else "bfloat16 int8 kv-int8"
    assert f" {types} tp1 " in alone[1]
    with LLM("demo", quantization=weights, max_model_len=512) as llm:
        assert llm.mode == alone[1].replace(" kv-int8", "")
        assert said(ask(llm)) != said(alone[0])


def test_given_receipts_of_that_mode_when_verified_then_they_are_equal_and_a_changed_one_is_not(
    alone: tuple[Results, str], tmp_path: Path
) -> None:
    results, mode = alone
    with LLM("demo", max_model_len=512) as llm:
        eos = tuple(llm.tokenizer.eos_token_ids)
    digest = model_digest(resolve_checkpoint("demo", files=WEIGHT_FILES))
    receipts = [
        Receipt(
            model="demo",
            model_digest=digest,
            mode=mode,
            max_model_len=512,
            prompt_token_ids=tuple(result["prompt_token_ids"]),
            eos_token_ids=eos,
            after_prompt=False,
            params=params,
            choices=tuple(
                ChoiceReceipt(len(choice["token_ids"]), token_hash(choice["token_ids"]), choice["finish_reason"])
                for choice in result["choices"]
            ),
        )
        for result, params in zip(results, PARAMS, strict=True)
    ]
    file = tmp_path / "answer.json"
    arguments = argparse.Namespace(receipt=str(file), model=None, tokenizer=None, device="cpu", any_mode=False)
    arguments.chat_template, arguments.tool_call_parser, arguments.reasoning_parser = None, "auto", "auto"
    file.write_text(json.dumps({"receipts": [receipt.to_json() for receipt in receipts]}), encoding="utf-8")
    assert verify_command(arguments) == EXIT_EQUAL
    changed = replace(receipts[-1], params=replace(receipts[-1].params, seed=99))
    file.write_text(json.dumps(changed.to_json()), encoding="utf-8")
    assert verify_command(arguments) == EXIT_DIFFERENT
