"""Calls and reasoning of chats through the real SDK: whole answers, streams, and streams that another gateway ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.stream_record import PromptRecord, StreamRecord
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams
from novainfer.sim import oracle
from novainfer.text.parts import Parsers, Telling
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.tool_calls import call_id
from novainfer.transport.addresses import Endpoint
from tests.chaos.streams import events
from tests.fakes import MARKS, write_thinker
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, config_for
from tests.replica import ReplicaThread
from tests.thinker import ARGUMENTS, CALL, HELLO, OTHER, TEXT, THOUGHT, TOOLS

pytestmark = pytest.mark.stage2

PATH = "/v1/chat/completions"


def slowly(pair: Pair) -> None:
    """Tokens come one by one."""
    pair.scheduler.step_seconds = 0.002


@dataclass
class Said:
    """A stream's parts joined, or a whole answer's message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    usage: Any = None

    def add(self, data: dict[str, Any]) -> None:
        """A chunk."""
        self.usage = data.get("usage") or self.usage
        for choice in data["choices"]:
            delta = choice["delta"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    assert (call["index"], call["type"]) == (len(self.calls), "function")
                    self.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
            self.ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)

    @property
    def plain(self) -> tuple[str, str, list[tuple[str, str]], list[str]]:
        return self.content, self.reasoning, [(call["name"], call["arguments"]) for call in self.calls], self.ends


def streamed(pair: Pair, body: dict[str, Any]) -> tuple[Said, str]:
    """What a raw stream says, and its id."""
    said, response_id = Said(), ""
    options = {"include_usage": True, **body.get("stream_options", {})}
    with pair.http.stream("POST", PATH, json={**body, "stream": True, "stream_options": options}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                response_id = data["id"]
                said.add(data)
    return said, response_id


def asked(pair: Pair, body: dict[str, Any]) -> Said:
    """A whole answer."""
    answer = pair.post(PATH, body).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] | {"id": call["id"]} for call in message.get("tool_calls", [])]
    assert calls or message["content"] is not None
    assert message["content"] != "" or not calls
    reasoning = message.get("reasoning_content", "")
    return Said(message["content"] or "", reasoning, calls, [choice["finish_reason"]], answer["usage"])


def test_given_calls_when_read_by_the_sdk_then_whole_and_streamed_are_the_same(thinker: Pair) -> None:
    thinker.say(TEXT)
    assert thinker.gateway.service.parsers == Parsers("hermes", "think")
    create = thinker.sdk.chat.completions.create
    answer = create(model="alias", messages=HELLO, tools=TOOLS, parallel_tool_calls=True)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert choice.message.model_extra == {"reasoning_content": "Hello? <tool_call>"}
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("f", ARGUMENTS), ("g", "{}")]
    assert [call.id for call in calls] == [call_id("hermes", answer.id, 0, index) for index in range(2)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    told: Any = Said()
    thought = thinker.tokenizer.encode(THOUGHT.strip())
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought) - 1
    with thinker.sdk.chat.completions.stream(model="alias", messages=HELLO, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "chunk":
                told.add(event.chunk.model_dump(exclude_unset=True))
        final = stream.get_final_completion().choices[0]
    assert told.plain == (
        "Let me look.", "Hello? <tool_call>", [("f", ARGUMENTS), ("g", "{}")], ["tool_calls"]
    )  # fmt: skip
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS, "{}"]


def test_given_a_call_when_streamed_then_its_beginning_comes_first_and_nothing_is_lost_with_other_things_told(
    thinker: Pair,
) -> None:
    thinker.say(CALL)
    slowly(thinker)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    with thinker.http.stream("POST", PATH, json=body) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (begins, *rest) = [call for delta in deltas[1:-1] for call in delta["tool_calls"]]
    name = call_id("hermes", chunks[0]["id"], 0, 0)
    assert begins == {"index": 0, "id": name, "type": "function", "function": {"name": "f", "arguments": ""}}
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
    assert len(rest) > 5
    plain = asked(thinker, body | {"stream": False}).plain
    for more in ({"logprobs": True}, {"return_token_ids": True}, {"stream_options": {"include_event_ids": True}}):
        assert streamed(thinker, body | more)[0].plain == plain == ("", "", [("f", ARGUMENTS)], ["tool_calls"])


def test_given_a_form_when_the_model_thinks_and_has_tools_then_it_may_think_first_and_all_else_is_content(
    thinker: Pair,
) -> None:
    special = thinker.tokenizer.special_ids_of(MARKS)
    body = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
    thinker.say(TEXT)
    for fields, start in (
        ({}, "start: (opening thought)? body\n"),
        ({"chat_template_kwargs": {"thinks": True}}, "start: thought body\n"),
        (
            {"continue_final_message": True, "messages": [*HELLO, {"role": "assistant", "content": "{"}]},
            "start: body\n",
        ),
    ):
        said = asked(thinker, {**body, **fields})
        grammar = thinker.scheduler.added[-1].params.grammar
        assert grammar.startswith(start)
        assert ("</think>" in grammar, 'suffix="</think>"' in grammar) == (
            "thought" in start,
            "thought" in start and not special,
        )
        assert (said.calls, said.ends) == ([], ["stop"])
        assert '{"name": "g", "arguments": {}}' in said.content
    asked(thinker, {"messages": HELLO, "tools": TOOLS})
    assert thinker.scheduler.added[-1].params.grammar == ""


def test_given_a_form_and_tools_when_calls_begin_the_answer_then_they_are_told_and_nothing_else_is(
    thinker: Pair,
) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
    thinker.say(f"{THOUGHT}{CALL}{OTHER}")
    for fields, calls in (({}, TOLD), ({"parallel_tool_calls": False}, TOLD[:1])):
        said = asked(thinker, {**body, **fields})
        assert said.plain == ("", "Hello? <tool_call>", calls, ["tool_calls"])
        assert streamed(thinker, {**body, **fields})[0].plain == said.plain
        grammar = thinker.scheduler.added[-1].params.grammar
        assert "| answer)" in grammar
        assert ("{0,15}" in grammar) == (len(calls) == 2)
    for fields in ({"tool_choice": "none"}, {"response_format": None, "structured_outputs": {"json": {}}}):
        assert asked(thinker, {**body, **fields}).calls == []
        assert "answer" not in thinker.scheduler.added[-1].params.grammar


TOLD = [("f", ARGUMENTS), ("g", "{}")]
REST = f"Let me look.\n\n{CALL}{OTHER}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("Let me look.", "Hello? <tool_call>", TOLD, ["tool_calls"])),
        ({"include_reasoning": False}, ("Let me look.", "", TOLD, ["tool_calls"])),
        ({"separate_reasoning": False}, (f"{THOUGHT}Let me look.", "", TOLD, ["tool_calls"])),
        ({"parallel_tool_calls": False}, ("Let me look.", "Hello? <tool_call>", TOLD[:1], ["tool_calls"])),
        ({"tool_choice": "none"}, (None, None, [], ["stop"])),
        ({"tools": []}, (None, None, [], ["stop"])),
        ({"tools": [], "separate_reasoning": False}, (TEXT, "", [], ["stop"])),
        ({"max_tokens": 12}, ("", None, [], ["length"])),
        ({"stop": ["look"]}, ("Let me ", "Hello? <tool_call>", [], ["stop"])),
        ({"stop": ["🎉"]}, ("Let me look.", "Hello? <tool_call>", [("f", '{"city":  "Zürich ')], ["stop"])),
        ({"skip_special_tokens": False}, ("Let me look.", "Hello? <tool_call>", TOLD, ["tool_calls"])),
    ],
)
def test_given_what_a_request_asks_for_when_answered_then_that_is_told_and_no_mark_is_left(
    thinker: Pair, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    thinker.say(TEXT)
    body = {"messages": HELLO, "tools": TOOLS, **fields}
    whole = asked(thinker, body)
    content, reasoning, calls, ends = whole.plain
    assert (calls, ends) == expected[2:]
    special = any(thinker.tokenizer.token_id(mark) in thinker.tokenizer.special_ids for mark in MARKS)
    if special and expected[0] in (None, TEXT):  # nobody looks for these, and so they are not shown
        shown = REST if expected[0] is None else TEXT
        for mark in MARKS:
            shown = shown.replace(mark, "")
        assert (content, reasoning) == (shown, "Hello? " * (expected[0] is None))
    else:
        assert content == (REST if expected[0] is None else expected[0])
    assert expected[1] is None or reasoning == expected[1]
    said, _ = streamed(thinker, body)
    assert (said.plain, said.usage) == (whole.plain, whole.usage)


def test_given_a_prompt_that_begins_a_thought_when_answered_then_the_answer_begins_in_it(thinker: Pair) -> None:
    thinker.say(f"Hm.\n</think>\n\n{CALL}")
    body = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"thinks": True}}
    assert asked(thinker, body).plain == ("", "Hm.", [("f", ARGUMENTS)], ["tool_calls"])
    thinker.say("Hm. What")
    assert asked(thinker, body).plain == ("", "Hm. What", [], ["stop"])
    assert streamed(thinker, body)[0].plain == ("", "Hm. What", [], ["stop"])


def test_given_a_thought_that_is_over_when_streamed_then_the_rest_comes_the_short_way_and_is_the_same(
    thinker: Pair,
) -> None:
    text = f"{THOUGHT}the quick brown fox 你好 🎉 " * 3
    thinker.say(text)
    slowly(thinker)
    said, _ = streamed(thinker, {"messages": HELLO})
    assert said.plain == asked(thinker, {"messages": HELLO}).plain
    assert said.content.startswith("the quick brown fox 你好 🎉 ")


def test_given_a_text_completion_when_it_holds_calls_then_they_are_text(thinker: Pair) -> None:
    thinker.say(CALL)
    answer = thinker.post("/v1/completions", {"prompt": "x", "max_tokens": 99}).json()["choices"][0]
    assert answer["text"] == thinker.tokenizer.decode(thinker.tokenizer.encode(CALL))
    assert answer["finish_reason"] == "stop"


Fetch = Callable[[str], httpx.Response]


@pytest.fixture(params=[False, True], ids=["plain marks", "special marks"])
def left_behind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[[], None], Fetch]]:
    """A stream that spells `TEXT`: how to leave it behind, and to fetch it from a gateway that did not begin it."""
    model = write_thinker(tmp_path / "model", are_special=request.param)
    tokenizer = Tokenizer.load(model)
    ids = [*tokenizer.encode(TEXT), *tokenizer.eos_token_ids]
    spelled = dict(enumerate(ids))
    monkeypatch.setattr(oracle, "oracle_token", lambda history, seed, choice, index, size: spelled.get(index, ids[-1]))
    endpoint = Endpoint(f"ipc://{tmp_path}/scheduler-0.gateways")
    scheduler = ReplicaThread(endpoint, vocab_size=tokenizer.vocab_size)
    gateway = GatewayThread(config_for(model, metrics_compat="none"), endpoint)
    gateway.wait_ready()
    record = StreamRecord(
        is_chat=True, response_id="chatcmpl-1", created=1, model="m", include_usage=True, continuous_usage=False,
        event_ids=True, token_ids=False, logprobs=False, echo=False, receipt=False, after_prompt=False,
        prompt_alone=False, telling=Telling("hermes", "think"),
    )  # fmt: skip
    sent = AddRequest(
        "chatcmpl-1-0",
        list(range(10, 20)),
        SamplingParams(seed=1, max_tokens=200),
        eos_token_ids=list(tokenizer.eos_token_ids),
        aliases=["chatcmpl-1", "mine"],
        answer=PromptRecord(record, 0, 1, "").to_json(),
    )

    def fetch(after: str) -> httpx.Response:
        with gateway.http() as http:
            return http.get("/v1/streams/mine", params={"after": after} if after else {})

    yield lambda: scheduler.leave_behind(sent, num_tokens=len(ids)), fetch
    gateway.close()
    scheduler.close()


def test_given_a_stream_whose_gateway_died_when_fetched_after_any_event_then_another_tells_the_rest(
    left_behind: tuple[Callable[[], None], Fetch],
) -> None:
    leave_behind, fetch = left_behind

    def read(after: str = "") -> list[tuple[str, dict[str, Any]]]:
        leave_behind()
        response = fetch(after)
        assert response.status_code == 200, response.text
        found = [item for item in events(iter(response.text.split("\n"))) if item[1] != "[DONE]"]
        return [(event_id or "", json.loads(data)) for event_id, data in found]

    whole = read()
    said = Said()
    for _, data in whole:
        said.add(data)
    assert said.plain == ("Let me look.", "Hello? <tool_call>", TOLD, ["tool_calls"])
    assert [call["id"] for call in said.calls] == [call_id("hermes", "chatcmpl-1", 0, index) for index in range(2)]
    places = [event_id for event_id, data in whole if data["choices"]]
    for number, place in enumerate(places[:-1]):
        parts = Said()
        for _, data in [*whole[: number + 1], *read(place)]:
            parts.add(data)
        assert (parts.plain, parts.calls, parts.usage) == (said.plain, said.calls, said.usage), place
