"""`/v1/messages` both ways: a request as the chat that says the same, deltas of a choice as blocks and events."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.message_blocks import BlockEvents, WholeBlocks
from gateway.message_chat import Words, as_chat, as_prompt
from gateway.message_events import MessageChunks
from gateway.message_schemas import CountTokensRequest, MessagesRequest
from gateway.routes.chat import chat_job
from gateway.schemas import ChatRequest, parse
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.call_object import CallDelta
from novainfer.text.parts import PartsParser, Telling
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_thinker
from tests.messages import events_of, message_of, without_ids
from tests.thinker import CALL, OTHER, TEXT
from tests.unit.test_unit_poured_tokens import PROMPT, Server, settle

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "hi"}
WORDS = {"type": "text", "text": "well", "cache_control": {"type": "ephemeral"}, "citations": None}
WELL = {"type": "text", "text": "well"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
SECRET = {"type": "redacted_thinking", "data": "x"}
CALLED = {"type": "tool_use", "id": "toolu_c1", "name": "f", "input": {"a": 1}}
BROKEN = {"type": "tool_use", "id": "c2", "name": "g", "input": {"INVALID_JSON": "no JSON"}}
GAVE = {"type": "tool_result", "tool_use_id": "toolu_c1", "content": "72"}
F = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
G = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "no JSON"}}
TOOL = {"role": "tool", "content": [{"type": "text", "text": "72"}], "tool_call_id": "c1"}
CUSTOM = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def assistant(content: Any, *calls: Any, thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": list(calls)} if calls else {})


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def asked(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def parsed(body: dict[str, Any]) -> MessagesRequest:
    return parse(MessagesRequest, {"max_tokens": 5, "messages": [USER], **body}, strict_params=True)[0]


def chat_of(body: dict[str, Any]) -> ChatRequest:
    return as_chat(parsed(body))[0]


@pytest.mark.parametrize(
    ("given_messages", "messages"),
    [
        ([USER], [USER]),
        ([asked(WORDS, WORDS)], [{"role": "user", "content": [WELL, WELL]}]),
        ([USER, said(WORDS), USER], [USER, assistant([WELL]), USER]),
        ([USER, said(), USER], [USER, assistant(""), USER]),
        ([USER, said(THOUGHT, SECRET, WORDS), USER], [USER, assistant([WELL], thought="hm"), USER]),
        ([USER, said(THOUGHT, THOUGHT, CALLED), asked(GAVE)], [USER, assistant(None, F, thought="hm\nhm"), TOOL]),
        ([USER, said(WORDS, CALLED, BROKEN), asked(GAVE)], [USER, assistant([WELL], F, G), TOOL]),
        ([USER, said(CALLED, WORDS), asked(GAVE, WORDS)], [USER, assistant([WELL], F), TOOL, asked(WELL)]),
        ([asked(WORDS, GAVE, GAVE, WORDS)], [asked(WELL), TOOL, TOOL, asked(WELL)]),
        ([asked({**GAVE, "content": [WORDS]})], [{**TOOL, "content": [WELL]}]),
        ([asked({**GAVE, "content": None})], [{**TOOL, "content": ""}]),
        ([asked({**GAVE, "content": []})], [{**TOOL, "content": ""}]),
        ([asked({**GAVE, "is_error": False})], [TOOL]),
        (
            [asked({**GAVE, "is_error": True})],
            [{**TOOL, "content": [{"type": "text", "text": "Error:"}, *TOOL["content"]]}],
        ),
    ],
)
def test_given_messages_when_made_a_chats_then_results_are_messages_and_an_answer_is_one(
    given_messages: Any, messages: Any
) -> None:
    request = chat_of({"messages": given_messages})
    assert request.messages == messages
    chat_job(request, 0)
    for system, content in (("be", "be"), ([WORDS], [WELL])):
        found = chat_of({"messages": given_messages, "system": system}).messages
        assert found == [{"role": "system", "content": content}, *messages]
    for nothing in ("", [], None):
        assert chat_of({"messages": given_messages, "system": nothing}).messages == messages


@pytest.mark.parametrize(
    ("fields", "of_chat"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"metadata": {"user_id": None}, "user": "v"}, {"user": "v"}),
        ({"tools": [CUSTOM]}, {"tools": [FUNCTION]}),
        ({"tools": [{**CUSTOM, "type": "custom"}]}, {"tools": [FUNCTION]}),
        ({"tools": [CUSTOM], "tool_choice": {"type": "auto"}}, {"tools": [FUNCTION], "tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "f"}},
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"a": 1, "enable_thinking": True}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA["schema"]}}},
        ),
        (
            {"output_format": SCHEMA},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA["schema"]}}},
        ),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
        ({"context_management": {}, "container": None, "service_tier": "standard_only"}, {}),
        ({"cache_control": {"type": "ephemeral"}, "seed": 3, "min_p": 0.1}, {"seed": 3, "min_p": 0.1}),
        ({"messages": [USER, said(WORDS)]}, {"messages": [USER, said(WELL)], "continue_final_message": True}),
    ],
)
def test_given_fields_when_made_a_chat_then_they_are_its_own(fields: dict[str, Any], of_chat: dict[str, Any]) -> None:
    wanted = parse(ChatRequest, {"max_tokens": 5, "messages": [USER], **of_chat}, strict_params=True)[0]
    assert chat_of(fields).model_dump() == wanted.model_dump()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing."),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content must be a string, or a list of blocks."),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content must be a string, or a list of blocks.",
        ),
        ({"messages": [asked()]}, "messages[0].content must have a block."),
        (
            {"messages": [asked({"type": "image", "source": {}})]},
            "messages[0].content[0]: blocks of the type image are",
        ),
        ({"messages": [asked({"type": "document"})]}, "messages[0].content[0]: blocks of the type document are"),
        ({"messages": [asked(CALLED)]}, "messages[0].content[0].type must be one of text, tool_result here."),
        ({"messages": [USER, said(GAVE)]}, "messages[1].content[0].type must be one of text, tool_use, thinking, red"),
        ({"messages": [asked(WORDS, {"type": "text"})]}, "messages[0].content[1].text must be a string."),
        ({"messages": [asked({**GAVE, "tool_use_id": 5})]}, "messages[0].content[0].tool_use_id must be a string."),
        ({"messages": [asked({**GAVE, "is_error": "x"})]}, "messages[0].content[0].is_error must be true or false."),
        ({"messages": [asked({**GAVE, "content": 5})]}, "messages[0].content[0].content must be a string, or a list"),
        ({"messages": [asked({**GAVE, "content": [{"type": "image"}]})]}, "messages[0].content[0].content[0]: blocks"),
        (
            {"messages": [USER, said({**CALLED, "input": "{}"}), USER]},
            "messages[1].content[0].input must be an object.",
        ),
        ({"messages": [USER, said({**THOUGHT, "thinking": 5})]}, "messages[1].content[0].thinking must be a string."),
        ({"messages": [USER, said(CALLED)]}, "messages: the last one is the beginning of the answer"),
        ({"system": [5]}, "Invalid value for system: it is a string or a list of objects."),
        ({"system": [{"type": "image"}]}, "system[0]: blocks of the type image are not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be an object."),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name must be a text."),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0].type must be 'custom'"),
        ({"tools": [{**CUSTOM, "description": 5}]}, "tools[0].description must be a string."),
        ({"tool_choice": "auto"}, "Invalid value for tool_choice: Input should be a valid dictionary"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type must be one of auto, any, none and tool"),
        ({"tool_choice": {"type": []}}, "tool_choice.type must be one of"),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use must",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type must be one of enabled, disabled, adaptive, auto."),
        (
            {"thinking": {"type": "enabled"}, "think": False},
            "thinking is another name of chat_template_kwargs.enable_th",
        ),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop is another name of stop_sequences"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id must be a string."),
        ({"output_config": {"effort": 5}}, "output_config.effort must be a text of at most 64 characters."),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must have the type json_schema"),
        ({"output_format": {"type": "json_schema"}}, "output_format must have the type json_schema"),
        ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "output_format cannot be combined"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: the server"),
        ({"context_management": {"edits": 5}}, "context_management: the server leaves nothing out"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported yet."),
        ({"container": "x"}, "container is not supported yet."),
        ({"n": 2}, "n is not supported yet."),
        ({"max_new_tokens": 5}, "max_new_tokens is not supported yet."),
        ({"system": [{**WORDS, "x": 1}]}, "Unknown field: system[0].x."),
        ({"messages": [{**USER, "name": "x"}]}, "Unknown field: messages[0].name."),
        (
            {"messages": [asked({**GAVE, "content": [{**WORDS, "x": 1}]})]},
            "Unknown field: messages[0].content[0].conte",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "Unknown field: thinking.budget_tokens."),
        ({"service_tier": "priority"}, "Unknown field: service_tier."),
        ({"inference_geo": "us"}, "Unknown field: inference_geo."),
    ],
)
def test_given_what_cannot_be_followed_when_made_a_chat_then_it_is_refused_in_words_of_the_request(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_of(fields)
    assert caught.value.message.startswith(words)
    assert words.startswith(("Invalid", "Unknown", caught.value.param or "?"))


@pytest.mark.parametrize("budget", [0, -1, True, "5", 1.5])
def test_given_a_budget_when_it_is_no_number_of_tokens_then_it_is_refused_else_only_named(budget: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": [USER]}
    thinking = {"type": "enabled", "budget_tokens": budget}
    request, _ = parse(MessagesRequest, {**body, "thinking": thinking}, strict_params=False)
    with pytest.raises(InvalidRequestError, match="budget_tokens must be a whole number"):
        as_chat(request)
    thinking["budget_tokens"] = 1024
    request, ignored = parse(MessagesRequest, {**body, "thinking": thinking}, strict_params=False)
    assert ignored == ["thinking.budget_tokens"]
    assert as_chat(request)[0].chat_template_kwargs == {"enable_thinking": True}


def test_given_features_of_others_when_they_are_given_nothing_to_do_then_they_pass() -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": [USER], "mcp_servers": [], "service_tier": "priority"}
    request, ignored = parse(MessagesRequest, body, strict_params=False)
    assert ignored == ["service_tier", "mcp_servers"]
    assert as_chat(request)[0].model_fields_set == {"max_tokens", "messages"}


def test_given_an_error_about_the_chat_when_told_then_it_names_what_the_client_sent() -> None:
    _, words = as_chat(parsed({"messages": [USER, said(CALLED), asked(GAVE, GAVE, WORDS)], "system": "be"}))
    for ours, theirs in (
        ("messages[0].content must be x", "system.content must be x"),
        ("messages[1].content must be x", "messages[0].content must be x"),
        ("messages[4].content must be x", "messages[2].content must be x"),
        ("messages[5].content must be x", "messages[2].content must be x"),
        ("messages[9] is x", "messages[9] is x"),
        ("continue_final_message: there is no final message", "messages: there is no final message"),
        ("stop must hold x", "stop_sequences must hold x"),
        ("response_format.json_schema: x", "output_config.format: x"),
        ("tools: parameters must be x", "tools: input_schema must be x"),
        ("tools: references in parameters must x", "tools: references in input_schema must x"),
    ):
        assert words.of(InvalidRequestError(ours, param="messages")).message == theirs
    assert words.of(InvalidRequestError("x", param="stop")).param == "stop_sequences"


def test_given_one_body_when_only_counted_then_the_prompt_is_the_chats() -> None:
    body: dict[str, Any] = {
        "messages": [USER, said(THOUGHT, CALLED), asked(GAVE), said(WORDS)],
        "system": "be",
        "tools": [CUSTOM],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "chat_template_kwargs": {"a": 1},
    }
    counted = as_prompt(parse(CountTokensRequest, body, strict_params=True)[0])[0]
    for more, is_same in (({}, True), ({"tool_choice": {"type": "none"}}, False)):
        asked_for = chat_of({**body, **more})
        assert (chat_job(counted, 99) == chat_job(asked_for, 99)) == is_same


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
        (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
        (503, "overloaded_error"), (504, "timeout_error"),
    ],
)  # fmt: skip
def test_given_an_error_when_answered_then_the_path_says_in_which_form(status: int, kind: str) -> None:
    error = ApiError(status, "words", "code", "param")
    ours = json.loads(bytes(error.response("/v1/responses").body))
    assert ours["error"].keys() == {"message", "type", "param", "code"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = error.response(path)
        wanted = {"type": "error", "error": {"type": kind, "message": "words"}}
        assert (response.status_code, json.loads(bytes(response.body))) == (status, wanted)
        if status in (429, 503):
            assert error.message_of([], path).endswith(json.dumps(wanted).encode())


TEXTS = [
    TEXT,
    "just words",
    "",
    "<think>\nonly a thought",
    f"{CALL}{OTHER}",
    f"before{CALL}\n\nbetween{OTHER}behind",
    f"<think>a</think>{OTHER}words",
    f"{CALL[:-24]}",
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>after',
    '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "f"}\n</tool_call>\u2028\x85.',
]


def deltas_of(text: str, cuts: list[int]) -> list[ChoiceDelta]:
    """Of a text that comes character by character, told so many at once as `cuts` says."""
    parser, found = PartsParser(Telling("hermes", "think")), [ChoiceDelta(0)]
    places = {sum(cuts[: number + 1]) for number in range(len(cuts))}
    for number, char in enumerate([*text, ""]):
        parts = parser.feed(char) if char else parser.flush()
        last, is_begun = found[-1], False
        for call in parts.calls:
            is_begun = is_begun or call.name is not None
            last.call_places.append(len(last.text) + is_begun * len(parts.content))
        last.num_ended = parser.num_ended
        last.text, last.reasoning, last.calls = (
            last.text + parts.content,
            last.reasoning + parts.reasoning,
            last.calls + parts.calls,
        )
        if number in places:
            found.append(ChoiceDelta(0))
    return found


def id_of(index: int) -> str:
    return f"call_{index}"


def whole_of(deltas: list[ChoiceDelta]) -> list[dict[str, Any]]:
    blocks = WholeBlocks(id_of)
    for delta in deltas:
        blocks.feed(delta)
    found: list[dict[str, Any]] = json.loads(blocks.write())
    return found


def streamed_of(deltas: list[ChoiceDelta]) -> list[dict[str, Any]]:
    blocks = BlockEvents(id_of)
    head = {"stop_reason": None, "stop_sequence": None, "content": [], "usage": {"output_tokens": 0}}
    blocks.tell("message_start", f'"message":{json.dumps(head)}')
    for delta in deltas:
        blocks.feed(delta)
    blocks.close()
    blocks.tell("message_delta", '"delta":{},"usage":{}')
    blocks.tell("message_stop", "")
    text = "".join(blocks.events)
    found: list[dict[str, Any]] = message_of(events_of(text.splitlines()))["content"]
    return found


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 30), max_size=12))
def test_given_any_cut_when_told_then_blocks_are_the_same_whole_and_streamed(text: str, cuts: list[int]) -> None:
    wanted = whole_of(deltas_of(text, [1] * len(text)))
    deltas = deltas_of(text, cuts)
    assert whole_of(deltas) == wanted
    assert streamed_of(deltas) == wanted


@pytest.mark.parametrize("are_special", [False, True])
def test_given_tokens_when_many_come_at_once_then_blocks_stand_as_if_each_came_alone(
    tmp_path: Path, are_special: bool
) -> None:
    tokenizer = Tokenizer.load(write_thinker(tmp_path, are_special=are_special))
    for text in TEXTS:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
        found = []
        for at_once in (1, 2, 7, len(ids)):
            telling = Telling("hermes", "think")
            params = SamplingParams(max_tokens=500, stop=("</tool_call>behi",))
            choice = ChoiceOutput(tokenizer, params, telling=telling)
            deltas = []
            for first in range(0, len(ids), at_once):
                some = ids[first : first + at_once]
                ends: Any = {"finish_reason": "stop", "stop_token_id": ids[-1]} if first + at_once >= len(ids) else {}
                deltas.append(choice.push(TokenOutput("r", 0, first, some, **ends)))
            found += [whole_of(deltas), streamed_of(deltas)]
        assert all(blocks == found[0] for blocks in found), text


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (TEXT, ["thinking", "text", "tool_use", "tool_use"]),
        (f"before{CALL}\n\nbetween{OTHER}behind", ["text", "tool_use", "text", "tool_use", "text"]),
        ("", []),
        ("<think>\nonly", ["thinking"]),
    ],
)
def test_given_a_text_when_told_then_blocks_stand_as_the_model_wrote_them(text: str, kinds: list[str]) -> None:
    blocks = whole_of(deltas_of(text, []))
    assert [block["type"] for block in blocks] == kinds
    names = [(block["id"], block["name"]) for block in blocks if block["type"] == "tool_use"]
    assert names == [("toolu_0", "f"), ("toolu_1", "g")][: len(names)]
    assert without_ids({"content": blocks})["content"] == [
        {key: value for key, value in block.items() if key != "id"} for block in blocks
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "{}"), ('{"b":  1, "a": 1.0e2}', '{"b":  1, "a": 1.0e2}'), ("[1]", '{"INVALID_JSON":"[1]"}'),
        ('{"a": NaN}', '{"INVALID_JSON":"{\\"a\\": NaN}"}'), ('{"a', '{"INVALID_JSON":"{\\"a"}'),
        ('{"a":' * 100_000, None),
    ],
)  # fmt: skip
def test_given_arguments_when_a_whole_answer_tells_them_then_as_the_model_spelled_them_if_they_are_an_object(
    arguments: str, told: str | None
) -> None:
    blocks = WholeBlocks(id_of)
    blocks.feed(ChoiceDelta(0, calls=[CallDelta(0, "f", arguments)], call_places=[0]))
    written = blocks.write()
    wanted = json.dumps({"INVALID_JSON": arguments}, separators=(",", ":")) if told is None else told
    assert written == f'[{{"type":"tool_use","id":"toolu_0","name":"f","input":{wanted}}}]'


class MessageServer(Server):
    """Its stream is a message's."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        request = ChatRequest(messages=[USER], stream=True)
        super().__init__(tokenizer, request, **params)
        record = StreamRecord.of(request, "msg_1", 1, "m", receipt=False)
        chunks = MessageChunks(self.generation, record, Words(array("h")))
        self.response = SseResponse(self.generation, chunks, chunks.last, {}, 30.0)

    def told(self) -> str:
        """Text so far."""
        deltas = [event["delta"] for event in self.events() if event["type"] == "content_block_delta"]
        return "".join(delta["text"] for delta in deltas)


def continuation(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode([*PROMPT, *tokens])[len(tokenizer.decode(PROMPT)) :]


def test_given_a_message_that_has_begun_when_plain_tokens_come_then_no_task_is_needed(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        server = MessageServer(tokenizer)
        task = server.start()
        server.come(0, 105)
        await settle()
        sent = server.num_sent
        for place in range(1, 6):
            server.come(place, 105 + place)
        assert server.told() == continuation(tokenizer, [*range(105, 111)]), "at once"
        assert server.num_sent == sent
        task.cancel()
        await asyncio.wait([task])
        server.generation.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(30))
def test_given_any_pace_when_a_message_is_streamed_then_all_of_it_comes_once_and_in_order(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(3, 300) for _ in range(rng.randrange(2, 60))]

    async def main() -> dict[str, Any]:
        server = MessageServer(tokenizer)
        task = server.start()
        place = 0
        while place < len(tokens):
            count = min(rng.choice([1, 1, 1, 2, 5, 80]), len(tokens) - place)
            is_last = place + count == len(tokens)
            if count > 1 or is_last or place == 0:
                part = tokens[place : place + count]
                server.stream.push(TokenOutput("r", 0, place, part, "length" if is_last else None))
            else:
                server.come(place, tokens[place])
            place += count
            if rng.random() < 0.2:
                server.cycle.flow.pause_writing()
            if rng.random() < 0.7:
                await settle()
            if rng.random() < 0.7:
                server.cycle.flow.resume_writing()
        server.stream.end("r")
        server.cycle.flow.resume_writing()
        await asyncio.wait_for(task, 20)
        server.generation.close()
        return message_of(server.events())

    message = asyncio.run(main())
    wanted = continuation(tokenizer, tokens)
    assert message["content"] == ([{"type": "text", "text": wanted}] if wanted else [])
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", len(tokens))
