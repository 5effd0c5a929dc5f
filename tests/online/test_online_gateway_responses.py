"""`/v1/responses` against a scripted engine, partly by the real SDK: what it asks of it, and what it makes of that."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from gateway import logprobs
from gateway.response_echo import Echo
from novainfer.text.parts import Parsers
from novainfer.text.tool_calls import call_id
from tests.online.conftest import Pair
from tests.thinker import ARGUMENTS, HELLO, TEXT

pytestmark = pytest.mark.stage2

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
FLAT: list[Any] = [{"type": "function", "name": "f", "parameters": {}, "strict": None}]
NESTED: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
INCLUDE = ["message.output_text.logprobs"]
THOUGHT_TOLD = "Hello? <tool_call>"
OUTPUT = ["reasoning", "message", "function_call", "function_call"]
DIFFERS = ("id", "created_at")


def streamed(pair: Pair, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a raw stream; each says twice what it is, and which one."""
    with pair.http.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
    found = []
    for event, data, blank in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        told = json.loads(data.removeprefix("data: "))
        assert (event, blank) == (f"event: {told['type']}", "")
        assert told["sequence_number"] == len(found)
        found.append(told)
    assert [told["type"] for told in found[:2]] == ["response.created", "response.in_progress"]
    return found


def without_names(answer: Any, response_id: str) -> Any:
    """What is left of an answer without what differs from the next one to the same request."""
    text = json.dumps({name: value for name, value in answer.items() if name not in DIFFERS})
    plain = json.loads(text.replace(response_id.removeprefix("resp_"), "ID"))
    for item in plain["output"]:
        item.pop("call_id", None)
    return plain


def asked(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer, which the SDK's own type allows."""
    response = pair.post(PATH, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer)
    return answer


def test_given_an_answer_of_all_kinds_when_read_by_the_sdk_then_whole_and_streamed_are_the_same(thinker: Pair) -> None:
    thinker.say(TEXT)
    assert thinker.gateway.service.parsers == Parsers("hermes", "think")
    for seconds in (0.0, 0.002):
        thinker.scheduler.step_seconds = seconds
        answer = thinker.sdk.responses.create(model="alias", input="hello", tools=FLAT)
        assert answer.output_text == "Let me look."
        assert [item.type for item in answer.output] == OUTPUT
        assert answer.status == "completed"
        with thinker.sdk.responses.stream(model="alias", input="hello", tools=FLAT) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert (final.output_text, [item.type for item in final.output]) == ("Let me look.", OUTPUT)
        calls: Any = final.output[2:]
        assert [(call.name, call.arguments) for call in calls] == [("f", ARGUMENTS), ("g", "{}")]
        thought: Any = final.output[0]
        assert thought.content[0].text == THOUGHT_TOLD
        assert final.usage is not None
        assert final.usage.output_tokens_details.reasoning_tokens > 2


ITEMS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "72"},
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "72"},
]
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hello"}, {"messages": HELLO}),
        ({"input": ITEMS, "instructions": "be", "tools": FLAT}, {"messages": MESSAGES, "tools": NESTED}),
        (
            {"input": "hello", "max_output_tokens": 7, "temperature": 0.7, "top_k": 5, "ignore_eos": True, "stop": "x"},
            {"messages": HELLO, "max_tokens": 7, "temperature": 0.7, "top_k": 5, "ignore_eos": True, "stop": "x"},
        ),
        (
            {"input": "hello", "tools": FLAT, "tool_choice": "required"},
            {"messages": HELLO, "tools": NESTED, "tool_choice": "required"},
        ),
        (
            {"input": "hello", "text": {"format": {"type": "json_schema", **SCHEMA}}},
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        ),
        (
            {"input": "hello", "include": INCLUDE, "top_logprobs": 2, "chat_template_kwargs": {"thinks": True}},
            {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"thinks": True}},
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
    assert thinker.post(CHAT, {**chat, **common}).status_code == 200
    whole, stream, of_chat = thinker.scheduler.added[-3:]
    names: dict[str, Any] = {"request_id": "", "aliases": [], "deadline": 0.0, "ref": 0}
    assert replace(whole, **names) == replace(stream, **names) == replace(of_chat, **names)
    assert whole.answer == stream.answer == ""  # no other gateway could go on with it


STYLES: list[dict[str, Any]] = [
    {},
    {"tools": FLAT},
    {"tools": FLAT, "parallel_tool_calls": False},
    {"tools": FLAT, "tool_choice": "none"},
    {"tools": FLAT, "include": INCLUDE, "top_logprobs": 2},
    {"include": INCLUDE},
    {"include_reasoning": False},
    {"separate_reasoning": False, "tools": FLAT},
    {"max_output_tokens": 12},
    {"max_output_tokens": 45, "tools": FLAT},
    {"max_output_tokens": 80, "tools": FLAT},
    {"stop": ["look"], "tools": FLAT},
    {"instructions": "be\u2028brief", "metadata": {"a": "b"}, "user": "u", "text": {"format": {"type": "json_object"}}},
]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_given_a_stream_when_it_ends_then_its_parts_and_its_last_event_are_the_whole_answer(
    thinker: Pair, style: dict[str, Any]
) -> None:
    thinker.say(TEXT)
    body = {"model": "alias", "input": "hello", **style}
    whole = asked(thinker, body)
    for seconds in (0.0, 0.002):
        thinker.scheduler.step_seconds = seconds
        events = streamed(thinker, body)
        last = events[-1]
        assert last["type"] == f"response.{last['response']['status']}"
        assert without_names(last["response"], last["response"]["id"]) == without_names(whole, whole["id"])
        parts: dict[int, str] = {}
        told_logprobs: list[Any] = []
        for event in events:
            if event["type"].endswith(".delta"):
                parts[event["output_index"]] = parts.get(event["output_index"], "") + event["delta"]
                told_logprobs += event.get("logprobs", [])
        told = [item.get("arguments") or item["content"][0]["text"] for item in last["response"]["output"]]
        assert told == [parts[place] for place in sorted(parts)]
        messages = [item for item in last["response"]["output"] if item["type"] == "message"]
        for message in messages:
            of_all = message["content"][0]["logprobs"]
            assert of_all[: len(told_logprobs)] == told_logprobs
            assert bool(of_all) == ("include" in style)
        assert first_of(events)["output"] == []
        assert first_of(events)["status"] == "in_progress"
        assert first_of(events)["usage"] is None
    assert whole["status"] == ("incomplete" if "max_output_tokens" in style else "completed")
    assert whole["usage"]["output_tokens"] <= style.get("max_output_tokens", 1000)


def first_of(events: list[dict[str, Any]]) -> Any:
    return events[0]["response"]


def test_given_an_answer_when_told_then_it_is_the_chats_and_repeats_its_request(thinker: Pair) -> None:
    thinker.say(TEXT)
    fields: dict[str, Any] = {
        "instructions": "be", "max_output_tokens": 200, "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": True,
        "tools": FLAT, "tool_choice": "auto", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "truncation": "disabled", "text": {"format": {"type": "text"}}, "top_logprobs": 0,
    }  # fmt: skip
    answer = asked(thinker, {"model": "alias", "input": "hello", "store": True, "service_tier": "auto", **fields})
    for name, value in fields.items():
        found = answer[name]
        assert found == ([{"description": None, **value[0]}] if name == "tools" else value), name
    assert (answer["store"], answer["background"], answer["service_tier"]) == (False, False, "default")
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    chat = thinker.post(
        CHAT, {"messages": [{"role": "system", "content": "be"}, *HELLO], "tools": NESTED, "max_tokens": 200}
    ).json()
    message = chat["choices"][0]["message"]
    thought, said, *calls = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": message["reasoning_content"]}]
    assert said["content"][0]["text"] == message["content"]
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == named
    assert [call["call_id"] for call in calls] == [call_id("hermes", answer["id"], 0, index) for index in range(2)]
    usage, of_chat = answer["usage"], chat["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == of_chat["total_tokens"]
    assert usage["output_tokens_details"] == of_chat["completion_tokens_details"]
    assert usage["input_tokens_details"]["cached_tokens"] == of_chat["prompt_tokens_details"]["cached_tokens"] == 4


def test_given_an_answer_when_sent_back_as_input_then_the_prompt_is_the_one_of_the_chat(thinker: Pair) -> None:
    thinker.say(TEXT)
    first = asked(thinker, {"input": "hello", "tools": FLAT})
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "72"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    items = [{"role": "user", "content": "hello"}, *first["output"], *outputs]
    asked(thinker, {"input": items, "tools": FLAT, "seed": 1})
    message = thinker.post(CHAT, {"messages": HELLO, "tools": NESTED}).json()["choices"][0]["message"]
    tools = [{"role": "tool", "tool_call_id": item["call_id"], "content": "72"} for item in outputs]
    thinker.post(CHAT, {"messages": [*HELLO, message, *tools], "tools": NESTED, "seed": 1})
    of_response, _, of_chat = thinker.scheduler.added[-3:]
    assert of_response.prompt_token_ids == of_chat.prompt_token_ids


def test_given_many_log_probabilities_when_streamed_then_the_last_events_hold_all_of_them(thinker: Pair) -> None:
    body = {"input": "hello", "include": INCLUDE, "top_logprobs": 20, "max_output_tokens": 200, "ignore_eos": True}
    thinker.scheduler.script = lambda request, choice: thinker.tokenizer.encode("one two three four " * 30)
    with_all = streamed(thinker, {**body, "seed": 3})[-1]["response"]
    (message,) = with_all["output"]
    whole = asked(thinker, {**body, "seed": 3})
    assert without_names(whole, whole["id"]) == without_names(with_all, with_all["id"])
    assert [len(entry["top_logprobs"]) for entry in message["content"][0]["logprobs"]] == [20] * 200
    chat = thinker.post(
        CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    ).json()
    assert message["content"][0]["logprobs"] == chat["choices"][0]["logprobs"]["content"]


def test_given_more_log_probabilities_than_can_be_held_when_asked_then_the_error_says_so_and_nothing_is_kept(
    thinker: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_OF_ANSWER", 40)
    room = thinker.gateway.service.logprob_room
    thinker.say("one two three four five six seven")
    body = {"input": "hello", "include": INCLUDE, "top_logprobs": 1}
    thinker.scheduler.step_seconds = 0.01
    last = streamed(thinker, body)[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["error"]["code"], last["response"]["error"]["param"]) == ("invalid_prompt", "include")
    refused = thinker.post(PATH, {**body, "top_logprobs": 20})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")
    thinker.wait_idle()
    assert room._held == 0


LARGE: list[dict[str, Any]] = [
    {"tools": FLAT, "tool_choice": {"type": "function", "name": "f", "j": "x" * 7_500_000}},
    {"tools": [{**FLAT[0], "x": "x" * 2**21}]},
    {"tools": FLAT, "text": {"format": {"type": "text", "x": "\xe9" * 2**21}}},
    {"tools": FLAT, "user": "x" * 2**21},
]


@pytest.mark.parametrize("fields", LARGE, ids=["tool_choice", "tools", "text", "user"])
def test_given_a_large_request_when_it_runs_then_little_of_it_is_held_and_told(
    thinker: Pair, fields: dict[str, Any]
) -> None:
    thinker.say("one two three")
    thinker.scheduler.tokens_before_pause = 1
    with thinker.http.stream("POST", PATH, json={"input": "hello", "stream": True, **fields}) as response:
        lines = response.iter_lines()
        while "output_item.added" not in (line := next(lines)):
            assert "failed" not in line
        held = [found for found in gc.get_objects() if type(found) is Echo]
        assert [len(echo.data) < 4096 for echo in held] == [True]
        thinker.scheduler.tokens_before_pause = None
        last = [line for line in lines if line][-1]
    answer = json.loads(last.removeprefix("data: "))["response"]
    assert answer["status"] == "completed"
    assert len(last) < 8192
    del held


def test_given_what_has_no_effect_when_asked_then_the_headers_name_it(thinker: Pair) -> None:
    body = {"input": "hello", "text": {"verbosity": "low"}, "service_tier": "flex", "reasoning": {"summary": "concise"}}
    response = thinker.post(PATH, body)
    assert response.headers["x-novainfer-ignored"] == "text.verbosity,service_tier"
    assert (response.json()["service_tier"], response.json()["reasoning"]["summary"]) == ("default", "concise")
    assert "x-novainfer-ignored" not in thinker.post(PATH, {"input": "hello", "text": {"verbosity": "medium"}}).headers


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str


def test_given_a_type_when_parsed_by_the_sdk_then_it_is_one(thinker: Pair) -> None:
    thinker.say('{"name": "Anna"}')
    answer = thinker.sdk.responses.parse(model="alias", input="hello", text_format=Person)
    assert answer.output_parsed == Person(name="Anna")
    assert thinker.scheduler.added[-1].params.grammar
    with thinker.sdk.responses.stream(model="alias", input="hello", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Anna")


def test_given_a_stream_that_fails_when_read_then_its_last_event_says_so_and_holds_what_there_was(
    thinker: Pair,
) -> None:
    thinker.say(TEXT)
    thinker.scheduler.tokens_before_pause = 60
    with thinker.http.stream("POST", PATH, json={"input": "hello", "stream": True}) as response:
        lines = response.iter_lines()
        while "output_text.delta" not in (line := next(lines)):
            assert "failed" not in line
        (request_id,) = thinker.scheduler.live
        thinker.scheduler.run_in_thread(lambda: thinker.scheduler.fail(request_id, "broken"))
        rest = [line for line in lines if line]
    assert rest[-2] == "event: response.failed"
    answer = json.loads(rest[-1].removeprefix("data: "))["response"]
    assert Response.model_validate(answer).status == "failed"
    assert answer["error"].keys() == {"code", "message", "type", "param"}
    assert (answer["error"]["code"], answer["error"]["type"]) == ("server_error", "server_error")
    assert [(item["type"], item["status"]) for item in answer["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


def test_given_a_client_that_leaves_when_a_stream_runs_then_the_request_is_cancelled(thinker: Pair) -> None:
    thinker.scheduler.tokens_before_pause = 2
    before = len(thinker.scheduler.cancelled)
    with thinker.sdk.responses.create(model="alias", input="hello", stream=True) as stream:
        next(iter(stream))
    thinker.scheduler.wait_for(lambda: len(thinker.scheduler.cancelled) == before + 1)
    thinker.wait_idle()


def test_given_a_stream_when_cancelled_by_its_id_then_it_ends_as_cancelled(thinker: Pair) -> None:
    thinker.scheduler.tokens_before_pause = 3
    thinker.say("one two three four five six")
    with (
        thinker.gateway.http() as other,
        thinker.http.stream("POST", PATH, json={"input": "hello", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
        assert response_id.startswith("resp_")
        assert other.post(f"/v1/requests/{response_id}/cancel").status_code == 200
        rest = [line for line in lines if line]
    answer = json.loads(rest[-1].removeprefix("data: "))["response"]
    assert rest[-2] == "event: response.incomplete"
    assert (answer["status"], answer["incomplete_details"]) == ("cancelled", None)


CALLED, GAVE = ITEMS[3:]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "input[0].content",
    ),
    ({"input": [*HELLO, {"role": "user", "content": [{"type": "input_file"}]}]}, "input", "input[1].content"),
    (
        {"input": [*HELLO, CALLED, {"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "input[2].content: only text",
    ),
    (
        {"input": [*HELLO, CALLED, {**GAVE, "output": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "input[2].output: only text",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
        "input",
        "input[0].content: a message of this role has parts of the types text, input_text, not output_text.",
    ),
    ({"modalities": ["audio"]}, "modalities", "'text'"),
    ({"min_tokens": 5, "max_output_tokens": 2}, "min_tokens", "must not be above max_output_tokens"),
    (
        {"tools": FLAT, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "tool_choice",
        "cannot be combined with structured_outputs",
    ),
    ({"reasoning": {"effort": "x" * 7_500_000}}, "reasoning", "at most 64 characters"),
    ({"include": INCLUDE, "top_logprobs": -1}, "top_logprobs", "top_logprobs must be between"),
    ({"top_logprobs": -1}, "top_logprobs", "top_logprobs must be between"),
    ({"input": "x" * 4000}, "input", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be between"),
    ({"max_output_tokens": 10_000}, "max_output_tokens", "maximum context length"),
    ({"temperature": 101}, "temperature", "temperature"),
    ({"include": INCLUDE, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type must be"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", "text.format.name must be"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text", "text.format"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "with text",
    ),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice", "has no such function"),
    ({"tool_choice": "always"}, "tool_choice", "tool_choice must be"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no conversations"),
    ({"model": "other"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(case[0])[:60] for case in REFUSED])
def test_given_what_cannot_be_answered_when_sent_then_the_error_is_in_words_of_the_request(
    thinker: Pair, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        response = thinker.post(PATH, {"input": "hello", "stream": stream, **fields})
        assert response.status_code == (404 if param == "model" else 400), response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert words in error["message"]
        assert "response_format" not in error["message"]
    with pytest.raises(openai.APIStatusError):
        thinker.sdk.responses.create(model="alias", input="hello", extra_body=fields)


def test_given_a_receipt_asked_for_by_header_when_sent_then_400(thinker: Pair) -> None:
    response = thinker.post(PATH, {"input": "hello"}, **{"x-novainfer-receipt": "true"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-novainfer-receipt")


def test_given_an_engine_that_starts_again_when_streamed_then_nothing_is_lost_or_told_twice(thinker: Pair) -> None:
    thinker.say(TEXT)
    body = {"input": "hello", "tools": FLAT, "seed": 4}
    whole = asked(thinker, body)
    thinker.scheduler.tokens_before_pause = 30
    with thinker.http.stream("POST", PATH, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        thinker.scheduler.wait_for(lambda: any(live.counts == [30] for live in thinker.scheduler.live.values()))
        thinker.scheduler.restart()
        thinker.scheduler.tokens_before_pause = None
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    last = data[-1]["response"]
    assert without_names(last, last["id"]) == without_names(whole, whole["id"])
