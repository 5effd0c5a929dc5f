"""`/v1/messages` against a scripted engine: what it asks of it, and what it makes of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import sse
from novainfer.protocol.messages import RequestRejected
from novainfer.text.tokenizer import Tokenizer
from tests.messages import events_of, message_of, without_ids
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, start_pair
from tests.thinker import ARGUMENTS, CALL, HELLO, TEXT, TOOLS

pytestmark = pytest.mark.stage2

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
FLAT: list[Any] = [{"name": "f", "input_schema": {}}]
BODY: dict[str, Any] = {"model": "alias", "max_tokens": 200, "messages": HELLO}
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "toolu_c", "name": "f", "input": {"a": [1]}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_c", "content": "72"}]},
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "72"},
]
SCHEMA: dict[str, Any] = {"type": "object"}


def asked(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    response = pair.post(PATH, {**BODY, **body})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    answer: dict[str, Any] = response.json()
    return answer


def streamed(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    """The message of a stream."""
    with pair.http.stream("POST", PATH, json={**BODY, **body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        return message_of(events_of(response.iter_lines()))


def refused(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error."""
    error = response.json()
    assert (error.keys(), error["error"].keys()) == ({"type", "error"}, {"type", "message"})
    assert error["type"] == "error"
    return response.status_code, error["error"]["type"], error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {"messages": HELLO}),
        (
            {"messages": BLOCKS, "system": "be", "tools": FLAT, "max_tokens": 99},
            {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 99},
        ),
        (
            {"max_tokens": 7, "temperature": 0.7, "top_k": 5, "ignore_eos": True, "stop_sequences": ["x"]},
            {"messages": HELLO, "max_tokens": 7, "temperature": 0.7, "top_k": 5, "ignore_eos": True, "stop": ["x"]},
        ),
        (
            {"tools": FLAT, "tool_choice": {"type": "any"}},
            {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            },
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "one two"}]}]},
            {"messages": [*HELLO, {"role": "assistant", "content": "one two"}], "continue_final_message": True},
        ),
    ],
)
def test_given_a_request_when_answered_then_the_engine_is_asked_what_the_chat_asks_it(
    thinker: Pair, body: dict[str, Any], chat: dict[str, Any]
) -> None:
    thinker.say(TEXT)
    common = {"seed": 5, "priority": 2, "cache_salt": "s"}
    asked(thinker, {**body, **common})
    streamed(thinker, {**body, **common})
    assert thinker.post(CHAT, {"max_tokens": 200, **chat, **common}).status_code == 200
    whole, stream, of_chat = thinker.scheduler.added[-3:]
    names: dict[str, Any] = {"request_id": "", "aliases": [], "deadline": 0.0, "ref": 0}
    assert replace(whole, **names) == replace(stream, **names) == replace(of_chat, **names)
    assert whole.answer == stream.answer == ""  # no other gateway could go on with it
    counted = {name: value for name, value in {**BODY, **body}.items() if name in COUNTED}
    count = thinker.post(COUNT, counted)
    assert count.json() == {"input_tokens": len(whole.prompt_token_ids)}
    assert "x-novainfer-ignored" not in count.headers


COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
STYLES: list[dict[str, Any]] = [
    {},
    {"tools": FLAT},
    {"tools": FLAT, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"tools": FLAT, "tool_choice": {"type": "none"}},
    {"max_tokens": 12},
    {"max_tokens": 45, "tools": FLAT},
    {"max_tokens": 80, "tools": FLAT},
    {"stop_sequences": ["look"], "tools": FLAT},
    {"stop_sequences": ["never"], "tools": FLAT},
    {"system": "be\u2028brief", "thinking": {"type": "enabled", "budget_tokens": 1024}},
]
SAID = [TEXT, "one two three four five", "", f"{CALL}after", "no thought,\u2028 but\x85 lines", "<think>\ncut"]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_given_a_stream_when_it_ends_then_its_parts_are_the_whole_answer(thinker: Pair, style: dict[str, Any]) -> None:
    for text in SAID:
        thinker.say(text)
        for seconds in (0.0, 0.002):
            thinker.scheduler.step_seconds = seconds
            whole = asked(thinker, style)
            assert without_ids(streamed(thinker, style)) == without_ids(whole)
            assert list(whole) == [
                "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage",
            ]  # fmt: skip


def test_given_an_answer_of_all_kinds_when_told_then_it_is_the_chats(thinker: Pair) -> None:
    thinker.say(TEXT)
    answer = asked(thinker, {"tools": FLAT})
    chat = thinker.post(CHAT, {"messages": HELLO, "tools": TOOLS, "max_tokens": 200}).json()
    message, usage = chat["choices"][0]["message"], chat["usage"]
    thought, words, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    assert words == {"type": "text", "text": message["content"]}
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert [(call["name"], call["input"]) for call in calls] == named
    assert named[0] == ("f", json.loads(ARGUMENTS))
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "alias")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"] == {
        "input_tokens": usage["prompt_tokens"] - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": usage["completion_tokens"],
    }


@pytest.mark.parametrize(
    ("text", "body", "end"),
    [
        ("one two three", {}, ("end_turn", None)),
        ("one two three", {"max_tokens": 2}, ("max_tokens", None)),
        ("one two three", {"stop_sequences": ["x", "wo t"]}, ("stop_sequence", "wo t")),
        (TEXT, {"tools": FLAT, "stop_sequences": ["g"]}, ("stop_sequence", "g")),
        (TEXT, {"tools": FLAT}, ("tool_use", None)),
        (TEXT, {"tools": FLAT, "stop_sequences": ["zzz"]}, ("tool_use", None)),
    ],
)
def test_given_an_end_when_told_then_its_reason_and_the_sequence_that_matched_are(
    thinker: Pair, text: str, body: dict[str, Any], end: tuple[str, str | None]
) -> None:
    thinker.say(text)
    for answer in (asked(thinker, body), streamed(thinker, body)):
        assert (answer["stop_reason"], answer["stop_sequence"]) == end


def test_given_a_stop_token_when_it_ends_an_answer_then_that_is_no_sequence(thinker: Pair) -> None:
    thinker.say("one two three")
    last = thinker.tokenizer.encode("one two three")[-1]
    for answer in (asked(thinker, {"stop_token_ids": [last]}), streamed(thinker, {"stop_token_ids": [last]})):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_given_an_answer_when_sent_back_then_the_prompt_is_the_one_of_the_chat(thinker: Pair) -> None:
    thinker.say(TEXT)
    first = asked(thinker, {"tools": FLAT})
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "72"} for call in calls]
    turns = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    asked(thinker, {"messages": turns, "tools": FLAT, "max_tokens": 99})
    message = thinker.post(CHAT, {"messages": HELLO, "tools": TOOLS}).json()["choices"][0]["message"]
    tools = [{"role": "tool", "tool_call_id": call["id"], "content": "72"} for call in message["tool_calls"]]
    thinker.post(CHAT, {"messages": [*HELLO, message, *tools], "tools": TOOLS})
    of_messages, _, of_chat = thinker.scheduler.added[-3:]
    assert of_messages.prompt_token_ids == of_chat.prompt_token_ids


def test_given_many_prompts_when_streamed_then_each_stream_is_its_whole_answer(pair: Pair) -> None:
    for number in range(40):
        body = {"messages": [{"role": "user", "content": f"prompt {number}"}], "seed": number, "max_tokens": 40}
        whole = asked(pair, body)
        assert without_ids(streamed(pair, body)) == without_ids(whole)
        assert whole["usage"]["output_tokens"] == 40


def test_given_a_long_wait_when_streaming_then_pings_keep_the_connection_once_the_message_has_begun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    pair.say("one two three four")
    pair.scheduler.tokens_before_pause = 0
    found: list[str] = []
    with pair.http.stream("POST", PATH, json={**BODY, "stream": True}) as response:
        for line in response.iter_lines():
            found.append(line)
            if found.count(": keep-alive") == 2:
                pair.scheduler.tokens_before_pause = 2
            if found.count("event: ping") == 2:
                pair.scheduler.tokens_before_pause = None
    at = found.index("event: ping")
    assert found[at + 1 : at + 3] == ['data: {"type":"ping"}', ""]
    assert ": keep-alive" not in found[at:]
    assert message_of(events_of(found))["content"] == [{"type": "text", "text": "one two three four"}]


def test_given_a_stream_that_fails_when_read_then_its_last_event_is_an_error(thinker: Pair) -> None:
    thinker.say("one two three four")
    thinker.scheduler.tokens_before_pause = 2
    with thinker.http.stream("POST", PATH, json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        found = [next(lines) for _ in range(4)]
        (request_id,) = thinker.scheduler.live
        thinker.scheduler.run_in_thread(lambda: thinker.scheduler.fail(request_id, "it broke"))
        found += lines
    events = events_of(found)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [event["type"] for event in events]


def test_given_a_stream_when_cancelled_then_its_message_ends_and_says_so(pair: Pair) -> None:
    pair.say("one two three four")
    pair.scheduler.tokens_before_pause = 2
    with pair.http.stream("POST", PATH, json={**BODY, "stream": True}, headers={"x-request-id": "mine"}) as response:
        lines = response.iter_lines()
        found = [next(lines)]
        assert pair.post("/v1/requests/mine/cancel", {}).status_code == 200
        found += lines
    assert message_of(events_of(found))["stop_reason"] == "cancelled"


def test_given_a_request_that_the_engine_refuses_when_streamed_then_the_status_says_so(pair: Pair) -> None:
    pair.scheduler.reject = lambda request: RequestRejected(request.request_id, 400, "messages: too odd")
    for body in (BODY, {**BODY, "stream": True}):
        assert refused(pair.post(PATH, body)) == (400, "invalid_request_error", "messages: too odd")


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing."),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens must be between 1 and"),
        ({"max_tokens": 300}, 400, "invalid_request_error", "This model's maximum context length is 256 tokens."),
        ({"model": "other"}, 404, "not_found_error", "The model"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "messages[0]"),
        ({"system": [{"type": "text", "text": "\ud800"}]}, 400, "invalid_request_error", "The"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "each stop string must"),
        ({"temperature": 200}, 400, "invalid_request_error", "temperature must be between"),
        ({"tools": FLAT, "tool_choice": {"type": "tool", "name": "g"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": " "}]}, 400, "invalid_request_error",
            "messages: there is no final message with text.",
        ),
    ],
)  # fmt: skip
def test_given_what_is_wrong_when_asked_then_the_error_is_of_the_clients_form(
    thinker: Pair, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    content = json.dumps({**BODY, **body})
    response = thinker.http.post(PATH, content=content, headers={"content-type": "application/json"})
    found = refused(response)
    assert found[:2] == (status, kind)
    assert found[2].startswith(words)
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_given_no_request_at_all_when_sent_then_the_error_is_of_the_clients_form(pair: Pair) -> None:
    wrong_method = pair.http.get(PATH)
    assert refused(wrong_method)[:2] == (405, "invalid_request_error")
    assert wrong_method.headers["request-id"] == wrong_method.headers["x-request-id"]
    assert refused(pair.http.post(PATH, content=b"{"))[:2] == (415, "invalid_request_error")
    json_body = {"content-type": "application/json"}
    assert refused(pair.http.post(COUNT, content=b"{", headers=json_body))[:2] == (400, "invalid_request_error")
    assert refused(pair.post(PATH, BODY, **{"x-novainfer-receipt": "true"}))[:2] == (400, "invalid_request_error")
    assert refused(pair.post(PATH, BODY, **{"x-request-timeout": "soon"}))[:2] == (400, "invalid_request_error")
    assert "param" in pair.http.get("/v1/other").json()["error"]


def test_given_headers_and_fields_of_others_when_asked_then_they_are_named_or_passed_over(pair: Pair) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    body = {**BODY, "max_tokens": 2, "service_tier": "priority", "inference_geo": "us", "metadata": {"user_id": "u"}}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    response = pair.http.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert response.status_code == 200
    assert response.headers["x-novainfer-ignored"] == "thinking.budget_tokens,service_tier,inference_geo"
    cached = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    assert "x-novainfer-ignored" not in pair.post(PATH, {**BODY, "max_tokens": 2, "system": cached}).headers


@pytest.fixture(scope="module")
def locked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """A gateway with a key."""
    vocab_size = Tokenizer.load(tiny_model).vocab_size
    scheduler, gateway = start_pair(tiny_model, tmp_path_factory.mktemp("locked"), vocab_size, api_key=("key",))
    yield gateway
    gateway.close()
    scheduler.close()


def test_given_a_key_when_sent_as_either_header_then_it_opens_and_without_it_the_error_is_of_the_clients_form(
    locked: GatewayThread,
) -> None:
    body = {**BODY, "max_tokens": 2}
    with locked.http() as http:
        for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"}):
            assert http.post(PATH, json=body, headers=headers).json()["stop_reason"] == "max_tokens"
            assert http.post(COUNT, json={"messages": HELLO}, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "other"}):
            for path in (PATH, COUNT):
                response = http.post(path, json=body, headers=headers)
                assert refused(response)[:2] == (401, "authentication_error")
                assert response.headers["request-id"] == response.headers["x-request-id"]
        assert "param" in http.post(CHAT, json=body).json()["error"]
