"""Receipts and the mode header, as a gateway in front of a scripted scheduler gives them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import gateway.sse as sse_module
from novainfer.checkpoint import model_digest
from novainfer.receipt import Receipt, token_hash
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import oracle_tokens
from tests.online.conftest import Pair
from tests.online.gateways import start_pair

pytestmark = pytest.mark.stage2

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 3, "temperature": 0.5}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello", "max_tokens": 6})]


@pytest.fixture(autouse=True)
def weights(tiny_model: Path) -> None:
    """The checkpoint gets something to digest."""
    (tiny_model / "config.json").write_text("{}")
    (tiny_model / "model.safetensors").write_bytes(b"weights")


def receipt_of(answer: dict[str, Any]) -> Receipt:
    return Receipt.from_json(answer["receipt"])


def events(pair: Pair, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with pair.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["x-novainfer-mode"] == pair.scheduler.mode
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return (json.loads(line[6:]) for line in lines)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_given_a_request_when_a_receipt_is_asked_for_then_it_says_all_that_went_to_the_engine(
    pair: Pair, tiny_model: Path, path: str, body: dict[str, Any]
) -> None:
    response = pair.post(path, {**body, "n": 2, "receipt": True, "model": "alias"})
    receipt, sent = receipt_of(response.json()), pair.scheduler.added[0]
    assert response.headers["x-novainfer-mode"] == receipt.mode == pair.scheduler.mode
    assert (receipt.model, receipt.model_digest) == ("alias", model_digest(tiny_model))
    assert (receipt.max_model_len, receipt.after_prompt) == (256, path == "/v1/completions")
    assert list(receipt.prompt_token_ids) == sent.prompt_token_ids
    assert list(receipt.eos_token_ids) == sent.eos_token_ids
    assert receipt.params == sent.params
    for number, choice in enumerate(receipt.choices):
        ids = oracle_tokens(sent, number, 6, pair.scheduler.vocab_size)
        assert (choice.num_tokens, choice.token_hash, choice.finish_reason) == (6, token_hash(ids), "length")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_given_no_wish_for_a_receipt_when_answered_then_there_is_none_but_the_mode(
    pair: Pair, path: str, body: dict[str, Any]
) -> None:
    response = pair.post(path, body, **{"x-novainfer-receipt": "false"})
    assert response.headers["x-novainfer-mode"] == pair.scheduler.mode
    assert "receipt" not in response.json()
    assert not any("receipt" in event or not event["choices"] for event in events(pair, path, body))


def test_given_the_header_when_sent_then_it_counts_like_the_field_and_nonsense_is_refused(pair: Pair) -> None:
    body = {"prompt": "hello", "seed": 1}
    by_header = pair.post("/v1/completions", body, **{"x-novainfer-receipt": "true"}).json()["receipt"]
    assert by_header == pair.post("/v1/completions", body | {"receipt": True}).json()["receipt"]
    refused = pair.post("/v1/completions", body, **{"x-novainfer-receipt": "yes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-novainfer-receipt")
    assert len(pair.scheduler.added) == 2


@pytest.mark.parametrize("stop", [" jumps", "own"])
def test_given_a_stop_string_when_it_is_found_then_the_hash_covers_the_ids_that_usage_counts(
    pair: Pair, stop: str
) -> None:
    pair.say("the quick brown fox jumps over")
    answer = pair.post("/v1/completions", {"prompt": "x", "stop": stop, "return_token_ids": True, "receipt": True})
    choice, receipt = answer.json()["choices"][0], receipt_of(answer.json())
    assert choice["finish_reason"] == receipt.choices[0].finish_reason == "stop"
    assert receipt.choices[0].num_tokens == answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert receipt.choices[0].token_hash == token_hash(choice["token_ids"])


def test_given_several_prompts_when_completed_then_there_is_one_receipt_for_each(pair: Pair) -> None:
    body = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 3, "receipt": True, "seed": 1}
    receipts = [Receipt.from_json(data) for data in pair.post("/v1/completions", body).json()["receipts"]]
    ids = [pair.tokenizer.encode(text) for text in ("hello", "world")]
    assert [list(receipt.prompt_token_ids) for receipt in receipts] == ids
    assert len({choice.token_hash for receipt in receipts for choice in receipt.choices}) == 4
    last = list(events(pair, "/v1/completions", body))[-1]
    assert [Receipt.from_json(data) for data in last["receipts"]] == receipts


@pytest.mark.parametrize("include_usage", [False, True])
def test_given_a_stream_when_the_sdk_reads_it_then_the_last_chunk_has_no_choices_but_the_receipt(
    pair: Pair, include_usage: bool
) -> None:
    pair.say("hello world")  # the SDK's helper takes an end by length for an error
    whole = pair.post("/v1/chat/completions", CHAT | {"receipt": True, "model": "alias"}).json()
    options: Any = {"include_usage": True} if include_usage else openai.omit
    arguments: Any = {**CHAT, "model": "alias", "extra_body": {"receipt": True}, "stream_options": options}
    chunks = list(pair.sdk.chat.completions.create(**arguments, stream=True))
    assert chunks[-1].choices == []
    assert chunks[-1].to_dict()["receipt"] == whole["receipt"]
    assert all(chunk.choices and "receipt" not in chunk.to_dict() for chunk in chunks[:-1])
    assert (chunks[-1].usage is not None) == include_usage
    text = whole["choices"][0]["message"]["content"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    with pair.sdk.chat.completions.stream(**arguments) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_given_an_answer_that_was_cancelled_when_it_ends_then_it_has_no_receipt(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    body = CHAT | {"stream": True, "receipt": True, "max_tokens": 200}
    with pair.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-request-id": "mine"}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert pair.post("/v1/requests/mine/cancel", {}).status_code == 200
        last = [json.loads(line[6:]) for line in lines][-1]
    assert (last["choices"], last["receipt"]) == ([], None)


def test_given_an_answer_that_failed_when_streamed_then_the_error_is_its_end(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    with pair.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "receipt": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        request_id = pair.scheduler.added[0].request_id
        pair.scheduler.run_in_thread(lambda: pair.scheduler.fail(request_id, "broken"))
        rest = [json.loads(line[6:]) for line in lines]
    assert rest[-1]["error"]["message"] == "broken"
    assert not any("receipt" in event for event in rest)


def test_given_workers_of_another_mode_when_they_take_over_then_there_is_no_receipt(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    scheduler, gateway = start_pair(tiny_model, tmp_path / "run", tokenizer.vocab_size)
    try:
        scheduler.tokens_before_pause = 2
        with (
            gateway.http() as http,
            http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "receipt": True}) as response,
        ):
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            next(lines)
            scheduler.mode = scheduler.mode.replace("avx2", "avx512f")
            scheduler.tokens_before_pause = None
            scheduler.restart()
            events = [json.loads(line[6:]) for line in lines]
        assert events[-1]["receipt"] is None
        assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == "length"
    finally:
        gateway.close()
        scheduler.close()


def test_given_a_digest_that_takes_long_or_fails_when_awaited_then_the_line_stays_alive_and_the_next_tries_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest waits for a named pipe in place of the weights, so the test says when it goes on."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.setattr(sse_module, "KEEP_ALIVE_SECONDS", 0.05)
    scheduler, gateway = start_pair(model, tmp_path / "run", Tokenizer.load(model).vocab_size)
    try:
        with gateway.http() as http:
            failed = http.post("/v1/chat/completions", json=CHAT | {"receipt": True})
            assert (failed.status_code, str(model) in failed.text) == (500, False)
            os.mkfifo(model / "model.safetensors")
            with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "receipt": True}) as response:
                lines = response.iter_lines()
                while next(lines) != ": keep-alive":
                    pass
                assert http.get("/livez").status_code == 200
                (model / "model.safetensors").write_bytes(b"weights")
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert receipt_of(events[-1]).choices[0].num_tokens == 6
    finally:
        gateway.close()
        scheduler.close()
