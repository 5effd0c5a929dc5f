"""Chat templates: what transformers' environment offers, and what a hostile template or message cannot do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.text import chat_template
from novainfer.text.chat_template import ChatTemplate
from tests.fakes import CHATML

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render(USER if messages is None else messages, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ 'ab' * 2 }}", "abab"),
    ],
)
def test_given_a_feature_of_hf_templates_when_rendered_then_it_works(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_name.attribute }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 2 ** 100000 }}",
        "{{ [0] * 1000000000 }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(1000000000) }}",
    ],
)
def test_given_a_hostile_template_when_rendered_then_only_the_request_fails(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError):
        render(source)


def test_given_a_machine_that_is_busy_when_a_template_is_rendered_then_only_its_own_cpu_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    wait = threading.Event().wait
    assert render("{{ wait(0.5) }}{{ wait(0) }}", template_kwargs={"wait": wait}) == "FalseFalse"


def test_given_a_template_with_a_syntax_error_when_compiled_then_config_error() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate({"default": "{% if %}"}, {})


def test_given_no_template_when_rendered_then_the_request_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(USER)


def test_given_chatml_when_rendered_then_the_prompt_is_as_documented() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_given_a_final_assistant_message_when_continued_then_the_prompt_ends_inside_it() -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon "}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon ")
    with pytest.raises(InvalidRequestError):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError):
        render("nothing", messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("prefill", ["|", "<", "end", "im_end", "user", "Hi", "  indented", "a\n\n"])
def test_given_a_prefill_that_stands_elsewhere_too_when_continued_then_the_prompt_ends_inside_the_final_message(
    prefill: str,
) -> None:
    messages = [*USER, {"role": "assistant", "content": prefill}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{prefill}"
    trimmed = CHATML.replace("message.content", "message.content | trim")
    assert trimmed != CHATML
    text = render(trimmed, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{prefill.strip()}"


@pytest.mark.parametrize("content", ["", " ", None])
def test_given_a_final_message_without_text_when_continued_then_refused(content: str | None) -> None:
    messages = [{"role": "assistant", "content": content, "tool_calls": call({})}]
    with pytest.raises(InvalidRequestError, match="no final message with text"):
        render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def test_given_a_template_that_knows_calls_by_content_that_is_none_when_rendered_then_they_are_shown() -> None:
    shows = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ 'CALL ' + c.function.name + ' ' + c.function.arguments + ';' }}{{ c.function.arguments.x }}"
        "{{ c.function.arguments ~ (c.function.arguments | tojson) }}{% endfor %}{% else %}[{{ m.content }}]{% endif %}"
        "{% endfor %}"
    )
    text = '{"x":  1}'
    messages = [{"role": "assistant", "content": None, "tool_calls": call(text)}, {"role": "tool", "content": ""}]
    assert render(shows, messages) == f'CALL f {text};1{text}{{"x": 1}}[]'
    messages[0]["tool_calls"] = call({"x": 1})
    assert render(shows, messages).startswith('CALL f {"x": 1};1')


def test_given_a_call_and_its_result_in_their_older_form_when_rendered_then_they_are_the_newer_ones() -> None:
    shows = (
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ ('function' ~ '_call') in m }} "
        "{% for c in m.tool_calls %}{{ c.type }} {{ c.function.name }} {{ c.function.arguments.x }}{% endfor %};"
        "{% endfor %}"
    )
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    assert render(shows, older) == "assistant  False function f 1;tool f False ;"
    assert render(shows, [{**older[0], "tool_calls": []}]) == "assistant  False function f 1;"
    with pytest.raises(InvalidRequestError, match="a function that has a name"):
        render(shows, [{"role": "assistant", "content": None, "function_call": "f"}])
    knows = "{% for m in messages %}{% if m.role == 'function' %}{{ m.name }}{% else %}{{ m.function_call.name }}"
    assert render(knows + "{% endif %}{% endfor %}", older) == "ff"


def test_given_an_empty_list_of_calls_when_rendered_then_the_message_has_none() -> None:
    asks = "{{ 'tool_calls' in messages[0] }}{{ messages[0].content is none }}"
    assert render(asks, [{"role": "assistant", "content": "", "tool_calls": []}]) == "FalseFalse"


def test_given_half_a_surrogate_pair_inside_a_calls_arguments_when_rendered_then_the_request_is_refused() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": call('{"a": "\\ud800"}')}]
    for source in ("{{ messages[0].tool_calls[0].function.arguments | tojson }}",
                   "{{ raise_exception(messages[0].tool_calls[0].function.arguments.a) }}"):  # fmt: skip
        with pytest.raises(InvalidRequestError) as seen:
            render(source, messages)
        seen.value.message.encode()


def test_given_content_parts_when_rendered_then_texts_are_joined_and_media_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    parts = [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "assistant", "content": parts}]) == "a\nb"
    refusal = {"type": "refusal", "refusal": "no"}
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    for bad, words in (
        ([image], "only text"),
        ([1], "only text"),
        ([{"text": "a"}], "only text"),
        ([{"type": ["text"], "text": "a"}], "only text"),
        ([{"type": "text"}], "a part of the type text must have its text"),
        ([refusal], "a message of this role has parts of the types text, input_text, not refusal"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"messages\[0\].content: {words}"):
            render("{{ messages[0].content }}", [{"role": "user", "content": bad}])
    for bad in (parts[0], {}, 5, True, [], None):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content must be"):
            render("{{ messages[0].content }}", [{"role": "user", "content": bad}])


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "function", "assistant", "ipython"])
def test_given_a_message_without_content_when_rendered_then_its_place_is_named_and_an_empty_string_is_fine(
    role: str,
) -> None:
    given = [{"role": role}, {"role": role, "contents": "typo"}]
    may_be_none = role in ("assistant", "tool", "function")
    for message in given if may_be_none else [*given, {"role": role, "content": None}]:
        with pytest.raises(InvalidRequestError, match=r"messages\[1\].content must be") as caught:
            render("x", [*USER, message])
        assert caught.value.param == "messages"
    assert render("[{{ messages[0].content }}]", [{"role": role, "content": ""}]) == "[]"


def test_given_an_assistant_that_called_or_refused_when_rendered_then_it_needs_no_content() -> None:
    shows = "[{{ messages[0].content }}]"
    for more in ({"tool_calls": call("{}")}, {"function_call": {"name": "f", "arguments": "{}"}}):
        assert render(shows, [{"role": "assistant", "content": None, **more}]) == "[]"
        with pytest.raises(InvalidRequestError):
            render(shows, [{"role": "user", "content": None, **more}])
    for more in ({}, {"tool_calls": []}, {"tool_calls": call("{}")}, {"reasoning_content": "Hm"}):
        for content in (None, []):
            assert render(shows, [{"role": "assistant", "content": content, **more}]) == "[]"
    for role in ("tool", "function"):
        for content in (None, []):
            assert render(shows, [{"role": role, "content": content}]) == "[]"
    assert render(shows, [{"role": "assistant", "content": None, "refusal": "I will not."}]) == "[I will not.]"
    parts = [{"type": "text", "text": "Sorry."}, {"type": "refusal", "refusal": "I will not."}]
    assert render(shows, [{"role": "assistant", "content": parts}]) == "[Sorry.\nI will not.]"


@pytest.mark.parametrize(
    ("thoughts", "shown"),
    [
        ({"reasoning": "Hm"}, "Hm Hm"),
        ({"reasoning": "Hm", "reasoning_content": None}, "Hm Hm"),
        ({"reasoning": "Hm", "reasoning_content": "Ah"}, "Hm Ah"),
        ({"reasoning_content": "Ah"}, " Ah"),
        ({"reasoning": {"x": 1}}, "{'x': 1} "),
    ],
)
def test_given_thoughts_under_their_other_name_when_rendered_then_a_template_finds_them_where_it_looks(
    thoughts: dict[str, object], shown: str
) -> None:
    messages = [{"role": "assistant", "content": "x", **thoughts}]
    assert render("{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}", messages) == shown


def test_given_a_developer_message_when_the_template_knows_only_system_then_it_is_one() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


def test_given_tools_when_there_is_a_tool_template_then_it_is_used_with_parsed_arguments() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "{{ tools[0].name }}"}, {})
    assert template.render(USER, tools=[{"name": "f"}]) == "f"
    assert template.render(USER) == "d"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments.x }}", messages) == "1"


def test_given_template_kwargs_when_rendered_then_they_are_seen_but_replace_nothing() -> None:
    assert render("{{ enable_thinking }}", template_kwargs={"enable_thinking": False}) == "False"
    assert render("{{ messages[0].content }}", template_kwargs={"messages": []}) == "Hi"
    assert render("{{ bos_token }}", template_kwargs={"bos_token": "</s>"}) == "<s>"


@pytest.mark.parametrize("text", ["{", '{"x": 1', "Paris", "[" * 200_000, "[" * 200_000 + "]" * 200_000])
def test_given_tool_call_arguments_that_are_no_json_when_rendered_then_the_template_sees_their_text(text: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": call(text)}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", messages) == text
