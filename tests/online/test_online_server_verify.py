"""Answers of a real server, with every option that shapes a text: verified they are equal, and changed ones are not.

One engine computes all of them again; a process for each is in `test_online_server_receipts`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer.entrypoints import llm as llm_module
from novainfer.entrypoints.llm import LLM
from novainfer.entrypoints.verify import EXIT_DIFFERENT, EXIT_EQUAL, verify_command
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is NovaInfer?"}]}
WEATHER = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
STOPS = {"n": 4, "seed": 5, "stop": ["e", "o w"], "temperature": 1.5, "max_tokens": 40}
Body = dict[str, Any]
REQUESTS: dict[str, tuple[str, Body]] = {
    "chat": (CHAT, QUESTION | {"temperature": 0}),
    "specials": (CHAT, QUESTION | {"temperature": 2.5, "n": 3, "max_tokens": 60, "skip_special_tokens": False}),
    "tools": (CHAT, WEATHER | {"tools": [TOOL], "temperature": 0, "return_token_ids": True}),
    "stops": (CHAT, QUESTION | STOPS | {"include_stop_str_in_output": True}),
    "late stops": (CHAT, QUESTION | STOPS | {"min_tokens": 3}),
    "noise": (CHAT, QUESTION | {"temperature": 3.0, "seed": 11, "ignore_eos": True, "max_tokens": 120, "n": 4}),
    "stop ids": (CHAT, QUESTION | {"stop_token_ids": [32, 260, 300], "include_stop_str_in_output": True, "n": 3}),
    "schema": (CHAT, WEATHER | {"tools": [TOOL], "response_format": FORMAT, "seed": 2, "n": 2, "max_tokens": 60}),
    "a call": (CHAT, QUESTION | {"tools": [TOOL], "tool_choice": "required", "seed": 5, "n": 2, "max_tokens": 90}),
    "choice": (TEXT, {"prompt": ["a", "b"], "structured_outputs": {"choice": ["yes", "no"]}, "seed": 4}),
    "echo": (TEXT, {"prompt": ["The gateway", "A worker  é 漢字 🙂 "], "n": 2, "echo": True, "stop": " a"}),
    "echoed ids": (TEXT, {"prompt": [[300, 301, 0, 1, 2], [310, 5]], "n": 2, "echo": True, "return_token_ids": True}),
    "long echo": (TEXT, {"prompt": "NovaInfer is", "echo": True, "temperature": 4.0, "max_tokens": 80, "logprobs": 2}),
    "no text": (TEXT, {"prompt": "NovaInfer is", "max_tokens": 1, "n": 8, "temperature": 3.0}),
    "specials in an echo": (TEXT, {"prompt": "The <|im_end|> x", "echo": True, "n": 2}),
    "prompts": (TEXT, {"prompt": ["a", "b", "a"], "add_special_tokens": False}),
}
FORMS: dict[str, Body] = {
    "whole": {},
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "ids": {"stream": True, "stream_options": {"include_event_ids": True, "continuous_usage_stats": True}},
}
Verify = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def answers(server: RunningServer) -> dict[tuple[str, str], str]:
    """What the server answers, by request and form."""

    async def run() -> list[str]:
        headers = {"x-novainfer-receipt": "true"}
        async with httpx.AsyncClient(base_url=server.base_url, trust_env=False, timeout=240, headers=headers) as client:

            async def ask(path: str, body: Body) -> str:
                response = await client.post(path, json=body)
                assert response.status_code == 200, response.text
                return response.text

            return await asyncio.gather(*(ask(path, body | form) for path, body in requests for form in FORMS.values()))

    requests = list(REQUESTS.values())
    keys = [(name, form) for name in REQUESTS for form in FORMS]
    return dict(zip(keys, asyncio.run(run()), strict=True))


class Lasting(LLM):
    """Ends with the tests, not with the one who asked for it."""

    def exit(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[dict[str, LLM]]:
    """The engine that the first receipt asks for, to be kept for the others."""
    kept: dict[str, LLM] = {}
    yield kept
    for llm in kept.values():
        LLM.exit(llm)


@pytest.fixture
def verify(
    engine: dict[str, LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Verify:
    """The exit status of `novainfer verify` for a file, and what it prints."""

    def kept(model: str, **options: Any) -> LLM:
        key = repr((model, options))
        if key not in engine:
            engine[key] = Lasting(model, **options)
        return engine[key]

    def run(text: str) -> tuple[int, str]:
        (tmp_path / "answer").write_text(text, encoding="utf-8")
        given: Any = {"receipt": str(tmp_path / "answer"), "model": None, "tokenizer": None, "device": None}
        given |= {"chat_template": None, "tool_call_parser": "auto", "reasoning_parser": "auto"}
        status = verify_command(argparse.Namespace(**given, any_mode=False))
        return status, capsys.readouterr().out

    monkeypatch.setattr(llm_module, "LLM", kept)
    return run


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REQUESTS)
def test_given_a_genuine_answer_when_verified_then_all_of_it_is_equal(
    answers: dict[tuple[str, str], str], verify: Verify, name: str, form: str
) -> None:
    status, output = verify(answers[name, form])
    assert status == EXIT_EQUAL, output
    assert "verified: every choice is equal, and so is what the answer says" in output
    assert "only" not in output.replace("only indicative", "")


@pytest.mark.parametrize("name", ["noise", "stops", "echo", "tools"])
def test_given_a_stream_that_was_taken_up_after_any_event_when_verified_then_what_is_there_is_equal(
    answers: dict[tuple[str, str], str], verify: Verify, name: str
) -> None:
    events = answers[name, "ids"].split("\n\n")
    last = len(events) - 4  # before the receipt, `[DONE]` and nothing; a busy server puts many tokens in one event
    for first in {1, min(2, last), min(3, last), len(events) // 2, last}:
        status, output = verify("\n\n".join(events[first:]))
        assert status == EXIT_EQUAL, output
        assert first < last or "the file holds only its end" in output
    spoken = [number for number, event in enumerate(events) if '"content":"' in event or '"text":"' in event][-1]
    lie = events[spoken].replace('"content":"', '"content":"lie').replace('"text":"', '"text":"lie')
    status, output = verify("\n\n".join([lie, *events[spoken + 1 :]]))
    assert (status, "the answer's text is not that of these tokens" in output) == (EXIT_DIFFERENT, True), output


@pytest.mark.parametrize("name", ["chat", "echo"])
def test_given_a_whole_answer_whose_text_was_changed_when_verified_then_status_1_shows_where(
    answers: dict[tuple[str, str], str], verify: Verify, name: str
) -> None:
    answer = json.loads(answers[name, "whole"])
    choice = answer["choices"][-1]
    holder, key = (choice["message"], "content") if name == "chat" else (choice, "text")
    genuine = holder[key]
    holder[key] = genuine[:9] + "\x1b[2J a lie"
    status, output = verify(json.dumps(answer))
    assert status == EXIT_DIFFERENT
    wrong = [line for line in output.splitlines() if "DIFFERENT" in line]
    assert len(wrong) == 1
    assert wrong[0].startswith(f"prompt {len(answer.get('receipts', [0])) - 1}, choice {0 if name == 'chat' else 1}: ")
    assert "from character 9 on it says '\\x1b[2J a lie'" in wrong[0]
    assert ascii(genuine[9:20])[1:-1] in wrong[0]
    assert "NOT verified" in output


def last_text(events: list[str]) -> int:
    """The last event with text: no echo, whose absence would be no lie."""

    def has_text(event: str) -> bool:
        data = json.loads(event.removeprefix("data: ")) if event.startswith("data: {") else {}
        return any(c.get("text") or c.get("delta", {}).get("content") for c in data.get("choices", []))

    return max(place for place, event in enumerate(events) if has_text(event))


@pytest.mark.parametrize("name", ["chat", "echo"])
def test_given_a_stream_whose_text_was_changed_when_verified_then_status_1(
    answers: dict[tuple[str, str], str], verify: Verify, name: str
) -> None:
    events = answers[name, "stream"].split("\n\n")
    place = last_text(events)
    without = "\n\n".join([*events[:place], *events[place + 1 :]])
    status, output = verify(without)
    assert (status, output.count(": DIFFERENT: the answer's text")) == (EXIT_DIFFERENT, 1), output


def test_given_an_answer_with_other_counts_ends_or_choices_when_verified_then_status_1(
    answers: dict[tuple[str, str], str], verify: Verify
) -> None:
    genuine = answers["echoed ids", "whole"]

    def change(path: str, value: Any) -> str:
        answer = at = json.loads(genuine)
        *names, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for name in names:
            at = at[name]
        at[last] = value
        return json.dumps(answer)

    changed = {
        "usage.completion_tokens": 3,
        "usage.prompt_tokens": 3,
        "choices.1.finish_reason": "content_filter",
        "choices.1.stop_reason": "x",
        "choices.1.token_ids": [1, 2],
        "choices.1.prompt_token_ids": [1, 2],
        "model": "a better one",
    }
    for path, value in changed.items():
        status, output = verify(change(path, value))
        assert (status, "DIFFERENT" in output) == (EXIT_DIFFERENT, True), (path, output)


def test_given_a_receipt_by_itself_when_verified_then_it_says_that_only_tokens_were_compared(
    answers: dict[tuple[str, str], str], verify: Verify
) -> None:
    receipt = json.loads(answers["chat", "whole"])["receipt"]
    last_event = answers["chat", "stream"].split("\n\n")[-3]
    for text in (json.dumps(receipt), last_event, last_event.removeprefix("data: ")):
        status, output = verify(text)
        assert status == EXIT_EQUAL
        assert "only tokens were compared: there is no answer beside the receipt" in output


@pytest.mark.parametrize("form", ["whole", "ids"])
def test_given_an_answer_that_calls_a_tool_when_the_call_was_changed_then_status_1(
    answers: dict[tuple[str, str], str], verify: Verify, form: str
) -> None:
    genuine = answers["tools", form]
    call = json.loads(answers["tools", "whole"])["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert '"finish_reason":"tool_calls"' in genuine
    assert verify(genuine)[0] == EXIT_EQUAL
    (own_id,) = set(re.findall(r"call_[0-9a-f]{24}", genuine))
    for old, new in (
        (own_id, "call_" + "0" * 24),
        ("get_weather", "get_whether"),
        ('"arguments":"{', '"arguments":" {'),
        ('"finish_reason":"tool_calls"', '"finish_reason":"stop"'),
    ):
        status, output = verify(genuine.replace(old, new))
        assert (status, "DIFFERENT" in output) == (EXIT_DIFFERENT, True), (old, output)
