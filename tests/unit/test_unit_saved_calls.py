"""Saved answers with calls and reasoning: right if a server could have told these tokens so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from novainfer.entrypoints.answer_faults import Echo, Recomputed, choice_faults
from novainfer.entrypoints.answer_ways import ways_of
from novainfer.entrypoints.saved_answer import read_answer
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash
from novainfer.text.parts import Parsers
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.tool_calls import call_id
from tests.unit.saved_answers import CHUNK, Json, body, chat_choice, delta, faults, receipt_of, stream

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


@pytest.mark.parametrize("lie", ["a lie", ["a lie"], {"a": "lie"}, 5])
def test_given_reasoning_that_the_tokens_do_not_hold_when_compared_then_it_is_a_fault(echo: Echo, lie: Any) -> None:
    (fault,) = faults(body(echo, chat_choice(reasoning_content=lie)), echo)
    assert "reasoning_content" in fault


CALL_TEXT = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
PARSERS = Parsers("hermes", "think")


def call(index: int = 0, arguments: str = '{"x": 1}', **more: Any) -> Json:
    own = {
        "id": call_id("hermes", "x", 0, index),
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    return own | more


def found_of(tokenizer: Tokenizer, echo: Echo, text: str, parsers: Parsers = PARSERS) -> Recomputed:
    """A choice that was computed again, and all ways to tell it."""
    ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids]
    found = Recomputed(ChoiceReceipt(len(ids), token_hash(ids), "stop"), text, ids, None)
    read = Receipt.from_json(json.loads(json.dumps(receipt_of(echo))))
    receipt = replace(read, eos_token_ids=tokenizer.eos_token_ids)
    return replace(found, ways=tuple(ways_of(receipt, ids, "stop", (tokenizer, parsers))))


def test_given_calls_and_reasoning_when_the_parsers_make_them_of_the_tokens_then_nothing_is_wrong(
    echo: Echo, tokenizer: Tokenizer
) -> None:
    found = found_of(tokenizer, echo, f"{THOUGHT}Look.\n{CALL_TEXT}\n{CALL_TEXT}\n")
    reasoning, calls, ends = {"reasoning_content": "Hm."}, [call(), call(1)], {"finish_reason": "tool_calls"}
    rest = found.text.removeprefix(THOUGHT)
    right = [
        chat_choice(found.text),
        chat_choice(rest, **reasoning),
        chat_choice(rest),
        chat_choice("Look.", tool_calls=calls, **reasoning) | ends,
        chat_choice("Look.", tool_calls=calls[:1], **reasoning) | ends,
        chat_choice("Look.", tool_calls=calls) | ends,
        chat_choice(f"{THOUGHT.strip()}\n\nLook.", tool_calls=calls) | ends,
        chat_choice(f"{THOUGHT}Look.", tool_calls=calls) | ends,
    ]
    for choice in right:
        assert choice_faults(body(echo, choice), 0, found, echo) == ([], "")
    alone = found_of(tokenizer, echo, CALL_TEXT)
    assert choice_faults(body(echo, chat_choice(None, tool_calls=[call()]) | ends), 0, alone, echo) == ([], "")
    wrong = [
        chat_choice("Look.", tool_calls=calls, **reasoning),
        chat_choice("Look.", tool_calls=calls, reasoning_content="Hm") | ends,
        chat_choice("Look!", tool_calls=calls, **reasoning) | ends,
        chat_choice(None, tool_calls=calls, **reasoning) | ends,
        chat_choice("Look.", tool_calls=calls[1:], **reasoning) | ends,
        chat_choice("Look.", tool_calls=[call(arguments='{"x":1}'), call(1)], **reasoning) | ends,
        chat_choice("Look.", tool_calls=[*calls, call(2)], **reasoning) | ends,
        chat_choice("Look.", tool_calls=[call(id="call_1"), call(1)], **reasoning) | ends,
        chat_choice("Look.", tool_calls=[call(type="x"), call(1)], **reasoning) | ends,
        chat_choice(rest, **reasoning) | ends,
        chat_choice(found.text) | ends,
    ]
    for choice in wrong:
        assert faults(body(echo, choice), echo, found), choice


def test_given_parsers_that_a_model_has_not_when_an_answer_is_told_by_them_then_it_is_a_fault(
    echo: Echo, tokenizer: Tokenizer
) -> None:
    for parsers in (Parsers(), Parsers("mistral"), Parsers("none", "think")):
        found = found_of(tokenizer, echo, CALL_TEXT, parsers)
        assert faults(body(echo, chat_choice(found.text)), echo, found) == []
        choice = chat_choice(None, tool_calls=[call()]) | {"finish_reason": "tool_calls"}
        (fault, _) = faults(body(echo, choice), echo, found)
        assert "tool_calls, which no parser of this model makes of these tokens" in fault


def test_given_a_stream_with_calls_when_it_is_read_from_any_event_on_then_it_is_compared(
    echo: Echo, tokenizer: Tokenizer
) -> None:
    found = found_of(tokenizer, echo, f"{THOUGHT}{CALL_TEXT}{CALL_TEXT}")
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    more = [{"index": index, "function": {"arguments": part}} for index in (0, 1) for part in ('{"x"', ": 1}")]
    deltas = [
        delta("", role="assistant"),
        delta(reasoning_content="H"),
        delta(reasoning_content="m."),
        delta(tool_calls=[call(arguments="") | {"index": 0}]),
        *(delta(tool_calls=[part]) for part in more[:2]),
        delta(tool_calls=[call(1, "") | {"index": 1}]),
        *(delta(tool_calls=[part]) for part in more[2:]),
        delta(finish="tool_calls"),
    ]
    events = [(str(1 + place), data) for place, data in enumerate(deltas)]
    assert choice_faults(read_answer(stream(*deltas, last)), 0, found, echo) == ([], "")
    for first in range(len(events)):
        assert faults(read_answer(stream(*events[first:], last)), echo, found) == []
    for missing in range(1, len(events)):
        assert faults(read_answer(stream(*events[:missing], *events[missing + 1 :], last)), echo, found)


ENDS = {"finish_reason": "tool_calls"}
PONDERED = 'maybe <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>? No.'


def test_given_a_call_within_a_thought_when_an_answer_tells_it_as_a_call_then_it_is_a_fault(
    echo: Echo, tokenizer: Tokenizer
) -> None:
    found = found_of(tokenizer, echo, f"<think>{PONDERED}</think>Hello")
    assert faults(body(echo, chat_choice("Hello", reasoning_content=PONDERED)), echo, found) == []
    assert faults(body(echo, chat_choice(found.text)), echo, found) == []
    forged = chat_choice("<think>maybe? No.</think>Hello", tool_calls=[call()])
    assert faults(body(echo, forged | ENDS), echo, found)
    assert faults(body(echo, forged), echo, found)
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    assert faults(read_answer(stream(("9", delta(finish="tool_calls")), last)), echo, found)
    assert faults(read_answer(stream(("9", delta(finish="stop")), last)), echo, found) == []


@pytest.mark.parametrize(
    "more",
    [
        {"index": 0},
        {"extra": "x"},
        {"custom": {"name": "g"}},
        {"function": {"name": "f", "arguments": '{"x": 1}', "strict": True}},
    ],
)
def test_given_a_call_with_fields_that_no_call_of_ours_has_when_compared_then_it_is_a_fault(
    echo: Echo, tokenizer: Tokenizer, more: Json
) -> None:
    found = found_of(tokenizer, echo, CALL_TEXT)
    dumped_by_an_sdk = call(custom=None) | {"index": None}
    assert faults(body(echo, chat_choice(None, tool_calls=[dumped_by_an_sdk]) | ENDS), echo, found) == []
    assert faults(body(echo, chat_choice(None, tool_calls=[call() | more]) | ENDS), echo, found)
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    entry = call() | {"index": 0} | more
    events = [delta("", role="assistant"), delta(tool_calls=[entry]), delta(finish="tool_calls")]
    assert bool(faults(read_answer(stream(*events, last)), echo, found)) == ("index" not in more)
