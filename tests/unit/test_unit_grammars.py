"""From a schema, a regex, a choice or Lark to the grammar that travels; what of it is refused, and in which words."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from gateway.asked_calls import asked_calls, calls_or, schema_of
from gateway.asked_grammar import Asked, asked_grammar
from gateway.schemas import ChatRequest, CompletionRequest, parse, without_prompt
from gateway.text_child import TextWork
from gateway.text_jobs import TEXT_SCHEMA, Done, GrammarJob, Refused
from novainfer.errors import InvalidRequestError
from novainfer.sampling import grammars
from novainfer.sampling.grammars import (
    CALLS,
    CHOICE,
    INSTEAD,
    JSON,
    LARK,
    REGEX,
    Thoughts,
    check_grammar,
    make_grammar,
    new_matcher,
)
from novainfer.sampling.params import MAX_GRAMMAR_BYTES, SamplingParams, validate
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.parts import ALLOWED, BARRED, BEGUN, ends_behind, ends_inside
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

PLAIN = Thoughts("<think>", "</think>", are_special=False, is_inside=False)
SPECIALS = ("<think>", "</think>", "<|im_end|>")
SPECIAL_IDS = {"<think>": 257, "</think>": 258}  # in the stand-in's vocabulary, after its end of text
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def fits(grammar: str, text: str, *, special: bool = False) -> bool:
    """Whether the grammar allows this text, and an end after it; special: with thoughts between special tokens."""
    check_grammar(grammar, SPECIALS)
    ids: list[int] = []
    while text:
        mark = next((mark for mark in SPECIAL_IDS if special and text.startswith(mark)), None)
        ids += text[0].encode() if mark is None else [SPECIAL_IDS[mark]]
        text = text[len(mark or "x") :]
    matcher = new_matcher(grammars._byte_tokenizer(SPECIALS), grammar)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def map_of(names: Any, **more: Any) -> str:
    """A schema of numbers by names: as schemas made of types write a map."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    return json.dumps({**schema, "$defs": {"E": {"type": "string", "title": "E", "enum": ["a", "b"]}}, **more})


# References inside of `m` begin there.
EMBEDDED = json.dumps({
    "properties": {
        "m": {"$id": "http://x/m", "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["b"]}}},
    },
    "$defs": {"E": {"enum": ["a"]}},
})  # fmt: skip


def maps_in_maps(levels: int) -> str:
    """A short schema, each level of which would be written out ten times in the one around it."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "propertyNames": {"enum": [*"abcdefghij"]}, "additionalProperties": schema}
    return json.dumps(schema)


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        (
            JSON,
            json.dumps(PERSON),
            ['{"name": "é", "age": 5}', '{"name":"x"}', '{\n  "name": "x"\n}'],
            ["{}", " {}", "5"],
        ),
        (JSON, "{}", ["5", '"x"', "[1, 2, {}]", "null"], ["", "x", "[1,", "[1,  2]"]),
        (JSON, '{"type": "object"}', ["{}", '{"a": [1]}'], ["[]", "1"]),
        (JSON, '{"enum": ["a", 1]}', ['"a"', "1"], ["a", "2"]),
        (JSON, map_of({"type": "string", "description": "any"}), ["{}", '{"x": 1}'], ['{"x": "y"}']),
        (JSON, map_of(True), ["{}", '{"x": 1}'], ['{"x": "y"}']),
        (JSON, map_of({"enum": ["a", "b"]}), ["{}", '{"a": 1, "b": 2}', '{"b": 2}'], ['{"c": 1}', '{"a": "y"}']),
        (JSON, map_of({"$ref": "#/$defs/E"}, required=["b"]), ['{"b": 2}'], ["{}", '{"b": 1, "c": 1}']),
        (JSON, map_of({"$ref": "#/$defs/E"}, title="id", **{"$id": "http://x/y"}), ['{"a": 1}'], ['{"c": 1}']),
        (JSON, map_of({"enum": ["a"]}, minProperties=1, additionalProperties=True), ['{"a": []}'], ["{}", '{"c": 1}']),
        (JSON, map_of({"enum": ["a"]}, additionalProperties=False), ["{}"], ['{"a": 1}']),
        (JSON, map_of({"type": "string", "pattern": "^[a-c]$"}), ["{}", '{"c": 1}'], ['{"d": 1}', '{"c": "x"}']),
        (JSON, json.dumps({"type": "string", "format": "password"}), ['"x y"', '""'], ["5"]),
        (REGEX, "[0-9]{3}-/x", ["123-/x"], ["12-/x", "123-/x1"]),
        (REGEX, 'a"\\n|\\/', ['a"\n', "/"], ["a", ""]),
        (CHOICE, '["yes", "no", "ye\\"s\\n", "\\\\d"]', ["yes", "no", 'ye"s\n', "\\d"], ["y", "yesno", "5", ""]),
        (CHOICE, '["\\u007f %llguidance"]', ["\x7f %llguidance"], ["x"]),
        (JSON, '{"const": "%llguidance"}', ['"%llguidance"'], ["x"]),
        (CHOICE, '["", "a"]', ["", "a"], ["aa"]),
        (LARK, 'start: "(" start ")" | "x"', ["x", "((x))"], ["(x", ")"]),
    ],
)
def test_given_a_source_when_its_grammar_is_made_then_it_allows_what_that_says(
    kind: str, source: str, right: list[str], wrong: list[str]
) -> None:
    grammar = make_grammar(kind, source, None)
    validate(SamplingParams(grammar=grammar), vocab_size=10)
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


@pytest.mark.parametrize("special", [False, True], ids=["plain marks", "special marks"])
@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (JSON, json.dumps(PERSON), '{"name": "x"}'),
        (REGEX, "[a-c]+", "abc"),
        (CHOICE, '["yes", "no"]', "no"),
        (LARK, 'start: "{" start "}" | "x"', "{x}"),
    ],
)
def test_given_a_model_that_thinks_when_a_grammar_is_made_then_a_thought_may_come_before_its_text(
    kind: str, source: str, text: str, special: bool
) -> None:
    thoughts = PLAIN._replace(are_special=special)
    grammar = make_grammar(kind, source, thoughts)
    for before in ("", "<think></think>", "<think>\nHm\n{ 5 </thin </think>\n\n", "<think>é</think> "):
        assert fits(grammar, before + text, special=special), before
    for before in ("<think>", "x", "<think>a</think>" + "\n" * 9, "a</think>", "<think>a</think><think>a</think>"):
        assert not fits(grammar, before + text, special=special), before
    begun = make_grammar(kind, source, thoughts._replace(is_inside=True))
    for before in ("</think>", "\nHm\n</think>\n\n"):
        assert fits(begun, before + text, special=special), before
    assert not fits(begun, text, special=special)


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "string"}}, "required": ["a"]}
    return schema


UNREAD = {"type": "string", "contentEncoding": "base64"}
HIDDEN = {
    "default": {"v": UNREAD},
    "$defs": {"a": {"const": UNREAD, "properties": {"b": {"examples": [UNREAD]}}}},
    "foo": {"const": UNREAD, "$anchor": "bar"},
}
REFERENCES = [
    "#/default/v", "#/%64efault/v", "#/$defs/a/const", "#/%24defs/a%2Fconst", "#/foo/const", "#/foo", "#/$defs",
    "#/$defs/a/properties", "#/$defs/a/properties/b/examples/0", "#/", "#bar", "http://localhost/x", "x#/default/v",
]  # fmt: skip
NAMED = {
    name: {"$ref": target}
    for name, target in {
        "b": "#/properties/const", "c": "#/properties/a/items/0", "d": "#/properties/%63onst",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (JSON, "{", "no JSON schema"),
        (JSON, "[]", "must be an object"),
        (JSON, "true", "must be an object"),
        (JSON, '{"minimum": NaN}', "no JSON schema"),
        (JSON, '{"exclusiveMinimum": 1e999, "maximum": Infinity}', "no JSON schema"),
        (JSON, '{"exclusiveMinimum": 1' + "0" * 400 + ', "maximum": 1.5}', "beyond 2"),
        (JSON, '{"allOf": [{"exclusiveMaximum": -1' + "0" * 400 + '}], "minimum": -1e999}', "beyond 2"),
        (JSON, '{"type": "strang"}', "Invalid type: strang"),
        (JSON, '{"not": {}}', 'Unimplemented keys: ["not"]'),
        (JSON, '{"properties": {"a": {"items": [{"uniqueItems": true}]}}}', "uniqueItems|items"),
        (JSON, '{"items": {"dependencies": {"a": ["b"]}}}', "'dependencies' is not supported"),
        (JSON, '{"x-guidance": {"lenient": true}}', "'x-guidance' is not supported"),
        (JSON, '{"format": "phone", "type": "string"}', "Unknown format"),
        *[
            (JSON, source, "propertyNames")
            for source in (
                map_of({"type": "string", "maxLength": 3}),
                map_of({"type": ["string", "null"], "enum": ["a"]}),
                map_of({"enum": ["a", 5]}),
                map_of({"enum": {"a": 5}}),
                map_of({"pattern": "a"}, properties={"b": {}}),
                map_of({"$ref": "#/$defs/F"}),
                map_of(False),
                map_of({"enum": [f"n{i}" for i in range(4000)]}),
                maps_in_maps(30),
                map_of({"$ref": "#/$defs/E"}, items={"$ref": "#/additionalProperties"}),
                map_of({"enum": ["a"]}, items={"$ref": "#/propertyNames"}),
                EMBEDDED,
                json.dumps(
                    {"$defs": {"e": {"enum": [""] * 8000}}, "anyOf": [{"propertyNames": {"$ref": "#/$defs/e"}}] * 500}
                ),
            )
        ],
        (
            JSON,
            json.dumps(
                {"$defs": {"e": {"pattern": "a" * 9999}}, "anyOf": [{"propertyNames": {"$ref": "#/$defs/e"}}] * 500}
            ),
            f"more than {MAX_GRAMMAR_BYTES} bytes",
        ),
        (JSON, '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf is only supported .* use anyOf"),
        (JSON, '{"items": {"oneOf": [{"const": 1}, {"const": 2}]}}', "oneOf is only supported .* use anyOf"),
        (JSON, '{"$ref": "#"}', "No text fits"),
        (
            JSON,
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
            "No text fits",
        ),
        *[
            (JSON, json.dumps({"type": "object", "properties": {"a": {"$ref": target}}, **HIDDEN}), "must be # or lead")
            for target in REFERENCES
        ],
        (LARK, "start: %json " + json.dumps({"$ref": "#/default/v", **HIDDEN}), "must be # or lead"),
        (LARK, "start: %lark {\n" * 20 + 'start: "a"' + "\n}" * 20, "^lark grammar too deeply nested"),
        (JSON, '{"pattern": "a(?=b)", "type": "string"}', "look-around"),
        (JSON, deep(200), "recursion limit"),
        (JSON, deep(50_000), "recursion|more than"),
        (JSON, json.dumps({"const": "x" * MAX_GRAMMAR_BYTES}), f"more than {MAX_GRAMMAR_BYTES} bytes"),
        (JSON, json.dumps({"properties": {f"k{i}": {"pattern": "[a-z]{9}"} for i in range(900)}}), "optional|too dear"),
        (REGEX, "", "empty"),
        (REGEX, "a(", "unclosed group"),
        (REGEX, "(((a{1,200}){1,200}){1,200}){1,200}", "too many expressions"),
        (REGEX, "[^\\s\\S]", "No text fits"),
        (REGEX, "(" * 5000 + ")" * 5000, "regex"),
        (CHOICE, "[]", "one or more texts"),
        (CHOICE, json.dumps(["x"] * 5000), "at most 4096"),
        (LARK, "", "no start rule"),
        (LARK, "start: a", 'unknown name: "a"'),
        (LARK, "start: <|nope|>", "unknown special token"),
        (LARK, "start: " + '"a"?' * 5000, "items|too dear|too complex"),
        (LARK, 'start: s\ns: s s | "a" | "b"', "too ambiguous"),
        (LARK, 'start: s\ns: s s s | s s | "a"', "too ambiguous"),
        (LARK, 'start: e\ne: e "+" e | e "*" e | e e | /[a-z]/', "too ambiguous"),
        (JSON, '{"const": "\\ud800"}', "surrogate"),
        (CHOICE, '["\\ud800"]', "surrogate"),
        (JSON, '{"items": {"enum": [1, {"a": [9007199254740993]}]}}', "beyond 2"),
        (JSON, '{"minimum": -9007199254740993}', "beyond 2"),
        (JSON, '{"contentEncoding": "base64", "type": "string"}', "'contentEncoding' is not supported"),
        (JSON, '{"items": {"nullable": true}}', "'nullable' is not supported"),
        (JSON, '{"items": {"nullable": null}}', "'nullable' is not supported"),
        (LARK, "start: x\nx[max_tokens=3]: /a+/", "'max_tokens' is not supported"),
        (LARK, 'start: "[" x /[/] "]"/\nx[capture="n",\nmax_tokens=3]: /a+/', "lexer error"),
        (LARK, 'start: /[\n"]/ x\nx[capture="n",\nmax_tokens=3]: /a+/', "'max_tokens' is not supported"),
        (LARK, 'start: %json {"const": "}"} x\nx[max_tokens=3]: /a+/', "'max_tokens' is not supported"),
        (LARK, 'start: "a" %json {"maximum": 9007199254740993}', "beyond 2"),
        (LARK, 'start: "a" %json\n{"items": {"maxItems": 30000}}', "maxItems is more than 20000"),
        (LARK, 'start: "a" %json {"items": {"nullable": true}}', "'nullable' is not supported"),
        (LARK, 'start: "a" %json {"items": ', "no JSON schema"),
        (LARK, 'start: "a" %json ' + '{"items": ' * 100_000, "no JSON schema"),
        (LARK, "start: x\nx[capture, temperature = 0.5]: /a+/", "'temperature' is not supported"),
        (LARK, 'start: "a"\n  %llguidance {"no_forcing": false}', "options"),
        (LARK, 'start: "a" %llguidance {"no_forcing": false}', "."),
        (LARK, 'start: "a{30000}" "a"{30000}', "more than 20000 times"),
        (LARK, "start: <[260]>", "by their ids"),
        (LARK, 'start: "a" x\nx: /[<]/ <[30-31,5]>', "by their ids"),
        *[
            (kind, source, "more than 20000 times")
            for kind, source in (
                (LARK, 'start: "a"~99999999'),
                (LARK, 'start: "a" ~ 1 .. 99999999'),
                (LARK, 'start: "a"~ // a comment\n +20001'),
                (LARK, 'start: "a"{1, // a comment\n 20001}'),
                (LARK, 'start: A\nA: "a"~1..20001'),
                (REGEX, "(?x:a{9 9 9 9 9 9})"),
                (REGEX, "\\\\{30000}"),
                (REGEX, "\\{\\\\\\\\{30000}"),
                (JSON, '{"pattern": "\\\\\\\\{30000}"}'),
                (REGEX, "(?x)a{1, 9 9 9\n9 9 9}"),
                (JSON, '{"pattern": "(?x:a{9 9\\t9 9 9})"}'),
            )
        ],
        (REGEX, "a{3,20001}", "more than 20000 times"),
        (JSON, '{"items": {"pattern": "a{20001}"}}', "more than 20000 times"),
        (JSON, '{"patternProperties": {"a{0,123456789}": {}}}', "more than 20000 times"),
        (JSON, '{"items": {"maxLength": 20001}}', "maxLength is more than 20000"),
        (JSON, '{"properties": {"a": {"minItems": 1e5}}}', "minItems is more than 20000"),
        (JSON, json.dumps({"properties": {f"k{i}": {} for i in range(300)}}), "fewer optional properties"),
        (LARK, "start: " + "(" * 9000 + '"a"' + ")" * 9000, "nested"),
        (LARK, '%llguidance {"no_forcing": false}\nstart: "a"', "options"),
        (LARK, 'start: %json {"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented"),
    ],
)
def test_given_what_is_no_grammar_or_too_much_of_one_when_checked_then_it_is_refused_in_words(
    kind: str, source: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words.replace("[", "\\[")) as caught:
        check_grammar(make_grammar(kind, source, None), SPECIALS, grammars.BUILD_SECONDS)
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (JSON, {"properties": {f"opt_{i}": {"type": "string"} for i in range(200)}}),
        (JSON, nested(60)),
        (JSON, {"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        (
            JSON,
            {
                "oneOf": [
                    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"
                ]
            },
        ),
        (JSON, {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5 + 1}),
        (JSON, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        (JSON, {"type": "number", "exclusiveMinimum": 5, "maximum": 10, "multipleOf": 0.5}),
        (JSON, {"type": "string", "exclusiveMinimum": 0, "maximum": 0.5}),
        (JSON, {"enum": [f"{i:05d}" for i in range(6000)]}),
        (JSON, {"type": "array", "items": {"properties": {f"p{i}": {"type": "integer"} for i in range(40)}}}),
        (JSON, {"type": "string", "minLength": 1500}),
        (JSON, {"type": "string", "maxLength": 20000}),
        (JSON, {"properties": {"maxLength": {"enum": [30000, "a{30000}"]}}}),
        (JSON, {"properties": {"a": {"type": "string", "nullable": False}}}),
        (REGEX, "[a-z]{3,9000}|a\\{30000\\}|\\\\\\{30000\\}"),
        (JSON, {"properties": {"const": {"type": "null"}, "a": {"items": [{}, {"$ref": "#"}]}, **NAMED}}),
        (LARK, 'start: "[max_tokens=3]" /\\[temperature=[0-9]+/ x // [max_tokens=3]\nx: "\\"[max_tokens="'),
        (
            LARK,
            'start: %json {"const": "[max_tokens=5] %json {"} | %json {"x-guidance": {"lenient": true}, "enum": [2]}',
        ),
        (LARK, 'start: e\ne: t | e "+" t\nt: f | t "*" f\nf: "(" e ")" | /[a-z0-9]+/'),
        (LARK, 'start: s\ns: "a" s | "a"'),
        (LARK, 'start: A "~99999" "b"~2..30 /~99999/ // ~99999\nA: "a"~200 ~/b/'),
        (LARK, 'start: "<[260]>" /<[0-9]/ <|im_end|> // <[260]>\n# <[5]>'),
    ],
)
def test_given_large_but_ordinary_forms_when_checked_then_they_are_taken(kind: str, schema: Any) -> None:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    check_grammar(make_grammar(kind, source, None), SPECIALS, 4 * grammars.BUILD_SECONDS)


def chain(count: int, rule: str) -> str:
    """Lark of so many names, each of which leads to the next."""
    name, last = rule.partition(":")[0], count - 2
    rules = [rule.format(i, i + 1) for i in range(last)]
    return "\n".join([f"start: {name.format(0)}", *rules, f'{name.format(last)}: "a"\n'])


def refs(count: int, schema: str) -> str:
    """A schema of so many references, each of which leads to the next."""
    named = {f"d{i}": json.loads(schema.replace("$next", f"#/$defs/d{i + 1}")) for i in range(count - 1)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": named | {f"d{count - 1}": {"type": "null"}}}).replace(" ", "")


CHAINS = ["r{0}: r{1}", 'r{0}: "a" r{1}', "r{0}: r{1}?", "A{0}: A{1}", 'A{0}: ("b" A{1})* "c"', "r{0}: ((r{1}))"]
REFS = [
    '{"$ref":"$next"}',
    '{"items":{"$ref":"$next"}}',
    '{"allOf":[{"$ref":"$next"}]}',
    '{"anyOf":[{"$ref":"$next"}]}',
]
DEEP = [(LARK, rule) for rule in CHAINS] + [(JSON, schema) for schema in REFS]


def linked(kind: str, link: str, count: int) -> str:
    return refs(count, link) if kind == JSON else chain(count, link)


@pytest.mark.parametrize(("kind", "link"), DEEP)
def test_given_names_that_lead_to_each_other_when_there_are_many_then_as_many_as_may_be_are_built_and_no_more(
    kind: str, link: str
) -> None:
    code = (
        "import sys\n"
        "from novainfer.errors import InvalidRequestError\n"
        "from novainfer.sampling import grammar_checks, grammars\n"
        "grammar_checks.MAX_NAMES = int(sys.argv[3])\n"
        "try:\n"
        "    grammars.check_grammar(grammars.make_grammar(*sys.argv[1:3], None))\n"
        "except InvalidRequestError as error:\n"
        "    print(error.message)\n"
    )
    size = len(linked(kind, link, 1000)) / 1000
    most = min(int(60_000 / size), 6000)
    for count, bound in ((1000, 1000), (most, 10_000)):  # the stack is enough for those that are refused, too
        command = [sys.executable, "-c", code, kind, linked(kind, link, count), str(bound)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), count
        assert "at most" not in done.stdout
    with pytest.raises(InvalidRequestError, match="at most 1000"):
        make_grammar(kind, linked(kind, link, 1002), None)


@pytest.mark.parametrize(
    "part", ["/\\", "[", '"\\', '%json {"', "%json {\n", "[max_tokens ", "%json ", '%json {"a":"\n', "{1 ", " "]
)
def test_given_a_grammar_that_is_looked_at_when_parts_repeat_then_the_time_grows_with_its_length(part: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        make_grammar(LARK, 'start: "a"{1' + part * (200_000 // len(part)), None)
    assert time.thread_time() - began < 0.5


EXCLUDED = [
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
    {"exclusiveMinimum": 0, "maximum": 0.5},
    {"exclusiveMinimum": 3.0, "exclusiveMaximum": 3.1},
    {"exclusiveMaximum": 0, "minimum": -0.5},
    {"minimum": -3.5, "exclusiveMaximum": -3},
    {"type": ["string", "number"], "exclusiveMinimum": 0, "maximum": 0.5, "minimum": 0},
    {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
    {"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}]},
    {"exclusiveMinimum": 0, "oneOf": [{"type": "null"}, {"maximum": 0.5}]},
    {"exclusiveMaximum": 0, "allOf": [{"allOf": [{"minimum": -0.5}]}]},
    {"maximum": 0.5, "anyOf": [{"exclusiveMinimum": 0}, {"type": "null"}]},
    {"anyOf": [{"maximum": 0.5}], "oneOf": [{"exclusiveMinimum": 0}]},
    {"allOf": [{"anyOf": [{"maximum": 0.5}]}, {"exclusiveMinimum": 0}]},
    {"exclusiveMinimum": 0, "$ref": "#/$defs/small", "$defs": {"small": {"maximum": 0.5}}},
    {"maximum": 0.5, "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"exclusiveMinimum": 0}}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"maximum": 0.5}], "$defs": {"a": {"exclusiveMinimum": 0}}},
]
APART = [
    {"anyOf": [{"exclusiveMinimum": 0, "maximum": 5}, {"exclusiveMaximum": 0, "minimum": -5}]},
    {"exclusiveMinimum": 0, "anyOf": [{"minimum": 3}, {"exclusiveMinimum": 5}]},
    {"exclusiveMinimum": 0.5, "anyOf": [{"maximum": 3}]},
    {"type": "integer", "exclusiveMinimum": 0, "anyOf": [{"maximum": 3}, {"maximum": 5}]},
    {"exclusiveMinimum": 0, "maximum": 5, "anyOf": [{"type": "number"}, {"type": "null"}]},
    {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 5}]},
    {"$ref": "#/$defs/a", "description": "x", "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}}},
    {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"type": "number", "maximum": 0.5}}}],
        "$defs": {"a": {"type": "object", "properties": {"x": {"type": "number", "exclusiveMinimum": 0}}}},
    },
]


@pytest.mark.parametrize("bounds", APART, ids=str)
def test_given_bounds_that_do_not_meet_when_checked_then_they_are_taken(bounds: dict[str, Any]) -> None:
    check_grammar(make_grammar(JSON, json.dumps(bounds), None))


def test_given_references_that_lead_to_each_other_when_bounds_are_looked_at_then_the_time_grows_with_their_number() -> (
    None
):
    count = 800
    named = {f"d{i}": {"exclusiveMinimum": i, "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**named, f"d{count}": {"anyOf": [{"$ref": "#/$defs/d0"}] * 200}}}
    began = time.thread_time()
    make_grammar(JSON, json.dumps(schema).replace(" ", ""), None)
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("bounds", EXCLUDED, ids=str)
def test_given_an_excluded_bound_that_would_be_allowed_when_checked_then_it_is_refused(bounds: dict[str, Any]) -> None:
    inner = {name: value for name, value in bounds.items() if name != "$defs"}
    defined = {"$defs": bounds.get("$defs", {})}
    for schema in (bounds, {"items": {"type": "number"} | inner, **defined}):
        with pytest.raises(InvalidRequestError, match="exclusive bound"):
            make_grammar(JSON, json.dumps(schema), None)


def test_given_any_two_bounds_that_are_taken_when_numbers_are_written_then_none_is_outside() -> None:
    bounds = [None, -3.5, -3, -1, -0.5, 0, 0.25, 1, 1.5, 3, 10]
    texts = ["-3.5", "-3", "-1", "-0.5", "-0", "0", "0.25", "1", "1.5", "3", "10"]
    taken = 0
    for low, high, least, most in itertools.product(
        bounds, bounds, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ):
        schema = {"type": "number"} | ({} if low is None else {least: low}) | ({} if high is None else {most: high})
        if low is not None and high is not None and low >= high:
            continue
        try:
            grammar = make_grammar(JSON, json.dumps(schema), None)
        except InvalidRequestError:
            assert low is not None
            assert high is not None
            assert high - low < 1
            continue
        taken += 1
        start = new_matcher(grammars._byte_tokenizer(()), grammar)
        for text in texts:
            matcher, number = start.deep_copy(), float(text)
            if matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting():
                assert low is None or number > low or (number == low and least == "minimum"), (schema, text)
                assert high is None or number < high or (number == high and most == "maximum"), (schema, text)
    assert taken > 200


def test_given_property_names_and_values_like_keywords_when_checked_then_they_are_no_keywords() -> None:
    schema = {"properties": {"dependencies": {"enum": [{"extends": 1}], "default": {"divisibleBy": 2}}}}
    check_grammar(make_grammar(JSON, json.dumps(schema), None))


def test_given_a_time_limit_when_a_grammar_is_dearer_then_it_is_refused() -> None:
    grammar = make_grammar(CHOICE, json.dumps([f"word {i}" for i in range(2000)]), None)
    check_grammar(grammar)
    with pytest.raises(InvalidRequestError, match="too dear"):
        check_grammar(grammar, (), 1e-6)


def test_given_no_llguidance_when_a_grammar_is_asked_for_then_that_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for use in (lambda: make_grammar(REGEX, "abc", None), lambda: check_grammar('start: "never seen before"')):
        with pytest.raises(InvalidRequestError, match="has no llguidance"):
            use()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": 5}, "grammar"),
        ({"grammar": None}, "grammar"),
        ({"grammar": ' {"grammars": []}'}, "grammar"),
        ({"grammar": "\ud800"}, "grammar"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "grammar"),
        ({"grammar": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "grammar"),
        ({"grammar": 'start: "a"', "min_tokens": 1}, "min_tokens"),
    ],
)
def test_given_parameters_with_a_wrong_grammar_when_validated_then_the_field_is_named(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(SamplingParams(**fields), vocab_size=10)
    assert caught.value.param == param


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "integer"}


def test_given_a_request_when_asked_for_its_form_then_each_field_says_it() -> None:
    def of_chat(**fields: Any) -> Asked | None:
        return asked_grammar(parse(ChatRequest, CHAT | fields, strict_params=True)[0])

    named = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
    assert of_chat() is of_chat(response_format={"type": "text"}) is None
    assert of_chat(response_format=None, structured_outputs=None) is None
    for wrong in ({}, {"json": None}, {"regex": "\ud800"}):
        with pytest.raises(InvalidRequestError) as caught:
            of_chat(structured_outputs=wrong)
        assert caught.value.param == "structured_outputs"
    for about in ({"name": "a b"}, {"name": "x" * 65}, {"name": "n", "description": 5}):
        with pytest.raises(InvalidRequestError):
            of_chat(response_format={"type": "json_schema", "json_schema": about | {"schema": {}}})
    assert of_chat(response_format={"type": "json_object"}) == Asked("response_format", JSON, '{"type": "object"}')
    schema = Asked("response_format", JSON, '{"type": "integer"}')
    for more in ({"schema": SCHEMA}, {"value": SCHEMA}, {"schema": None, "value": SCHEMA}):
        assert of_chat(response_format={"type": "json_object", **more}) == schema
    assert of_chat(response_format={"type": "json", "value": SCHEMA}) == schema
    for given in (
        {"type": "json"},
        {"type": "json", "schema": SCHEMA},
        {"type": "json_object", "schema": "{}"},
        {"type": "json_object", "schema": SCHEMA, "value": SCHEMA},
        {"type": ["json_object"], "schema": SCHEMA},
        {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": named, "value": SCHEMA},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            of_chat(response_format=given)
        assert caught.value.param == "response_format", given
    assert of_chat(response_format={"type": "json_schema", "json_schema": named}) == schema
    text = parse(CompletionRequest, {"prompt": "x", "structured_outputs": {"choice": ["é"]}}, strict_params=True)[0]
    assert asked_grammar(text) == Asked("structured_outputs", CHOICE, '["é"]')
    fields = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": named}}
    assert asked_grammar(parse(CompletionRequest, fields, strict_params=True)[0]) == schema
    assert of_chat(structured_outputs={"json": SCHEMA}) == of_chat(structured_outputs={"json": '{"type": "integer"}'})
    assert of_chat(structured_outputs={"regex": "a"}) == Asked("structured_outputs", REGEX, "a")
    assert of_chat(structured_outputs={"grammar": "start: x"}) == Asked("structured_outputs", LARK, "start: x")
    with pytest.raises(InvalidRequestError, match="cannot be combined") as caught:
        of_chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"
    of_chat(structured_outputs={"regex": "a" * MAX_GRAMMAR_BYTES})
    with pytest.raises(InvalidRequestError, match="more than") as caught:
        of_chat(structured_outputs={"regex": "a" * (MAX_GRAMMAR_BYTES + 1)})
    assert caught.value.param == "structured_outputs"


def test_given_a_request_when_its_prompt_is_made_then_the_grammar_is_all_that_is_kept_of_its_form() -> None:
    body = CHAT | {"response_format": {"type": "json_object"}, "structured_outputs": {}}
    request = parse(ChatRequest, body, strict_params=True)[0]
    kept = without_prompt(request, 'start: "a"')
    assert (kept.response_format, kept.structured_outputs) == (None, {"grammar": 'start: "a"'})
    assert without_prompt(request).structured_outputs is None


def test_given_a_tool_choice_when_the_prompt_is_made_then_nothing_is_kept_of_it() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f", "more": "x" * 1000}}
    request = parse(ChatRequest, CHAT | {"tools": tools, "tool_choice": named}, strict_params=False)[0]
    kept = without_prompt(request)
    assert (kept.tools, kept.tool_choice) == ([], None)


@pytest.mark.parametrize("special", [False, True], ids=["plain marks", "special marks"])
@pytest.mark.parametrize("thoughts", [None, PLAIN._replace(opening="<hm>", closing="</hm>")], ids=["plain", "thinks"])
def test_given_calls_that_are_demanded_when_their_grammar_is_made_then_it_allows_them_alone(
    special: bool, thoughts: Thoughts | None
) -> None:
    city = {"type": "object", "properties": {"c": {"$ref": "#/$defs/C"}}, "required": ["c"], "$schema": "x"}
    city |= {"additionalProperties": False, "$defs": {"C": {"enum": ["Oslo"]}}}
    schema = schema_of([{"name": "f", "parameters": city}, {"name": "g"}])
    # The marks of thoughts stand for those of calls: the stand-in knows no others.
    source = {"schema": schema, "marks": SPECIALS[:2], "are_special": special, "is_many": True}
    f = '<think>\n{"name": "f", "arguments": {"c": "Oslo"}}\n</think>'
    g = '<think>\n{"name": "g", "arguments": {"x": [1]}}\n</think>'
    grammar = make_grammar(CALLS, json.dumps(source), None)
    for text in (f, g, f"{f}\n{g}\n{f}"):
        assert fits(grammar, text, special=special), text
    for text in (
        "",
        "x",
        f"x{f}",
        f"{f}x",
        f"{f}\n",
        "\n".join([f] * 17),
        f.replace("Oslo", "Rome"),
        f.replace('"f"', '"h"'),
    ):
        assert not fits(grammar, text, special=special), text
    one = make_grammar(CALLS, json.dumps(source | {"is_many": False}), thoughts)
    assert fits(one, f, special=special)
    assert not fits(one, f"{f}\n{g}", special=special)
    assert fits(one, f"<hm>x</hm>\n\n{g}", special=special) == (thoughts is not None)
    either = make_grammar(CALLS, json.dumps(source | {INSTEAD: PERSON}), thoughts)
    for text in (f, f"{f}\n{g}", '{"name": "x"}'):
        assert fits(either, text, special=special), text
    for text in ("", f'{f}\n{{"name": "x"}}', f'{{"name": "x"}}\n{f}', "5"):
        assert not fits(either, text, special=special), text
    assert fits(either, '<hm>x</hm>\n\n{"name": "x"}', special=special) == (thoughts is not None)


def test_given_tools_beside_a_form_when_looked_at_then_calls_may_come_in_its_place_where_the_model_knows_how(
    tokenizer: Tokenizer,
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"not": {}}}} for name in ("f", "g", "f")]
    body = CHAT | {"tools": tools, "response_format": {"type": "json_object"}}

    def offered(form: str = "hermes", **fields: Any) -> Asked | None:
        request = parse(ChatRequest, body | fields, strict_params=True)[0]
        answer = asked_grammar(request)
        assert answer is not None
        return calls_or(request, answer, form, tokenizer)

    more: list[dict[str, Any]] = [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}]
    for fields in more:
        asked = offered(**fields)
        assert asked is not None
        assert (asked.param, asked.kind) == ("response_format", CALLS)
        source = json.loads(asked.source)
        assert source[INSTEAD] == {"type": "object"}
        assert source["schema"]["properties"]["name"] == {"enum": ["f", "g"]}
        assert source["is_many"] == fields.get("parallel_tool_calls", True)
    said = [{"role": "assistant", "content": "{"}]
    more = [
        {"tools": []},
        {"tool_choice": "none"},
        {"form": "llama3_json"},
        {"response_format": None, "structured_outputs": {"regex": "a"}},
        {"messages": said, "continue_final_message": True},
    ]
    for fields in more:
        assert offered(**fields) is None, fields


@pytest.mark.parametrize(
    "functions",
    [
        *[[{"name": "f", "parameters": wrong}] for wrong in (5, 0, False, "", [], "x")],
        *[[{"name": "f", "parameters": {"type": kind}}] for kind in ("string", ["object", "null"], [], None, 5)],
        [{"name": "f", "parameters": {"$defs": 5}}],
        [{"name": "f", "parameters": {"items": [{"$ref": "#/properties/a"}]}}],
        [{"name": "f", "parameters": {"items": [{"$ref": "#/$defs/a/const"}], "$defs": {"a": {"const": {}}}}}],
        [
            {"name": name, "parameters": {"$defs": {"A": {"type": kind}}}}
            for name, kind in (("f", "string"), ("g", "null"))
        ],
    ],
)
def test_given_functions_whose_schemas_do_not_go_together_when_a_call_is_demanded_then_tools_is_named(
    functions: list[dict[str, Any]],
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema_of(functions)
    assert caught.value.param == "tools"


def test_given_functions_of_any_object_or_with_values_like_references_when_a_call_is_demanded_then_they_are_taken() -> (
    None
):
    any_object = schema_of([{"name": "f"}])
    for parameters in (None, {}, {"type": "object"}):
        assert schema_of([{"name": "f", "parameters": parameters}]) == any_object
    like = {"$ref": "#/properties/a"}
    values = {"const": like, "default": like, "enum": [like], "examples": [like]}
    schema_of([{"name": "f", "parameters": {"type": ["object"], "properties": {"a": values, "$ref": {}}}}])
    with pytest.raises(InvalidRequestError):
        schema_of([{"name": "f", "parameters": {"properties": {"const": like}}}])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> TextWork:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model")))
    return TextWork(tokenizer, ChatTemplate.of(tokenizer))


@pytest.mark.parametrize("thoughts", [ALLOWED, BEGUN, BARRED])
def test_given_a_job_when_a_text_process_does_it_then_the_grammar_comes_back(work: TextWork, thoughts: str) -> None:
    job = GrammarJob("response_format", JSON, b'{"type": "integer"}', thoughts)
    reply = work.do(TEXT_SCHEMA.decode(TEXT_SCHEMA.encode(job)), lambda message: None)
    assert isinstance(reply, Done)
    grammar = reply.parts[0].decode()
    assert fits(grammar, "5") == (thoughts != BEGUN)
    assert fits(grammar, "<think>a</think>5") == (thoughts != BARRED)
    assert fits(grammar, "a</think>\n5") == (thoughts == BEGUN)


def test_given_a_wrong_job_when_a_text_process_does_it_then_the_field_is_named_and_special_tokens_are_known(
    work: TextWork,
) -> None:
    reply = work.do(GrammarJob("structured_outputs", REGEX, b"(", BARRED), lambda message: None)
    assert isinstance(reply, Refused)
    assert reply.param == "structured_outputs"
    assert reply.message.startswith("structured_outputs: ")
    named = GrammarJob("structured_outputs", LARK, b'start: "a" <|im_end|>', BARRED)
    assert isinstance(work.do(named, lambda message: None), Done)


@pytest.mark.parametrize(
    ("end", "inside", "behind"),
    [
        ("", False, False),
        ("<think>\n", True, False),
        ("<think>\n\n</think>\n\n", False, True),
        ("</think>x", False, False),
    ],
)
def test_given_the_end_of_a_prompt_when_looked_at_then_it_is_known_whether_a_thought_has_begun_or_ended(
    end: str, inside: bool, behind: bool
) -> None:
    assert (ends_inside(end), ends_behind(end)) == (inside, behind)


def test_given_far_more_than_a_grammar_may_have_when_asked_for_then_it_is_refused_before_it_is_written_out(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr("gateway.asked_grammar.json.dumps", lambda *_, **__: pytest.fail("it was written out"))
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(MAX_GRAMMAR_BYTES // 8)}}
    with pytest.raises(InvalidRequestError, match="more than 65536 bytes") as caught:
        asked_grammar(parse(ChatRequest, CHAT | {"structured_outputs": {"json": schema}}, strict_params=True)[0])
    assert caught.value.param == "structured_outputs"
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(16)]
    request = parse(ChatRequest, CHAT | {"tools": tools, "tool_choice": "required"}, strict_params=True)[0]
    with pytest.raises(InvalidRequestError, match="more than 65536 bytes") as caught:
        asked_calls(request, "hermes", tokenizer)
    assert caught.value.param == "tools"
