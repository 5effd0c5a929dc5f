"""`/v1/responses` both ways: a request as the chat that says the same, deltas of a choice as items and events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.response_chat import as_chat
from gateway.response_echo import MAX_ECHO
from gateway.response_output import CANCELLED, COMPLETED, INCOMPLETE, ResponseOutput
from gateway.routes.chat import chat_job
from gateway.schemas import ChatRequest, ResponseRequest, parse
from gateway.slices import Written
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.call_object import CallDelta
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.parts import PartsParser, Telling
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_thinker
from tests.thinker import CALL, OTHER, TEXT

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "hi"}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":  1}', "status": "x"}
CALLED_TOO = {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "no JSON"}
GAVE = {"type": "function_call_output", "call_id": "c1", "output": "72"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID: dict[str, Any] = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}],
}  # fmt: skip
F = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
G = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "no JSON"}}
TOOL = {"role": "tool", "content": "72", "tool_call_id": "c1"}
WELL = SAID["content"]


def assistant(content: Any = None, *calls: Any, thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": list(calls)} if calls else {})


def chat_of(body: dict[str, Any]) -> ChatRequest:
    return as_chat(parse(ResponseRequest, body, strict_params=True)[0])[0]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{**USER, "type": "message"}], [USER]),
        ([{"role": "developer", "content": [{"type": "input_text", "text": "hi"}]}], None),
        ([USER, SAID, USER], [USER, assistant(WELL), USER]),
        ([USER, THOUGHT, SAID, USER], [USER, assistant(WELL, thought="hm"), USER]),
        ([USER, THOUGHT, SAID, CALLED, GAVE], [USER, assistant(WELL, F, thought="hm"), TOOL]),
        ([USER, THOUGHT, CALLED, CALLED_TOO, GAVE], [USER, assistant(None, F, G, thought="hm"), TOOL]),
        ([USER, CALLED, GAVE, CALLED_TOO, SAID], [USER, assistant(None, F), TOOL, assistant(WELL, G)]),
        ([USER, CALLED, SAID, CALLED_TOO, GAVE], [USER, assistant(WELL, F, G), TOOL]),
        ([USER, SAID, SAID], [USER, assistant(WELL), assistant(WELL)]),
        ([USER, CALLED, THOUGHT, SAID], [USER, assistant(None, F), assistant(WELL, thought="hm")]),
        ([USER, THOUGHT, USER], [USER, USER]),
        ([THOUGHT, THOUGHT, SAID], [assistant(WELL, thought="hm\nhm")]),
        ([USER, {**THOUGHT, "content": None, "encrypted_content": "x"}, SAID], [USER, assistant(WELL)]),
        ([USER, {**GAVE, "output": [{"type": "input_text", "text": "72"}]}], None),
    ],
)
def test_given_items_when_made_messages_then_an_assistants_turn_is_one(items: Any, messages: Any) -> None:
    found = chat_of({"input": items}).messages
    assert found == messages or messages is None
    chat_job(chat_of({"input": items}), 0)
    with_instructions = chat_of({"input": items, "instructions": "be"})
    assert with_instructions.messages == [{"role": "system", "content": "be"}, *found]


FLAT = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
NESTED = {"type": "function", "function": {key: value for key, value in FLAT.items() if key != "type"}}
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "of_chat"),
    [
        (
            {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
            {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
        ({"tools": [FLAT], "tool_choice": "required"}, {"tools": [NESTED], "tool_choice": "required"}),
        (
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [NESTED],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
        ({"text": {}}, {}),
        (
            {"text": {"format": {"type": "json_object"}, "verbosity": None}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_object", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        ),
        (
            {"text": {"format": {"type": "json_schema", **SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"summary": "concise", "generate_summary": "detailed"}}, {}),
        ({"text": {"verbosity": "medium"}}, {}),
        ({"tools": [{**FLAT, "defer_loading": False}]}, {"tools": [NESTED]}),
        ({"modalities": ["text"], "prompt_cache_retention": "24h"}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, {"stream": True}),
        ({"metadata": {"a": "b"}, "store": True, "truncation": "disabled", "service_tier": "auto"}, {}),
        ({"background": False, "safety_identifier": "x", "prompt_cache_key": "y", "user": "z"}, {"user": "z"}),
        ({"seed": 5, "top_k": 3, "min_p": 0.1, "ignore_eos": True, "priority": -1, "stop": ["x"]}, None),
        ({"logit_bias": {"1": 2}, "bad_words": ["a"], "cache_salt": "s", "structured_outputs": {"regex": "a"}}, None),
        ({"chat_template_kwargs": {"thinks": True}, "documents": [{}], "skip_special_tokens": False}, None),
        ({"add_generation_prompt": False, "include_reasoning": False, "separate_reasoning": False}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
    ],
)
def test_given_a_request_when_made_a_chat_then_it_is_the_one_that_says_the_same(
    fields: dict[str, Any], of_chat: dict[str, Any] | None
) -> None:
    wanted, _ = parse(ChatRequest, {"messages": [USER], **(fields if of_chat is None else of_chat)}, strict_params=True)
    found = chat_of({"model": "m", "input": "hi", **fields})
    assert found.model == "m"
    assert found.model_dump(exclude={"model"}) == wanted.model_dump(exclude={"model"})
    assert chat_job(found, 100) == chat_job(wanted, 100)
    assert ("skip_special_tokens" in found.model_fields_set) == ("skip_special_tokens" in fields)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "a list of 1 to 8192 objects"),
        ({"input": 5}, "input", "a string or a list of"),
        ({"input": [5]}, "input", "a string or a list of"),
        ({"input": [THOUGHT]}, "input", "nothing but reasoning"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type"),
        ({"input": [USER, {"type": "computer_call"}]}, "input", "input[1].type"),
        ({"input": [{"type": []}]}, "input", "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input", "input[0].role"),
        ({"input": [USER, {"role": "user"}]}, "input", "input[1].content"),
        ({"input": [USER, {"role": "user", "content": ["x"]}]}, "input", "input[1].content"),
        ({"input": [{**CALLED, "arguments": {}}]}, "input", "input[0].arguments"),
        ({"input": [{**CALLED, "name": None}]}, "input", "input[0].name"),
        ({"input": [{**GAVE, "call_id": 5}]}, "input", "input[0].call_id"),
        ({"input": [{**GAVE, "output": None}]}, "input", "input[0].output"),
        ({"input": [{**THOUGHT, "content": "hm"}, SAID]}, "input", "input[0].content"),
        ({"input": [{**THOUGHT, "content": [{"type": "text", "text": "x"}]}, SAID]}, "input", "input[0].content"),
        ({"input": [USER] * 8192, "instructions": "x"}, "input", "8192"),
        ({"tools": [NESTED]}, "tools", "tools[0].name"),
        ({"tools": [FLAT, {"type": "web_search"}]}, "tools", "tools[1].type must be 'function'"),
        ({"tools": [{"name": "f"}]}, "tools", "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "the type 'function'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "and a name"),
        ({"text": {"format": "json"}}, "text", "text.format"),
        ({"reasoning": {"summary": "long"}}, "reasoning", "reasoning.summary"),
        ({"reasoning": {"effort": 5}}, "reasoning", "reasoning.effort"),
        ({"reasoning": {"effort": "x" * 65}}, "reasoning", "at most 64 characters"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"include": ["file_search_call.results"]}, "include", "message.output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
        ({"background": True}, "background", "Only background false can"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no conversations"),
        ({"conversation": {"id": "x"}}, "conversation", "keeps no conversations"),
        ({"prompt": {"id": "x"}}, "prompt", "keeps no conversations"),
        ({"metadata": {"a": 5}}, "metadata", "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
        ({"max_tokens": 5}, "max_tokens", "not supported"),
        ({"messages": [USER]}, "messages", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"receipt": True}, "receipt", "not supported"),
        ({"stream": True, "stream_options": {"include_event_ids": True}}, "stream_options", "must be false"),
    ],
)
def test_given_what_cannot_be_answered_when_made_a_chat_then_the_error_names_the_field_that_came(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_chat(parse(ResponseRequest, {"input": "hi", **fields}, strict_params=False)[0])
    assert caught.value.param == param
    assert words in caught.value.message
    assert "messages" not in caught.value.message or param == "messages"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input": [{**USER, "x": 1}]}, "input[0].x"),
        ({"input": [{**SAID, "content": [{**WELL[0], "x": 1}]}]}, "input[0].content[0].x"),
        ({"tools": [{**FLAT, "x": 1}]}, "tools[0].x"),
        ({"text": {"x": 1}}, "text.x"),
        ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ({"reasoning": {"x": 1}}, "reasoning.x"),
        ({"tools": [{**FLAT, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"x": 1}, "x"),
    ],
)
def test_given_strict_params_when_a_field_is_unknown_then_it_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(ResponseRequest, {"input": "hi", **fields}, strict_params=True)
    assert (caught.value.param, caught.value.code) == (where, "unknown_parameter")
    _, ignored = parse(ResponseRequest, {"input": "hi", **fields}, strict_params=False)
    assert ignored == (["x"] if where == "x" else [])


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"text": {"verbosity": 5}, "service_tier": "flex", "x": 1}, ["text.verbosity", "service_tier", "x"]),
        ({"text": {"verbosity": "medium"}, "service_tier": "default"}, []),
        ({"text": {"verbosity": None}, "service_tier": None}, []),
    ],
)
def test_given_what_has_no_effect_when_parsed_then_it_is_named_or_refused(
    fields: dict[str, Any], ignored: list[str]
) -> None:
    request, found = parse(ResponseRequest, {"input": "hi", **fields}, strict_params=False)
    assert found == ignored
    as_chat(request)
    if ignored:
        with pytest.raises(InvalidRequestError) as caught:
            parse(ResponseRequest, {"input": "hi", **fields}, strict_params=True)
        assert (caught.value.param, caught.value.code) == (ignored[0], "unknown_parameter")
    else:
        parse(ResponseRequest, {"input": "hi", **fields}, strict_params=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "text"}}]}, "tools[0].type must be 'function'"),
        ({"input": [{"type": "computer_call", "action": {}}]}, "input[0].type must be one of"),
        ({"input": [{"type": ["message"], "action": {}}]}, "input[0].type must be one of"),
    ],
)
def test_given_strict_params_when_a_type_is_not_known_then_that_is_said_before_its_fields(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_of({"input": "hi", **fields})
    assert words in caught.value.message


def test_given_strict_params_when_an_answer_that_the_sdk_parsed_is_sent_back_then_it_is_known() -> None:
    said = {**SAID, "content": [{**WELL[0], "parsed": {"a": [1]}}]}
    messages = chat_of({"input": [USER, said, {**CALLED, "parsed_arguments": {"a": 1}}, GAVE]}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"] == [F]
    chat_job(chat_of({"input": [USER, said]}), 0)


def echo_text(**fields: Any) -> dict[str, Any]:
    """What an answer repeats."""
    _, echo = as_chat(parse(ResponseRequest, {"input": "hi", **fields}, strict_params=False)[0])
    assert len(echo.data) <= MAX_ECHO
    found: dict[str, Any] = json.loads("{" + echo.text + "}")
    return found


NAMED = {"type": "function", "name": "f"}
LONG: Any = {"type": "json_schema", "name": "n", "schema": {"x": "y" * MAX_ECHO}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{**FLAT, "description": "x" * 2**21}]},
        {"tools": [{**FLAT, "parameters": {"enum": [1] * 2**20}}]},
        {"instructions": "x" * MAX_ECHO},
        {"instructions": "\u2028" * (MAX_ECHO // 4)},
        {"instructions": "\0" * (MAX_ECHO // 4)},
        {"text": {"format": LONG}},
        {"user": "x" * MAX_ECHO},
        {"tools": [{**FLAT, "name": "x" * MAX_ECHO}], "tool_choice": {**NAMED, "name": "x" * MAX_ECHO}},
    ],
)
def test_given_more_than_an_answer_repeats_when_asked_then_it_is_left_out(fields: dict[str, Any]) -> None:
    full = {"tools": [FLAT], "instructions": "be", "text": {"format": {"type": "json_object"}}, "user": "u"}
    named = {"metadata": {"a": "b"}, "reasoning": {"effort": "low", "summary": "detailed"}}
    told = echo_text(**{**full, **named, **fields})
    form = {"type": "json_schema", "name": "n"} if "text" in fields else {"type": "json_object"}
    assert (told["instructions"], told["tools"], told["text"]) == (None, [], {"format": form})
    assert told["user"] == (None if "user" in fields else "u")
    assert told["tool_choice"] == ("required" if "tool_choice" in fields else "auto")
    assert {name: told[name] for name in named} == named


def test_given_what_fits_when_asked_then_an_answer_repeats_it_all_and_of_a_choice_what_was_looked_at() -> None:
    long = {**FLAT, "description": "x" * (MAX_ECHO - 2000)}
    told = echo_text(tools=[long], tool_choice={**NAMED, "j": "x" * 7_500_000}, text={"format": LONG | {"schema": {}}})
    assert (told["tools"], told["tool_choice"]) == ([long], NAMED)
    assert told["text"] == {"format": LONG | {"schema": {}}}


@pytest.mark.parametrize(
    ("part", "role", "words"),
    [
        ({"type": "output_text", "text": "x"}, "user", "has parts of the types text, input_text, not output_text"),
        ({"type": "input_text", "text": "x"}, "assistant", "text, output_text, refusal, not input_text"),
        ({"type": "input_text"}, "user", "must have its text"),
        ({"type": "input_image"}, "user", "only text is supported"),
    ],
)
def test_given_a_part_of_the_wrong_kind_when_rendered_then_it_is_said_which_there_are(
    part: dict[str, Any], role: str, words: str
) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": role, "content": [part]}])
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (("messages[0].content: no", "messages"), "instructions: no", "input"),
        (("messages[4].content: no", "messages"), "input[5].output: no", "input"),
        (("messages[3].content: no", "messages"), "input[4].content: no", "input"),
        (("messages[2].content: no", "messages"), "input[2].content: no", "input"),
        (("messages[1].content: no", "messages"), "input[0].content: no", "input"),
        (("messages[2].tool_calls must be", "messages"), "input[1].tool_calls must be", "input"),
        (("messages[9].content: no", "messages"), "input[9].content: no", "input"),
        (("max_tokens must be between 1 and 2.", "max_tokens"), "max_output_tokens must be between 1 and 2.", None),
        (("response_format.json_schema.name must", "response_format"), "text.format.name must", "text"),
        (("response_format.type must", "response_format"), "text.format.type must", "text"),
        (
            ("structured_outputs cannot be combined with response_format.", "structured_outputs"),
            "structured_outputs cannot be combined with text.format.",
            "structured_outputs",
        ),
        (
            ("min_tokens must not be above max_tokens.", "min_tokens"),
            "min_tokens must not be above max_output_tokens.",
            "min_tokens",
        ),
        (
            ("A tool_choice that demands a call cannot be combined with structured_outputs.", "tool_choice"),
            "A tool_choice that demands a call cannot be combined with structured_outputs.",
            "tool_choice",
        ),
        (("No.", None), "No.", ""),
    ],
)
def test_given_an_error_of_the_chat_when_told_then_it_is_one_of_the_request_that_came(
    error: tuple[str, str | None], message: str | None, param: str | None
) -> None:
    request = {"input": [USER, CALLED, SAID, THOUGHT, SAID, GAVE], "instructions": "be"}
    _, echo = as_chat(parse(ResponseRequest, request, strict_params=True)[0])
    places = [echo.places.of_message(number) for number in range(len(echo.places))]
    assert places == ["instructions", *(f"input[{number}]" for number in (0, 1, 4, 5))]
    told = echo.in_words(InvalidRequestError(error[0], param=error[1], code="c"))
    assert told.code == "c"
    assert told.message == (message or error[0])
    wanted = {None: "max_output_tokens" if error[1] == "max_tokens" else error[1], "": None}.get(param, param)
    assert told.param == wanted


class Heard:
    """Reads events as a client does."""

    def __init__(self, output_of: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.output: ResponseOutput = output_of(self._take)

    def _take(self, name: str, fields: Written) -> None:
        self.events.append((name, json.loads("{" + "".join(fields) + "}")))

    def items(self) -> list[dict[str, Any]]:
        """What the events say: parts joined; each `done` must say the same."""
        items: list[dict[str, Any]] = []
        done: dict[int, dict[str, Any]] = {}
        grown: dict[int, str] = {}
        for name, fields in self.events:
            place = fields["output_index"]
            if name == "output_item.added":
                assert place == len(items)
                items.append(fields["item"])
            elif name == "output_item.done":
                done[place] = fields["item"]
            else:
                assert fields["item_id"] == items[place]["id"]
                if name.endswith(".delta"):
                    assert place not in done
                    grown[place] = grown.get(place, "") + fields["delta"]
                elif name in ("output_text.done", "reasoning_text.done"):
                    assert fields["text"] == grown.get(place, "")
                elif name == "function_call_arguments.done":
                    assert fields["arguments"] == grown.get(place, "")
        assert sorted(done) == list(range(len(items)))
        return [done[place] for place in sorted(done)]


def deltas_of(text: str, cuts: list[int]) -> list[ChoiceDelta]:
    """Of a text that comes character by character, told so many at once as `cuts` says."""
    parser, found = PartsParser(Telling("hermes", "think")), [ChoiceDelta(0)]
    places = {sum(cuts[: number + 1]) for number in range(len(cuts))}
    for number, char in enumerate([*text, ""]):
        parts = parser.feed(char) if char else parser.flush()
        last = found[-1]
        is_begun = any(call.name is not None for call in parts.calls)
        last.call_places += [len(last.text) + is_begun * len(parts.content)] * len(parts.calls)
        last.num_ended = parser.num_ended
        last.text, last.reasoning, last.calls = (
            last.text + parts.content,
            last.reasoning + parts.reasoning,
            last.calls + parts.calls,
        )
        if number in places:
            found.append(ChoiceDelta(0))
    return found


def output_of(tell: Any = None) -> ResponseOutput:
    return ResponseOutput("1", lambda index: f"call_{index}", tell=tell)


TEXTS = (
    TEXT,
    CALL,
    f"{CALL}words",
    f"a{CALL}b{OTHER}c",
    f"{CALL}b{OTHER}c",
    CALL[: CALL.index("}")],
    "<think>\nhm</think>",
    "",
    "words",
    f"<think>x</think>{CALL}y",
)


@given(
    st.sampled_from(TEXTS), st.lists(st.integers(1, 60), max_size=8), st.sampled_from(["stop", "length", "cancelled"])
)
def test_given_any_cuts_when_told_then_events_and_the_whole_are_the_same_and_depend_on_the_text_alone(
    text: str, cuts: list[int], reason: str
) -> None:
    whole, alone, heard = output_of(), output_of(), Heard(output_of)
    for delta in deltas_of(text, cuts):
        whole.feed(delta)
        heard.output.feed(delta)
    for delta in deltas_of(text, [1] * len(text)):
        alone.feed(delta)
    statuses = {output.end(reason) for output in (whole, alone, heard.output)}
    assert statuses == {{"stop": COMPLETED, "length": INCOMPLETE, "cancelled": CANCELLED}[reason]}
    items = json.loads("".join(whole.write()))
    assert items == json.loads("".join(alone.write())) == heard.items() == json.loads("".join(heard.output.write()))
    said = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    assert said == "".join(delta.text for delta in deltas_of(text, []))
    assert sum(item["type"] == "message" for item in items) <= 1


@pytest.mark.parametrize(
    ("text", "reason", "items"),
    [
        ("", "stop", [("message", COMPLETED)]),
        ("", "length", []),
        ("<think>\nhm", "length", [("reasoning", INCOMPLETE)]),
        ("<think>\nhm</think>", "stop", [("reasoning", COMPLETED), ("message", COMPLETED)]),
        ("words", "length", [("message", INCOMPLETE)]),
        (CALL, "stop", [("function_call", COMPLETED)]),
        (f"{CALL}words", "stop", [("function_call", COMPLETED), ("message", COMPLETED)]),
        (CALL + OTHER, "length", [("function_call", COMPLETED), ("function_call", COMPLETED)]),
        (f"{CALL}words", "length", [("function_call", COMPLETED), ("message", INCOMPLETE)]),
        (OTHER + CALL[: CALL.index("}")], "length", [("function_call", COMPLETED), ("function_call", INCOMPLETE)]),
        (
            f"<think>a</think>b{CALL[: CALL.index('}')]}",
            "length",
            [("reasoning", COMPLETED), ("message", INCOMPLETE), ("function_call", INCOMPLETE)],
        ),
    ],
)
def test_given_an_end_when_told_then_what_was_open_is_incomplete(
    text: str, reason: str, items: list[tuple[str, str]]
) -> None:
    output = output_of()
    for delta in deltas_of(text, []):
        output.feed(delta)
    output.end(reason)
    assert [(item["type"], item["status"]) for item in json.loads("".join(output.write()))] == items


@pytest.mark.parametrize("text", [f"{CALL}words", CALL + OTHER, f"a{CALL}b{OTHER}"])
def test_given_a_call_that_is_whole_when_told_then_its_last_events_come_at_once(text: str) -> None:
    heard = Heard(output_of)
    told: list[str] = []
    for delta in deltas_of(text, [1] * len(text)):
        heard.output.feed(delta)
        kinds = [name for name, fields in heard.events if fields.get("item", {}).get("type") == "function_call"]
        if not told and "output_item.added" in kinds:
            told = kinds
        if delta.num_ended:
            break
    assert told == ["output_item.added"]
    assert kinds == ["output_item.added", "output_item.done"]
    assert heard.events[-2][0] == "function_call_arguments.done"
    assert heard.events[-1][1]["item"]["status"] == COMPLETED


def test_given_a_call_and_words_in_one_delta_when_told_then_they_stand_as_they_came() -> None:
    both = ChoiceDelta(0, text="b", calls=[CallDelta(0, "f", "{}")], call_places=[1])
    for delta, kinds in (
        (both, ["message", "function_call"]),
        (replace(both, call_places=[0]), ["function_call", "message"]),
    ):
        output = output_of()
        output.feed(delta)
        output.end("tool_calls")
        assert [item["type"] for item in json.loads("".join(output.write()))] == kinds


@pytest.mark.parametrize("are_special", [False, True])
def test_given_tokens_when_many_come_at_once_then_items_stand_as_if_each_came_alone(
    tmp_path: Path, are_special: bool
) -> None:
    tokenizer = Tokenizer.load(write_thinker(tmp_path, are_special=are_special))
    for text in TEXTS:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
        found = []
        for at_once in (1, 2, 7, len(ids)):
            telling = Telling("hermes", "think")
            choice = ChoiceOutput(tokenizer, SamplingParams(max_tokens=500), telling=telling)
            output = output_of()
            for first in range(0, len(ids), at_once):
                some = ids[first : first + at_once]
                ends: Any = {"finish_reason": "stop", "stop_token_id": ids[-1]} if first + at_once >= len(ids) else {}
                output.feed(choice.push(TokenOutput("r", 0, first, some, **ends)))
            output.end("stop")
            found.append(json.loads("".join(output.write())))
        assert all(items == found[0] for items in found), text
