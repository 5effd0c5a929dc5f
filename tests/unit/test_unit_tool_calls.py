"""Calls and reasoning in a chat's text: what models were recorded to write, whole, cut anywhere, and cut short."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.text.call_object import CallDelta, join_calls
from novainfer.text.parts import DROPPED, KEPT, Parsers, PartsParser, Telling, choose_parsers, ends_inside
from novainfer.text.tool_calls import call_id

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

HERMES = Telling(calls="hermes")
LLAMA = Telling(calls="llama3_json")
MISTRAL = Telling(calls="mistral")
THINK = Telling(reasoning="think")
QWEN3 = Telling(calls="hermes", reasoning="think")
LEADS = Telling(calls="hermes", calls_lead=True)


@dataclass(frozen=True)
class Told:
    """All that is told of a text: calls as (name, arguments)."""

    content: str = ""
    calls: tuple[tuple[str | None, str], ...] = ()
    reasoning: str = ""


def told(telling: Telling, pieces: list[str]) -> Told:
    parser = PartsParser(telling)
    parts = [*(parser.feed(piece) for piece in pieces), parser.flush()]
    deltas = [call for part in parts for call in part.calls]
    named = [delta.index for delta in deltas if delta.name is not None]
    assert named == list(range(len(named)))  # each begins once, in order
    calls = join_calls(deltas)
    assert parser.num_calls == len(calls)
    return Told(
        "".join(part.content for part in parts),
        tuple((call.name, call.arguments) for call in calls),
        "".join(part.reasoning for part in parts),
    )


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}\n</tool_call>'
CALLED = ("get_weather", '{"city": "Paris", "days": [1, 2]}')
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEIRD = '{"a": "}{][ \\" \\\\ \\u00e9 </tool_call> [TOOL_CALLS]", "b": {"c": [{}]},  "d":null}'
CASES: list[tuple[Telling, str, Told]] = [
    # Hermes, Qwen2.5, Qwen3
    (HERMES, CALL, Told("", (CALLED,))),
    (HERMES, f"\n\n{CALL}\n{TIME}\n", Told("", (CALLED, ("now", "{}")))),
    (HERMES, f"Let me look.\n\n{CALL}", Told("Let me look.", (CALLED,))),
    (HERMES, f"{CALL}{TIME}", Told("", (CALLED, ("now", "{}")))),
    (HERMES, f"Hm. {CALL}\nDone.", Told("Hm.\nDone.", (CALLED,))),
    (HERMES, " plain text <b> <tool \n", Told(" plain text <b> <tool \n")),
    (HERMES, "", Told()),
    (HERMES, " \n", Told(" \n")),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', Told("", (("f", '{"x": 1}'),))),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', Told("", (("f", '{"x": 1}'),))),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', Told("", (("f", "{}"),))),
    (HERMES, '<tool_call>{"id": 7, "type": [{}], "name": "f"}', Told("", (("f", "{}"),))),
    (HERMES, '<tool_call>{"id": 7, "x": true, "arguments": {}, "name": "f"}', Told("", (("f", "{}"),))),
    *(
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {nothing}, "id": 1}}</tool_call>', Told("", (("f", "{}"),)))
        for nothing in ("null", "null ", '""', '" "')
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": null, "parameters": {"x": 1}}', Told("", (("f", '{"x": 1}'),))),
    (HERMES, '<tool_call>{"arguments": "\\n {\\"x\\"", "name": "f"}', Told("", (("f", '{"x"'),))),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\x"}</tool_call>', Told('x"}</tool_call>', (("f", "{"),))),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {WEIRD}}}</tool_call>', Told("", (("f", WEIRD),))),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}', Told("", (("f", '{"x": "é"}'),))),
    (HERMES, '<tool_call>{"arguments": "{}", "name": "f"}', Told("", (("f", "{}"),))),
    (HERMES, '<tool_call>{"name": "a\\ud83c\\udf89\\ud800\\u0000"}', Told("", (("a🎉\ufffd\x00", "{}"),))),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', Told("", (("f", '{"x": 1'),))),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "arguments": {"y": 1}}', Told("", (("f", "{}"),))),
    *(
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {written}', Told(content, (("f", '{"x": 1}'),)))
        for written, content in (
            ('{"x": 1}\n</tool_call>\n', ""),  # a brace that is missing
            ('{"x": 1}}}\n] </tool_call>', ""),  # too many
            ('{"x": 1}}\n</tool_ca', ""),
            ('{"x": 1}} }\n', ""),
            ('{"x": 1}} } Hm', "  Hm"),
            ('{"x": 1}}\n{"y": 2}</tool_call>', '\n{"y": 2}</tool_call>'),
        )
    ),
    (HERMES, f"{CALL[:-13]}}}\n{TIME}", Told("", (CALLED, ("now", "{}")))),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": {"y": 1}\n</tool_call>Hm',
        Told("Hm", (("f", '{"x": {"y": 1}\n'),)),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}{"name": "h"}</tool_call>',
        Told("", (("f", "{}"), ("g", "{}"), ("h", "{}"))),
    ),
    (HERMES, '<tool_call>{"name": "f", "argum', Told('<tool_call>{"name": "f", "argum')),
    (HERMES, f"<tool_call>\n{CALL}", Told("<tool_call>", (CALLED,))),
    (HERMES, f"{TIME}\n<tool_call>{{", Told("\n<tool_call>{", (("now", "{}"),))),
    *(
        (HERMES, text, Told(text))
        for text in (
            "a <tool_call>get_weather\n<arg_key>city</arg_key></tool_call> b",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "args": {"x": 1}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": null, "args": {"x": 1}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": nul}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "none"}</tool_call>',
            '<tool_call>{"arguments": {"x": 1}}</tool_call>',
            '<tool_call>{"name" "f"}</tool_call>',
            '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\x"}</tool_call>',
            '<tool_call>{"name": "\\u12g4"}</tool_call>',
            "</tool_call>",
        )
    ),
    (HERMES, f'<tool_call>{{"name": 5}}\n{TIME}', Told('<tool_call>{"name": 5}', (("now", "{}"),))),
    # Llama 3.1, 3.2
    (LLAMA, '{"name": "f", "parameters": {"x": "1"}}', Told("", (("f", '{"x": "1"}'),))),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', Told("", (("f", "{}"),))),
    (LLAMA, '\n{"type": "function", "name": "f", "parameters": {}}\n', Told("", (("f", "{}"),))),
    *(
        (
            LLAMA,
            f'{{"name": "f", "parameters": {{}}}}{between}{{"name": "g", "arguments": {{"y": 2}}}}',
            Told("", (("f", "{}"), ("g", '{"y": 2}'))),
        )
        for between in (";", "; ", ", ", "\n", "", ";<|python_tag|>")
    ),
    *(
        (LLAMA, text, Told(text))
        for text in (
            'Here: {"name": "f", "parameters": {}}',
            '{"city": "Paris", "days": [1, {"a": 2}]} is JSON',
            '<|python_tag|>brave_search.call(query="x")',
            "<|python",
            "  hello ",
            '{"name": "f"',
            "{",
            '{"name": "Alice", "age": 30}',
            '{"name": "f", "parameters": "none"}',
            '{"name": "f", "parameters": null} ',
            '{"name": "f", "arguments": "{}"}',
            '<|python_tag|>{"name": "f"}',
        )
    ),
    (LLAMA, '{"name": "f", "parameters": {}} That is it.', Told(" That is it.", (("f", "{}"),))),
    (LLAMA, '{"name": "f", "parameters": {}}}\n', Told("", (("f", "{}"),))),
    (LLAMA, '{"name": "f", "parameters": {}}} Hm {"x": 1}', Told(' Hm {"x": 1}', (("f", "{}"),))),
    (LLAMA, '{"name": "f", "parameters": {}}; {"x": 1}', Told('; {"x": 1}', (("f", "{}"),))),
    # Mistral: v3, v11 and later
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', Told("", (("f", '{"x": 1}'),))),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"y": [2]}, "id": "a"}]\n',
        Told("", (("f", "{}"), ("g", '{"y": [2]}'))),
    ),
    (MISTRAL, 'Hm.\n[TOOL_CALLS]f[ARGS]{"x": 1}', Told("Hm.", (("f", '{"x": 1}'),))),
    (MISTRAL, '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g-2 {"y": 2}', Told("", (("f", '{"x": 1}'), ("g-2", '{"y": 2}')))),
    (MISTRAL, "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS] {}", Told("", (("f", "{}"),))),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "parameters": {"x": 1}}]', Told("", (("f", '{"x": 1}'),))),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}]\n', Told("", (("f", '{"x": 1}'),))),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}\nHm.', Told("\nHm.", (("f", "{}"),))),
    (MISTRAL, "[TOOL_CALLS]I{x} am", Told(" am", (("I", "{x}"),))),
    *(
        (MISTRAL, f"[TOOL_CALLS]f[ARGS]{{}}{more}", Told(content, (("f", "{}"), *(("g", "{}") for _ in [1] * count))))
        for more, content, count in (
            ("g[ARGS]{}", "", 1),
            ("\ng{}\n g [ARGS] {}\n", "", 2),
            ("\n[TOOL_CALLS]g[ARGS]{}", "", 1),
            ("} ]", "", 0),
            ("}}[TOOL_CALLS]g{}", "", 1),
            ("\nDone", "\nDone", 0),
            (" Done. And", " Done. And", 0),
            (" So [TOOL_CALLS]g{}", " So", 1),
            (" So[ARGS] x", " So[ARGS] x", 0),
            ("g[ARGS]", "g[ARGS]", 0),
        )
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', Told("", (("f", "{}"),))),
    *(
        (MISTRAL, text, Told(text))
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALLS][]",
            "[TOOL_CALLS]f[X]{}",
            "[TOOL_CALLS]f/g{}",
            "[TOOL_CALLS]{[}",
            "[TOOL_CALLS] I will do",
            "[TOOL_",
            "a [TOOL_CALLS][ARGS]{}",
            "[TOOL_CALLS]" + "x" * 260 + "{}",
            "[TOOL_CALLS][1]",
            "[TOOL_CALLS]f[ARGS x{}",
            "[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}",
        )
    ),
    # DeepSeek-R1, Qwen3, QwQ
    (THINK, "<think>\nHm.\n\nYes.\n</think>\n\nFour.", Told("Four.", (), "Hm.\n\nYes.")),
    (THINK, "<think>\n\n</think>\n\nFour.\n", Told("Four.\n", (), "")),
    (THINK, "\n <think>Hm", Told("", (), "Hm")),
    (THINK, "<think>Hm\n</thin", Told("", (), "Hm\n</thin")),
    (THINK, "Four. <think>no</think>", Told("Four. <think>no</think>")),
    (THINK, "<thin", Told("<thin")),
    (THINK, " \n", Told(" \n")),
    (THINK._replace(is_inside=True), "\nHm. <think>\n</think>\n4", Told("4", (), "Hm. <think>")),
    (THINK._replace(is_inside=True), "Hm.\n", Told("", (), "Hm.")),
    (THINK._replace(is_inside=True), "\n<think>\nHm.</think>4", Told("4", (), "Hm.")),
    (THINK._replace(is_inside=True), "\n\n</think>\n4", Told("4")),
    (THINK._replace(is_inside=True), "\n<thi", Told("", (), "<thi")),
    (THINK, "<think>Hm.</think>\r\n\r\n4", Told("4", (), "Hm.")),
    (THINK._replace(thoughts=DROPPED), "<think>Hm.</think>\nFour.", Told("Four.")),
    (QWEN3, f"<think>\nI call {CALL}\n</think>\n\n{TIME}", Told("", (("now", "{}"),), f"I call {CALL}")),
    (QWEN3, f"<think>\n\n</think>\n\nWait. {CALL}", Told("Wait.", (CALLED,))),
    (QWEN3, CALL, Told("", (CALLED,))),
    (
        QWEN3._replace(thoughts=KEPT),
        f"\n<think>\nI call {CALL}\n</think>\n\n{TIME}",
        Told(f"\n<think>\nI call {CALL}\n</think>", (("now", "{}"),)),
    ),
    (
        QWEN3._replace(thoughts=KEPT, is_inside=True),
        f"\n<think>Hm.</think>\n{TIME}",
        Told("\n<think>Hm.</think>", (("now", "{}"),)),
    ),
    (HERMES._replace(is_parallel=False), f"{CALL}\n{TIME}", Told("", (CALLED,))),
    (LEADS, f"\n{CALL}\n{TIME}", Told("", (CALLED, ("now", "{}")))),
    (LEADS, f'{{"a": "{CALL}"}}', Told(f'{{"a": "{CALL}"}}')),
    (LEADS, f" <tool x {CALL}", Told(f" <tool x {CALL}")),
    (LEADS, f"{CALL}\nx {TIME}", Told(f"\nx {TIME}", (CALLED,))),
    (LEADS, f"<tool_call>no{CALL}", Told(f"<tool_call>no{CALL}")),
    (LEADS._replace(reasoning="think"), f"<think>\nHm.\n</think>\n\n{CALL}", Told("", (CALLED,), "Hm.")),
]


@pytest.mark.parametrize(("telling", "text", "expected"), CASES)
def test_given_what_a_model_wrote_when_told_then_calls_and_reasoning_are_apart_and_any_cut_gives_the_same(
    telling: Telling, text: str, expected: Told
) -> None:
    assert told(telling, [text]) == expected
    assert told(telling, list(text)) == expected
    for place in range(len(text)):
        assert told(telling, [text[:place], text[place:]]) == expected


@pytest.mark.parametrize(("telling", "text"), [case[:2] for case in CASES])
def test_given_an_answer_that_is_cut_short_anywhere_when_told_then_whole_and_streamed_are_the_same(
    telling: Telling, text: str
) -> None:
    for end in range(len(text)):
        whole = told(telling, [text[:end]])
        assert told(telling, list(text[:end])) == whole
        longer = told(telling, [text])
        for (name, arguments), (later, more) in zip(whole.calls, longer.calls, strict=False):
            assert (name, more[: len(arguments)]) == (later, arguments)


ALL = [HERMES, LEADS, LLAMA, MISTRAL, THINK, QWEN3, QWEN3._replace(thoughts=KEPT), LLAMA._replace(reasoning="think")]
WORDS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{",
    "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", "\\u00e9", "\\ud83c", '"name": "f"', '"arguments": {', "f",
    '{"name": "f", "parameters": {"x": 1}}', '"arguments": "{', "é🎉", "<", "5", "null",
]  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(telling=st.sampled_from(ALL), words=st.lists(st.sampled_from(WORDS), max_size=24), data=st.data())
def test_given_any_text_when_cut_anywhere_then_what_is_told_up_to_each_place_depends_on_the_text_alone(
    telling: Telling, words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told(telling, pieces) == told(telling, [text]) == told(telling, list(text))
    if telling.calls == "none" or telling.thoughts == KEPT:
        return
    plain = told(telling, [text])
    if not plain.calls and not plain.reasoning and "<think>" not in text:
        assert plain.content == text


@pytest.mark.parametrize("telling", [HERMES, MISTRAL, QWEN3, LLAMA._replace(reasoning="think")])
@pytest.mark.parametrize("piece", [" ", "\n", "{", "<", "[TOOL_CALLS]", '"', "a"])
@pytest.mark.parametrize("start", ["", "<think>", '<tool_call>{"name": "f", "arguments": {', '{"', "[TOOL_CALLS]["])
def test_given_a_long_text_of_one_kind_when_fed_by_the_character_then_the_time_is_linear(
    telling: Telling, piece: str, start: str
) -> None:
    parser, count = PartsParser(telling), 20_000
    parser.feed(start)
    began = time.thread_time()
    for _ in range(count):
        parser.feed(piece)
    parser.flush()
    assert time.thread_time() - began < 1.0


def test_given_arguments_when_they_are_being_written_then_they_are_told_as_they_come() -> None:
    parser = PartsParser(HERMES)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments"').calls == []
    assert parser.feed(': {"x').calls == [CallDelta(0, "f", '{"x')]
    assert parser.feed('": 1').calls == [CallDelta(0, None, '": 1')]
    assert parser.feed("}}\n</tool").calls == [CallDelta(0, None, "}")]
    assert parser.feed("_call>") == parser.flush()


def test_given_parsers_that_have_nothing_more_to_find_when_asked_then_they_say_so() -> None:
    for telling, text in ((THINK, "<think>a</think>\n\nb"), (THINK, "b"), (LLAMA, " b"), (LEADS, " b")):
        parser = PartsParser(telling)
        states = [(parser.feed(letter), parser.is_over)[1] for letter in text]
        assert states == [False] * (len(text) - 1) + [True]
    parser = PartsParser(QWEN3)
    parser.feed("<think>")
    assert parser.is_inside
    parser.feed("a</think>b")
    assert (parser.is_inside, parser.is_over) == (False, False)


QWEN25_TEMPLATE = (
    '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>'
)
LLAMA_TEMPLATE = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (QWEN25_TEMPLATE, "hermes", "none"),
        (QWEN25_TEMPLATE + "{{- '<think>\\n\\n</think>\\n\\n' }}", "hermes", "think"),
        ("<tool_call>\n<function=name>\n{{ 'arguments' }} \"arguments\"", "none", "none"),
        ('<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> "arguments"', "none", "none"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral", "none"),
        (LLAMA_TEMPLATE, "llama3_json", "none"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json", "none"),
        ("{% if '</think>' in content %}<｜tool▁calls▁begin｜>", "none", "think"),
        ("{{ messages[0].content }}", "none", "none"),
    ],
)
def test_given_a_template_when_parsers_are_chosen_then_they_are_those_of_what_it_shows(
    template: str, calls: str, reasoning: str
) -> None:
    assert choose_parsers("auto", "auto", [template], has_thoughts=False) == Parsers(calls, reasoning)
    assert choose_parsers("auto", "auto", ["x", template], has_thoughts=True) == Parsers(calls, "think")
    assert choose_parsers("mistral", "none", [template], has_thoughts=True) == Parsers("mistral", "none")


def test_given_a_prompt_when_it_ends_with_an_opening_mark_then_the_answer_begins_inside() -> None:
    assert ends_inside("<|im_start|>assistant\n<think>\n")
    assert not ends_inside("<think>\n\n</think>\n\n")


def test_given_a_call_when_it_is_named_then_its_id_depends_on_its_place_alone_and_fits_the_model() -> None:
    ids = {call_id("hermes", answer, choice, index) for answer in "ab" for choice in (0, 1) for index in (0, 1)}
    assert len(ids) == 8
    assert call_id("hermes", "a", 0, 0) in ids
    assert all(name.startswith("call_") and len(name) == 29 for name in ids)
    short = call_id("mistral", "a", 0, 0)
    assert len(short) == 9
    assert short.isalnum()
    assert json.loads(CALLED[1])["days"] == [1, 2]
