"""`/v1/messages` of a real server: the same answers as its chats, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.messages import events_of, message_of, without_ids
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
QUESTIONS = [
    "Give me JSON with name Anna and age 31.",
    "What is NovaInfer?",
    "Count from 5 to 9.",
    "What is 23 plus 45?",
    "Spell gateway.",
    "What is the weather in Rome?",
]
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FLAT: list[Any] = [{"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}]
NESTED: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
    }
]


def whole_and_streamed(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which both ways must tell."""
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    with http.stream("POST", PATH, json={**body, "stream": True}) as stream:
        told = message_of(events_of(stream.iter_lines()))
    for answer in (whole, told):  # what is cached by then is another matter
        usage = answer["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert without_ids(told) == without_ids(whole)
    return whole


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_given_a_seed_when_asked_then_the_answer_is_the_chats_whole_and_streamed(
    server: RunningServer, question: str, has_tools: bool
) -> None:
    messages = [{"role": "user", "content": question}]
    sampled = {"max_tokens": 60, "temperature": 1.0, "seed": 7, "messages": messages, "model": "demo"}
    with server.http() as http:
        answer = whole_and_streamed(http, {**sampled, **({"tools": FLAT} if has_tools else {})})
        chat = http.post(CHAT, json={**sampled, **({"tools": NESTED} if has_tools else {})}).json()
        counted = http.post(COUNT, json={"messages": messages, "tools": FLAT if has_tools else []}).json()
    said, usage = chat["choices"][0]["message"], chat["usage"]
    assert "".join(block["text"] for block in answer["content"] if block["type"] == "text") == (said["content"] or "")
    calls = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
    made = [call["function"] for call in said.get("tool_calls", [])]
    assert calls == [(call["name"], json.loads(call["arguments"])) for call in made]
    ends = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert answer["stop_reason"] == ends[chat["choices"][0]["finish_reason"]]
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"] == counted["input_tokens"]
    assert answer["usage"]["output_tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_given_a_tool_that_must_be_called_when_asked_then_its_call_is_a_block_and_may_be_answered(
    server: RunningServer, choice: dict[str, Any]
) -> None:
    question = {"role": "user", "content": "How is Rome?"}
    body = {"max_tokens": 200, "temperature": 1.0, "seed": 7, "tools": FLAT}
    choice = {**choice, "disable_parallel_tool_use": True}
    with server.http() as http:
        first = whole_and_streamed(http, {**body, "tool_choice": choice, "messages": [question]})
        (call,) = first["content"]
        assert (call["type"], call["name"], [*call["input"]]) == ("tool_use", "weather", ["city"])
        assert first["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "warm"}]}
        turns = [question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        answer = whole_and_streamed(http, {**body, "max_tokens": 8, "messages": turns})
        function = {"name": call["name"], "arguments": json.dumps(call["input"])}
        called = {"id": "c", "type": "function", "function": function}
        messages: list[Any] = [question, {"role": "assistant", "tool_calls": [called]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "warm"})
        chat = http.post(CHAT, json={**body, "max_tokens": 8, "messages": messages, "tools": NESTED}).json()
    assert answer["content"][0].get("text") == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_given_a_beginning_of_the_answer_when_asked_then_it_goes_on_from_there(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "Count from 5 to 9."}, {"role": "assistant", "content": "5, 6,"}]
    with server.http() as http:
        answer = whole_and_streamed(http, {"max_tokens": 20, "temperature": 0, "messages": turns})
        chat = http.post(
            CHAT, json={"max_tokens": 20, "temperature": 0, "messages": turns, "continue_final_message": True}
        ).json()
        counted = http.post(COUNT, json={"messages": turns}).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert answer["usage"]["input_tokens"] == counted["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_given_a_stop_sequence_when_it_comes_then_the_answer_names_it(server: RunningServer) -> None:
    body = {"max_tokens": 30, "temperature": 0, "messages": [{"role": "user", "content": "Count from 5 to 9."}]}
    with server.http() as http:
        words = whole_and_streamed(http, body)["content"][0]["text"]
        stop = words[len(words) // 2 :][:3]
        answer = whole_and_streamed(http, {**body, "stop_sequences": ["never", stop]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in answer["content"]) == words[: words.index(stop)]


def test_given_a_schema_when_asked_then_the_answer_follows_it(server: RunningServer) -> None:
    form = {"type": "json_schema", "schema": PARAMETERS}
    body = {"max_tokens": 100, "seed": 3, "messages": [{"role": "user", "content": "Where is it warm?"}]}
    with server.http() as http:
        answer = whole_and_streamed(http, {**body, "output_config": {"format": form}})
    assert [*json.loads(answer["content"][0]["text"])] == ["city"]
