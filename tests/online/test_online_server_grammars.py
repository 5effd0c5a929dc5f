"""Answers of a form that the client chooses, from a real server: whole, streamed, many at once, beside refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION: list[Any] = [{"role": "user", "content": "Give me JSON with name Anna and age 31."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
HOSTILE = {"type": "string", "allOf": [{"pattern": f"[a-z]*{i}.*"} for i in range(40)]}  # takes minutes to build


def is_person(text: str | None) -> bool:
    """What `PERSON` says, by hand."""
    value = json.loads(text or "")
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"new", "old"}
    )


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


def ask(sdk: openai.OpenAI, **options: Any) -> Any:
    fields = {"model": "demo", "messages": QUESTION, "response_format": FORMAT, "max_completion_tokens": 200, **options}
    return sdk.chat.completions.create(**fields)


def streamed(sdk: openai.OpenAI, **options: Any) -> tuple[str, str | None]:
    """The text and the finish reason of choice 0."""
    chunks = [chunk.choices[0] for chunk in ask(sdk, stream=True, **options) if chunk.choices]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


STYLES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11, "n": 2},
    {"temperature": 1.5, "seed": 12, "logprobs": True, "top_logprobs": 2},
    {"temperature": 2.5, "seed": 13, "extra_body": {"top_k": 40, "repetition_penalty": 1.1}},
    {"temperature": 1.2, "seed": 14, "presence_penalty": 0.5, "logit_bias": {"300": 2}},
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"temperature {style['temperature']}")
def test_given_a_schema_when_answered_then_it_is_followed_and_a_seed_gives_the_same_whole_streamed_and_beside_others(
    sdk: openai.OpenAI, style: dict[str, Any]
) -> None:
    alone = ask(sdk, **style)
    for choice in alone.choices:
        assert choice.finish_reason == "stop"
        assert is_person(choice.message.content)
    assert streamed(sdk, **{**style, "n": 1}) == (alone.choices[0].message.content, "stop")
    with ThreadPoolExecutor(8) as pool:
        others = list(pool.map(lambda other: ask(sdk, **other), [style, *STYLES, style]))
    for again in (others[0], others[-1]):
        assert again.choices == alone.choices
    if style.get("logprobs"):
        entries = alone.choices[0].logprobs.content
        assert "".join(entry.token for entry in entries) == f"{alone.choices[0].message.content}<|im_end|>"
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_given_json_of_any_form_when_answered_then_it_is_an_object_or_cut_by_the_length(sdk: openai.OpenAI) -> None:
    for seed in range(6):
        answer = ask(sdk, response_format={"type": "json_object"}, temperature=1.3, seed=seed, max_completion_tokens=80)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert reason == "length"
    cut = ask(sdk, max_completion_tokens=5, temperature=0).choices[0]
    assert cut.finish_reason == "length"
    stopped = ask(sdk, stop=["age"], temperature=0).choices[0]
    assert (stopped.finish_reason, "age" in stopped.message.content) == ("stop", False)


@pytest.mark.parametrize("prompt", ["One person: ", ["One person: ", "Another: "]])
def test_given_a_format_when_a_text_is_completed_then_what_follows_the_prompt_has_it(
    sdk: openai.OpenAI, prompt: str | list[str]
) -> None:
    style: Any = {"temperature": 1.3, "seed": 15, "max_tokens": 200, "extra_body": {"response_format": FORMAT}}
    answer = sdk.completions.create(model="demo", prompt=prompt, **style)
    assert len(answer.choices) == (1 if isinstance(prompt, str) else 2)
    assert all(choice.finish_reason == "stop" and is_person(choice.text) for choice in answer.choices)
    chunks = sdk.completions.create(model="demo", prompt="One person: ", stream=True, **style)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["yes", "no", "it may be"]}, "yes|no|it may be"),
        ({"regex": "[0-9]{3}-[a-c]{2,4}"}, "[0-9]{3}-[a-c]{2,4}"),
        ({"grammar": 'start: "(" start ")" | /[xy]{1,3}/'}, r"\(*[xy]{1,3}\)*"),
        ({"json": {"enum": ["a", 5]}}, '"a"|5'),
        ({"json": json.dumps({"type": "integer", "maximum": 9, "minimum": 0})}, "[0-9]"),
    ],
)
def test_given_structured_outputs_when_answered_then_chats_and_completions_follow_them(
    server: RunningServer, outputs: dict[str, Any], pattern: str
) -> None:
    body = {"structured_outputs": outputs, "temperature": 1.5, "seed": 3, "n": 4, "max_tokens": 60}
    with server.http() as http:
        chat = http.post(CHAT, json={**body, "messages": QUESTION}).json()["choices"]
        text = http.post(TEXT, json={**body, "prompt": ["Is it so?", "One, two"]}).json()["choices"]
    said = [choice["message"]["content"] for choice in chat] + [choice["text"] for choice in text]
    assert len(said) == 12
    for answer, choice in zip(said, [*chat, *text], strict=True):
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, answer), answer


CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
CITIES = CITY | {"additionalProperties": False, "$defs": {"City": {"enum": ["Paris", "Oslo"]}}}
SUMS = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
SUMS |= {"additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITIES}},
    {"type": "function", "function": {"name": "add", "parameters": SUMS}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "add"}}


def is_call(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "get_weather":
        return value in ({"city": "Paris"}, {"city": "Oslo"})
    return isinstance(value, dict) and (name == "stop" or (name == "add" and list(value) == ["a"]))


@pytest.mark.parametrize("choice", ["required", NAMED, {"function": NAMED["function"]}], ids=["any", "named", "TGI's"])
def test_given_a_call_that_is_demanded_when_answered_then_there_is_one_whose_arguments_follow_its_schema(
    sdk: openai.OpenAI, choice: Any
) -> None:
    options: Any = {"response_format": None, "tools": TOOLS, "tool_choice": choice, "temperature": 1.2}
    options |= {"messages": [{"role": "user", "content": "Hello!"}]}
    whole = 0
    for seed in range(5):
        answer = ask(sdk, **options, seed=seed).choices[0]
        if answer.finish_reason == "length":  # an argument that may be anything
            continue
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
        assert calls
        assert all(is_call(*call) for call in calls), calls
        if choice != "required":
            assert [name for name, _ in calls] == ["add"]
        told = [""] * len(calls)
        for chunk in ask(sdk, **options, seed=seed, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                told[call.index] += call.function.arguments
        assert told == [arguments for _, arguments in calls]
        whole += 1
    assert whole > 1


def test_given_a_demanded_call_that_cannot_be_when_sent_then_400_names_the_field(sdk: openai.OpenAI) -> None:
    def tool(parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    other = {"$defs": {"City": {"type": "string"}}}
    for tools, choice, param in (
        ([], "required", "tool_choice"),
        (TOOLS, "any", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "unknown"}}, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {**NAMED, "type": "custom"}, "tool_choice"),
        ([tool({"not": {}})], "required", "tools"),
        ([tool({"properties": {"a": {"$ref": "#"}}})], "required", "tools"),
        ([tool(5)], "required", "tools"),
        ([*TOOLS, tool(other)], "required", "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(sdk, response_format=None, tools=tools, tool_choice=choice, max_completion_tokens=5)
        assert caught.value.param == param, (tools, choice)


def test_given_a_demanded_call_and_a_form_when_sent_then_both_are_looked_at_and_the_call_comes_unless_all_has_a_form(
    sdk: openai.OpenAI,
) -> None:
    for options, param in (
        ({"response_format": None, "extra_body": {"structured_outputs": {"regex": "a"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": FORMAT, "tool_choice": "any"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(sdk, **{"tools": TOOLS, "tool_choice": "required", **options})
        assert caught.value.param == param, options
    ask(sdk, tools=TOOLS, tool_choice=NAMED, response_format={"type": "text"}, max_completion_tokens=2)
    for form in (FORMAT, {"type": "json_object"}):
        choice = ask(sdk, tools=TOOLS, tool_choice=NAMED, response_format=form).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in choice.message.tool_calls] == ["add"]


def test_given_tools_and_a_form_when_answered_then_each_answer_is_calls_or_has_the_form(sdk: openai.OpenAI) -> None:
    sums: list[Any] = [{"role": "user", "content": "What is 23 plus 45?"}]
    seen = set()
    for seed, messages in enumerate([QUESTION, sums] * 4):
        for is_parallel in (True, False):
            options: Any = {"tools": TOOLS, "parallel_tool_calls": is_parallel, "temperature": 1.5, "seed": seed}
            choice = ask(sdk, messages=messages, **options).choices[0]
            message = choice.message
            if choice.finish_reason == "length":  # an argument that may be anything
                continue
            seen.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                assert (is_person(message.content), message.tool_calls) == (True, None)
            else:
                assert (choice.finish_reason, message.content) == ("tool_calls", None)
                calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
                assert all(name in ("get_weather", "add", "stop") for name, _ in calls)
                assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
                assert is_parallel or len(calls) == 1
            text, end = streamed(sdk, messages=messages, **options)
            assert (text, end) == (message.content or "", choice.finish_reason)
    assert seen == {"stop", "tool_calls"}


def test_given_rules_that_leave_no_token_when_asked_for_then_it_is_the_clients_error_and_others_do_not_notice(
    server: RunningServer, sdk: openai.OpenAI
) -> None:
    alone = streamed(sdk, temperature=1.0, seed=21)
    with server.http() as http:
        ids = http.post("/tokenize", json={"prompt": "ye"}).json()["tokens"]
        body = {"messages": QUESTION, "structured_outputs": {"choice": ["yes"]}, "max_tokens": 9, "stream": True}
        before = ended(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(streamed, sdk, temperature=1.0, seed=21)
            whole = http.post(CHAT, json={**body, "stream": False, "allowed_token_ids": [5]})
            early = http.post(CHAT, json={**body, "allowed_token_ids": [5]})
            late = http.post(CHAT, json={**body, "allowed_token_ids": ids})  # a token fits, then none does
            assert running.result() == alone
    for answer in (whole, early):
        assert answer.status_code == 400
        assert "leave no token" in answer.json()["error"]["message"]
    assert late.status_code == 200
    events = [line.removeprefix("data: ") for line in late.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["type"] == "invalid_request_error"
    server.wait_until_nothing_is_held()
    found = ended(server)
    assert found["refused"] - before["refused"] == 3
    assert found["failed"] == before["failed"]


def ended(server: RunningServer) -> dict[str, float]:
    """How many generations, by outcome."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(r'^novainfer_requests_ended_total{.*outcome="(\w+)".*} (\S+)$', text, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found}


def test_given_refusals_beside_a_stream_when_they_come_then_it_does_not_notice(
    server: RunningServer, sdk: openai.OpenAI
) -> None:
    alone = streamed(sdk, temperature=1.0, seed=21)
    with ThreadPoolExecutor(1) as pool:
        running = [pool.submit(streamed, sdk, temperature=1.0, seed=21) for _ in range(3)]
        for schema, words in (
            ({"type": "strang"}, "Invalid type"),
            ({"not": {}}, "Unimplemented"),
            (HOSTILE, "too dear"),
        ):
            about = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                ask(sdk, response_format=about)
            assert caught.value.param == "response_format"
        with pytest.raises(openai.BadRequestError, match="min_tokens") as caught:
            ask(sdk, extra_body={"min_tokens": 5})
        assert caught.value.param == "min_tokens"
        assert [future.result() for future in running] == [alone] * 3
    server.wait_until_nothing_is_held()
