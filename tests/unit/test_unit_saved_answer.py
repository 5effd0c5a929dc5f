"""Saved answers: what a file says is read as any client would read it, and compared with what was computed again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from novainfer.entrypoints.answer_faults import EXCERPT, Echo, Recomputed, answer_faults, choice_faults
from novainfer.entrypoints.saved_answer import read_answer
from novainfer.errors import ConfigError
from novainfer.text.tokenizer import Tokenizer
from tests.unit.saved_answers import (
    CHUNK,
    FOUND,
    IDS,
    NO_TEXT,
    TEXT,
    Json,
    body,
    chat_choice,
    delta,
    faults,
    receipt_of,
    stream,
    text_choice,
)

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


def test_given_a_text_or_a_message_when_it_is_that_of_the_tokens_then_nothing_is_wrong(echo: Echo) -> None:
    dumped_by_an_sdk = chat_choice(tool_calls=None, function_call=None, audio=None, annotations=[])
    for choice in (text_choice(), chat_choice(), dumped_by_an_sdk):
        answer = body(echo, choice)
        assert choice_faults(answer, 0, FOUND, echo) == ([], "")
        assert answer_faults(answer) == []


@pytest.mark.parametrize(
    "lie", ["", "a lie", "it is true.", "it is tru", "It is true", "it is  true", "it is tru\u0435"]
)
def test_given_another_text_when_compared_then_it_is_a_fault_on_each_route(echo: Echo, lie: str) -> None:
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    streamed = stream(delta("", role="assistant"), delta(lie), delta(finish="stop"), last)
    for answer in (body(echo, text_choice(lie)), body(echo, chat_choice(lie)), read_answer(streamed)):
        (fault,) = faults(answer, echo)
        assert "the answer's text is not that of these tokens" in fault


def test_given_a_long_lie_with_control_characters_when_told_then_the_words_are_short_and_plain(echo: Echo) -> None:
    (fault,) = faults(body(echo, text_choice("it is \x1b]0;\u202e\n" + "ж" * 10_000)), echo)
    assert fault.isascii()
    assert fault.isprintable()
    assert "from character 6 on it says '\\x1b]0;\\u202e\\n\\u0436" in fault
    assert "computed again: 'true' (" in fault
    assert len(fault) < 10 * EXCERPT + 250


@pytest.mark.parametrize("found", [FOUND, NO_TEXT])
def test_given_an_echo_when_it_is_the_prompts_then_it_may_stand_before_a_text_and_nowhere_else(
    echo: Echo, tokenizer: Tokenizer, found: Recomputed
) -> None:
    told = "hello world" + found.text
    assert faults(body(echo, text_choice(told)), echo, found) == []
    assert faults(body(echo, text_choice(echo.decoded + found.text)), echo, found) == []
    assert faults(body(echo, chat_choice(told)), echo, found)
    for wrong in ("hello there", "hello world ", "hello worl", "\ud800"):
        assert faults(body(echo, text_choice(wrong + found.text)), echo, found), wrong
    with_specials = Echo(tokenizer, tokenizer.encode("hello world", add_special_tokens=False))
    assert faults(body(echo, text_choice(told)), with_specials, found) == []
    (fault,) = faults(body(echo, text_choice("hello world" + found.text + "!")), echo, found)
    assert f"from character {len(told)} on it says '!', computed again: ''" in fault


def test_given_a_prompt_that_is_not_spelled_as_its_tokens_when_echoed_then_it_is_known_all_the_same(
    tokenizer: Tokenizer,
) -> None:
    letters = [token for letter in "hello" for token in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("hello")
    assert Echo(tokenizer, letters).is_told_by("hello")  # sent as token ids that no text becomes
    special = tokenizer.encode("hello<|im_end|>")
    assert Echo(tokenizer, special).is_told_by("hello<|im_end|>")  # sent as text, which decoding does not give back
    assert not Echo(tokenizer, special).is_told_by("hello<|im_start|>")

    class WithBegin:
        """Puts a token before each text, unless it is told not to."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [7] * len(text)

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "something else"

    adding: Any = WithBegin()
    assert Echo(adding, [1, 7, 7]).is_told_by("ab")
    assert Echo(adding, [7, 7]).is_told_by("ab")
    assert not Echo(adding, [7, 7]).is_told_by("abc")


def test_given_a_stream_when_read_then_the_deltas_of_each_choice_are_joined(echo: Echo) -> None:
    def said(index: int, text: str, **more: Any) -> Json:
        return TEXT | {"choices": [{"index": index, "text": text, "finish_reason": None, "stop_reason": None, **more}]}

    events = [
        said(1, "it", token_ids=[5]),
        said(0, "it is", token_ids=[5]),
        said(1, " is true", token_ids=[6, 7]),
        said(0, " true", token_ids=[6, 7], finish_reason="stop"),
        said(1, "", finish_reason="stop"),
        TEXT | {"choices": [], "usage": {"completion_tokens": 6}, "receipt": receipt_of(echo, 2)},
    ]
    for end in ("", ": keep-alive\n\ndata: [DONE]\n\n"):
        answer = read_answer(stream(*events, end=end).replace("\n", "\r\n"))
        assert [choice_faults(answer, index, FOUND, echo) for index in (0, 1)] == [([], ""), ([], "")]
        assert answer_faults(answer) == []
    (fault,) = faults(read_answer(stream(*events[1:])), echo, index=1)[:1]
    assert "from character 0 on it says ' is true', computed again: 'it is true'" in fault


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"finish_reason": "length"}, "finish reason is 'length'"),
        ({"finish_reason": None}, "finish reason is missing"),
        ({"stop_reason": "x"}, "stop reason is 'x', computed again: None"),
        ({"token_ids": [5, 6]}, "token_ids"),
        ({"token_ids": [6, 7]}, "token_ids"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"message": {"role": "assistant", "content": "a lie"}}, "'message'"),
    ],
)
def test_given_another_end_or_other_ids_when_compared_then_that_is_named(echo: Echo, change: Json, word: str) -> None:
    right = {"token_ids": IDS, "prompt_token_ids": echo.token_ids}
    assert faults(body(echo, text_choice(**right)), echo) == []
    (fault,) = faults(body(echo, text_choice(**{**right, **change})), echo)
    assert word in fault


@pytest.mark.parametrize("name", ["tool_calls", "refusal", "function_call", "reasoning", "audio"])
def test_given_a_field_that_no_parser_of_ours_writes_when_compared_then_it_is_named(echo: Echo, name: str) -> None:
    (fault,) = faults(body(echo, chat_choice(**{name: "a lie"})), echo)
    assert f"'{name}', which this server never writes" in fault
    events = [delta("it is true", role="assistant", **{name: ["a lie"]}), delta(finish="stop")]
    answer = read_answer(stream(*events, CHUNK | {"choices": [], "receipt": receipt_of(echo)}))
    assert len(faults(answer, echo)) == 1


def test_given_an_answer_whose_choices_are_not_those_of_the_receipts_when_compared_then_it_is_a_fault(
    echo: Echo,
) -> None:
    answer = body(echo, text_choice(), text_choice("a lie", index=7))
    assert answer_faults(answer) == ["no receipt speaks of its choice 7"]
    assert faults(answer, echo, index=1) == ["the answer has no such choice"]
    assert answer_faults(body(echo, text_choice(index=-1))) == ["no receipt speaks of its choice -1"]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"model": "better"}, "its model is 'better', the receipt's 'demo'"),
        ({"usage": {"completion_tokens": 4}}, "its usage.completion_tokens is 4, by the receipts 3"),
        ({"usage": {"total_tokens": 10**9}}, "its usage.total_tokens is 1000000000"),
        ({"prompt_token_ids": [1]}, "its prompt_token_ids"),
    ],
)
def test_given_other_counts_or_names_when_compared_then_they_are_told(echo: Echo, more: Json, word: str) -> None:
    count = len(echo.token_ids)
    usage = {"prompt_tokens": count, "completion_tokens": 3, "total_tokens": count + 3, "prompt_tokens_details": {}}
    assert answer_faults(body(echo, chat_choice(), usage=usage, prompt_token_ids=echo.token_ids)) == []
    (fault,) = answer_faults(body(echo, chat_choice(), **more))
    assert word in fault


def test_given_a_usage_that_grows_with_a_stream_when_compared_then_only_the_last_chunks_counts(echo: Echo) -> None:
    growing = delta("it is true", "stop", role="assistant") | {"usage": {"completion_tokens": 1}}
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    assert answer_faults(read_answer(stream(growing, last))) == []
    assert len(answer_faults(read_answer(stream(growing, last | {"usage": {"completion_tokens": 1}})))) == 1


def test_given_prompts_without_a_receipt_when_compared_then_their_choices_and_the_sums_are_not(echo: Echo) -> None:
    choices = [text_choice(), text_choice("cancelled", 1)]
    data = TEXT | {"choices": choices, "receipts": [receipt_of(echo), None], "usage": {"completion_tokens": 99}}
    answer = read_answer(json.dumps(data))
    assert answer_faults(answer) == []
    assert faults(answer, echo) == []


def test_given_a_stream_with_ids_when_it_begins_late_then_its_end_is_compared_and_that_is_said(echo: Echo) -> None:
    last = CHUNK | {"choices": [], "receipt": receipt_of(echo)}
    deltas = [delta("", role="assistant"), delta("it"), delta(" is true"), delta(finish="stop")]
    events = list(zip(("1", "2", "4", "6"), deltas, strict=True))
    assert choice_faults(read_answer(stream(*events, last)), 0, FOUND, echo) == ([], "")
    for first, chars in ((1, 10), (2, 8), (3, 0)):
        note = f"; the file holds only its end, {chars} characters" if chars < len(FOUND.text) else ""
        assert choice_faults(read_answer(stream(*events[first:], last)), 0, FOUND, echo) == ([], note)
    for wrong in (
        stream(events[0], *events[2:], last),  # it has begun, so a part is missing
        stream(*(data for _, data in events[2:]), last),  # no ids: nobody can have taken it up
        stream(events[1], events[3], last),  # the middle is missing
        stream(events[2], ("6", delta(finish="length")), last),
    ):
        assert faults(read_answer(wrong), echo)
    ids = TEXT | {"choices": [text_choice(" true", token_ids=[7])]}
    assert faults(read_answer(stream(("6", ids), TEXT | {"choices": [], "receipt": receipt_of(echo)})), echo) == []
    other = CHUNK | {"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": None}]}
    assert faults(read_answer(stream(("6-3", other), last)), echo, NO_TEXT) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"object": "chat.completion", "choices": [], "choices": [], "receipt": R}', "stands twice"),
        ('{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}}], "receipt": R}', "of the kind"),
        ('{"choices": [{"index": 0, "text": "a lie"}], "receipt": R}', "of the kind"),
        ('{"object": "text_completion", "choices": [{"index": 0}], "receipt": R}', "no text"),
        ('{"object": "text_completion", "choices": [{"index": 0, "text": ["a lie"]}], "receipt": R}', "no text"),
        ('{"object": "text_completion", "choices": [{"text": "a lie"}], "receipt": R}', "no index"),
        ('{"object": "text_completion", "choices": [{"index": true, "text": "a lie"}], "receipt": R}', "no index"),
        ('{"object": "chat.completion", "choices": [{"index": 0, "message": 1}], "receipt": R}', "no message"),
        ('{"object": "chat.completion", "choices": "a lie", "receipt": R}', "not a list"),
        ('{"object": "text_completion", "choices": [{"index": 0, "text": "", "token_ids": 1}], "receipt": R}', "list"),
        ('{"object": "text_completion", "choices": [PART, PART], "receipt": R}', "in order, each once"),
        ('{"object": "text_completion", "choices": [OTHER, PART], "receipt": R}', "in order, each once"),
        (
            '{"object": "text_completion", "choices": [{"index": 0, "text": "", "token_ids": [1.0]}], "receipt": R}',
            "int",
        ),
        ('{"object": "text_completion", "choices": [PART], "usage": [1], "receipt": R}', "usage"),
        ('{"object": "text_completion", "choices": [PART], "model": null, "receipt": R}', "model"),
        ('data: {"receipt": R}\n\ndata: {"error": {"message": "a lie"}}\n\n', "an error"),
        ('data: {"usage": {"total_tokens": 9}}\n\ndata: {"usage": {"total_tokens": 4}, "receipt": R}\n\n', "several"),
        ('data: {"id": "a", "receipt": R}\n\ndata: {"id": "b", "choices": []}\n\n', "several answers"),
        ('data: {"receipt": R}\n\ndata: {"receipt": R}\n\n', "several answers"),
        ('data: {"receipt": R}\n\ndata: [DONE]\n\ndata: {"id": "b"}\n\n', "after the end"),
        ('data: {"receipt": R}\n\n: to be hidden\rdata: a lie\n\n', "neither JSON"),
        ('id: 1\ndata: CHUNK\n\nid: 1\ndata: CHUNK\n\ndata: {"receipt": R}', "begins again"),
        ('id: 2\ndata: CHUNK\n\nid: 1\ndata: CHUNK\n\ndata: {"receipt": R}', "begins again"),
        ('id: 2\ndata: CHUNK\n\nid: 2-1\ndata: CHUNK\n\ndata: {"receipt": R}', "begins again"),
        ('id: x\ndata: CHUNK\n\ndata: {"receipt": R}', "not one of this server's"),
        ('data: CHUNK\n\nid: 1\ndata: CHUNK\n\ndata: {"receipt": R}', "some events have ids"),
    ],
)
def test_given_what_could_be_read_in_two_ways_when_read_then_it_is_refused(echo: Echo, text: str, words: str) -> None:
    for name, choice in (("PART", text_choice("half")), ("OTHER", text_choice("half", index=1))):
        text = text.replace(name, json.dumps(choice))
    text = text.replace("CHUNK", json.dumps(delta("a"))).replace("R}", json.dumps(receipt_of(echo)) + "}")
    with pytest.raises(ConfigError, match=words):
        read_answer(text)


def test_given_receipts_alone_when_read_then_there_is_nothing_beside_them(echo: Echo) -> None:
    receipt = receipt_of(echo)
    for data in (receipt, {"receipt": receipt}, {"receipts": [receipt]}, CHUNK | {"choices": [], "receipt": receipt}):
        answer = read_answer(json.dumps(data))
        assert answer.choices == {}
        assert answer_faults(answer) == []
