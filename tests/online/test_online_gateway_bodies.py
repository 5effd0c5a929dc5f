"""Bodies that are wide rather than large, and many that are held open: refused before they cost time or memory."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.body import MAX_ITEMS, MAX_NODES
from gateway.service import BODIES_AT_ONCE
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import ScriptedScheduler
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, start_pair

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
JSON = {"content-type": "application/json"}
MIB = 1024 * 1024


def listed(item: str, count: int) -> str:
    return '{"prompt": "a", "x": [' + ",".join([item] * count) + "]}"


WIDE = {
    "lists": listed("[]", 2 * MIB),
    "objects": listed("{}", MAX_NODES),
    "numbers": listed("1", MAX_ITEMS + 2),
    "strings": listed('""', 2 * MIB),
    "escapes": listed(r'"\""', MIB),
    "keys": '{"prompt": "a", "x": {' + ",".join(f'"{i}":1' for i in range(MAX_NODES)) + "}}",
    "no end": '{"x": [' + "," * (MAX_ITEMS + 1) + '"' + r"\"" * MIB + "\\",
}


@pytest.mark.parametrize("body", WIDE.values(), ids=WIDE.keys())
def test_given_a_body_of_very_many_values_when_sent_then_400_says_how_many_there_may_be(pair: Pair, body: str) -> None:
    reply = pair.http.post("/v1/completions", content=body.encode(), headers=JSON)
    assert reply.status_code == 400
    assert f"{MAX_ITEMS} items" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "invalid_json"
    assert not pair.scheduler.added


TEXT = "[{:," * (MAX_ITEMS + 1) + r"\"" + '"'
TOOL_CALL = {"id": "call", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
]
LEGITIMATE = {
    "punctuation in a text": {**BODY, "user": TEXT},
    "the longest history": {**BODY, "unknown": TURNS * 4096},
    "a long prompt of ids": {**BODY, "unknown": [123456] * 131_072},
    "full lists": {
        **BODY,
        "banned_token_ids": [5] * 4096,
        "stop_token_ids": [5] * 4096,
        "logit_bias": {str(i): 1 for i in range(256)},
    },
}


@pytest.mark.parametrize("body", LEGITIMATE.values(), ids=LEGITIMATE.keys())
def test_given_a_large_body_of_a_sane_kind_when_sent_then_it_is_answered(pair: Pair, body: dict[str, Any]) -> None:
    reply = pair.post(CHAT, body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "bad_words"])
def test_given_a_list_with_many_wrong_items_when_sent_then_one_complaint_is_the_answer(pair: Pair, field: str) -> None:
    reply = pair.post("/v1/completions", {"prompt": "a", field: [None] * 100_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@contextmanager
def small_bodies(model: Path, run_dir: Path, *keys: str) -> Iterator[tuple[ScriptedScheduler, GatewayThread]]:
    """A gateway that reads bodies of at most 1 MiB, and so `BODIES_AT_ONCE` MiB in all."""
    vocab_size = Tokenizer.load(model).vocab_size
    scheduler, gateway = start_pair(model, run_dir, vocab_size, max_body_mib=1, api_key=keys)
    try:
        yield scheduler, gateway
    finally:
        gateway.close()
        scheduler.close()


@contextmanager
def slow_uploads(scheduler: ScriptedScheduler, gateway: GatewayThread, count: int, key: str = "") -> Iterator[None]:
    """So many bodies of which the last byte is missing, in the gateway's memory; afterwards it holds none."""
    budget = gateway.service.body_budget
    whole = budget.left
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nX-Api-Key: {key}\r\nContent-Type: application/json\r\n"
    uploads = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(count)]
    for upload in uploads:
        upload.sendall(f"{head}Content-Length: {MIB}\r\n\r\n".encode() + b" " * (MIB - 1))
    scheduler.wait_for(lambda: budget.left == whole - count * (MIB - 1))
    try:
        yield
    finally:
        for upload in uploads:
            upload.close()
        scheduler.wait_for(lambda: budget.left == whole)


def test_given_slow_uploads_when_they_hold_all_the_memory_for_bodies_then_others_get_503_until_they_leave(
    tiny_model: Path, tmp_path: Path
) -> None:
    with small_bodies(tiny_model, tmp_path / "run") as (scheduler, gateway), gateway.http() as http:
        with slow_uploads(scheduler, gateway, BODIES_AT_ONCE):
            refused = http.post(CHAT, json={**BODY, "user": "x" * BODIES_AT_ONCE})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] == "1"
        assert http.post(CHAT, content=json.dumps(BODY), headers=JSON).status_code == 200


def test_given_slow_uploads_of_one_key_when_they_hold_half_of_the_memory_then_it_gets_429_and_others_are_answered(
    tiny_model: Path, tmp_path: Path
) -> None:
    body = {**BODY, "user": "x" * (MIB // 2)}
    with small_bodies(tiny_model, tmp_path / "run", "a", "b") as (scheduler, gateway), gateway.http() as http:
        with slow_uploads(scheduler, gateway, BODIES_AT_ONCE // 2, "a"):
            refused = http.post(CHAT, json=body, headers={"x-api-key": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert refused.headers["retry-after"] == "1"
            assert http.post(CHAT, json=body, headers={"x-api-key": "b"}).status_code == 200
        assert http.post(CHAT, json=body, headers={"x-api-key": "a"}).status_code == 200


def test_given_a_text_far_beyond_the_context_when_sent_then_it_is_refused_untokenised(pair: Pair) -> None:
    text = "a" * (7 * MIB)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["short", text], "max_tokens": 1}),
    ):
        reply = pair.http.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "characters" in reply.json()["error"]["message"]
    assert not pair.scheduler.added


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_given_a_compressed_body_when_sent_then_it_is_refused_and_never_inflated(pair: Pair, coding: str) -> None:
    packed = gzip.compress(json.dumps(BODY).encode() + b" " * (64 * MIB))
    assert len(packed) < MIB
    reply = pair.http.post(CHAT, content=packed, headers={**JSON, "content-encoding": coding})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert not pair.scheduler.added
