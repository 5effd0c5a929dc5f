"""Chat templates: messages -> prompt text, in Jinja as Hugging Face checkpoints write it.

The environment offers what transformers' does (trimmed blocks, `tojson` that keeps non-ASCII, `raise_exception`,
`strftime_now`, loop controls, a `generation` tag) inside jinja2's immutable sandbox, with bounds on time and output.
Templates come from the checkpoint or the operator, never from a request.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.text.added_tokens import NAMED_SPECIALS
from novainfer.text.tokenizer import Tokenizer

RENDER_SECONDS = 2.0  # of this thread's CPU time: a busy machine is not the template's fault
MAX_RENDERED_CHARS = 16 * 1024 * 1024
_DEADLINE = "_novainfer_deadline"
_MARK = "\ue000here the answer goes on\ue000 "  # its last character shows whether a template trims what it shows
_ANSWER = ("content", "refusal", "tool_calls", "function_call", "reasoning_content", "reasoning")  # an assistant's
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ASKS_FOR_NONE = re.compile(r"\bis\s+(not\s+)?none\b", re.IGNORECASE)
_KNOWS_FUNCTION = re.compile(r"""\brole\W+(==|in)\W[^%}]*['"]function['"]""")  # as a role
# What a template sees under these names comes from us, never from a request.
OWN_NAMES = frozenset(
    {
        "chat_template", "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now",
        *DEFAULT_NAMESPACE, *NAMED_SPECIALS,
    }
)  # fmt: skip

Message = Mapping[str, Any]


class _TooMuch(TemplateError):
    """A template that takes too long or writes too much."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock at each call and a bound on what multiplication makes."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if time.thread_time() > __context.parent[_DEADLINE]:
            raise _TooMuch("the chat template took too long")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, (str, list, tuple)) else abs(x) for x in (left, right)]
        if operator == "**" or sizes[0] * sizes[1] > MAX_RENDERED_CHARS:
            raise _TooMuch(f"'{operator}' makes too large a value")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """The compiled templates of one model. Thread-safe."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._sources = dict(templates)
        try:
            self._compiled = {name: environment.from_string(source) for name, source in templates.items()}
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from None

    @classmethod
    def of(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The model's own templates, or `override` (template source) in their place."""
        templates = tokenizer.chat_templates if override is None else {"default": override}
        return cls(templates, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `InvalidRequestError` where the template refuses the messages or there is none."""
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message excludes add_generation_prompt.", param="continue_final_message"
            )
        source = self._sources[name]
        keeps = {
            "keep_developer": "developer" in source,
            "keep_none": _ASKS_FOR_NONE.search(source) is not None,
            "keep_call": "function_call" in source,
            "keep_function": _KNOWS_FUNCTION.search(source) is not None,
        }
        plain = [_plain_message(message, f"messages[{number}]", **keeps) for number, message in enumerate(messages)]
        # transformers always defines `documents`, and templates ask whether it is none.
        variables: dict[str, Any] = {"documents": None, **(template_kwargs or {}), **self._special_tokens}
        variables.update(
            messages=_marked(plain) if continue_final_message else plain,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )
        text = self._render(name, variables)
        return _cut_at_mark(text, plain[-1]["content"]) if continue_final_message else text

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        deadline = time.thread_time() + RENDER_SECONDS
        variables[_DEADLINE] = deadline
        parts: list[str] = []
        size = 0
        try:
            for part in self._compiled[name].generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS or time.thread_time() > deadline:
                    raise _TooMuch("the chat template writes too much or takes too long")
        except TemplateError as error:
            raise InvalidRequestError(f"The chat template refused: {_short(error)}", param="messages") from None
        except Exception as error:  # a template is a program: with odd input it raises anything
            text = f"The chat template failed: {type(error).__name__}: {_short(error)}"
            raise InvalidRequestError(text, param="messages") from None
        text = "".join(parts)
        if not _is_text(text):  # a template is a program, and JSON inside a message can spell half a character
            raise InvalidRequestError("The messages hold half of a surrogate pair.", param="messages")
        return text


def _short(error: Exception) -> str:
    return str(error)[:200].encode(errors="replace").decode()


def _is_text(text: str) -> bool:
    """Whether it can be encoded; a half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Arguments(dict[str, Any]):
    """Of a tool call: an object to templates that look into it, and its JSON text to those that write it."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _plain_message(
    message: Message, where: str, *, keep_developer: bool, keep_none: bool, keep_call: bool, keep_function: bool
) -> dict[str, Any]:
    """The message as templates expect it: text content as one string, tool arguments as objects.

    keep_none: the template knows messages that are calls alone by content that is none.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text_content(message, where)
    if "function_call" in plain and not keep_call:  # the older form of a call, and of its result's role
        call = plain.pop("function_call")
        plain["tool_calls"] = plain.get("tool_calls") or [{"type": "function", "function": call}]
    if plain.get("role") == "function" and not keep_function:
        plain["role"] = "tool"
    if plain.get("role") == "developer" and not keep_developer:
        plain["role"] = "system"  # the newer name of the same role; most templates know only the older
    if isinstance(plain.get("reasoning"), str):  # another name of the same; most templates know only this one
        plain.setdefault("reasoning_content", plain["reasoning"])
    calls = plain.pop("tool_calls", [])
    if calls != []:
        calls = calls if isinstance(calls, list) else [None]
        plain["tool_calls"] = [_plain_tool_call(call, f"{where}.tool_calls") for call in calls]
        if keep_none and message.get("content") is None:
            plain["content"] = None
    return plain


def _text_content(message: Message, where: str) -> str:
    """The message's words. None at all may have an assistant, which called something, say, and what such a call gave:
    but not by a slip alone.
    """
    content, is_answer = message.get("content"), message.get("role") == "assistant"
    if content in (None, []) and message.get("role") in ("tool", "function") and "content" in message:
        return ""
    if is_answer and content in (None, []) and any(name in message for name in _ANSWER):
        content = message.get("refusal") or ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:  # no words are nearly always a slip, such as a misspelt name
        words = f"{where}.content must be a string, or a list of at least one text part."
        raise InvalidRequestError(words, param="messages")
    kinds = ("text", "output_text", "refusal") if is_answer else ("text", "input_text")
    return "\n".join(_text_of_part(part, kinds, where) for part in content)


def _text_of_part(part: Any, kinds: tuple[str, ...], where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
    if not isinstance(text, str):
        words = f"{where}.content: only text is supported."
        if kind in kinds:
            words = f"{where}.content: a part of the type {kind} must have its text."
        elif kind in _TEXT_PARTS:
            words = f"{where}.content: a message of this role has parts of the types {', '.join(kinds)}, not {kind}."
        raise InvalidRequestError(words, param="messages")
    return text


def _plain_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        words = f"{where} must be a list of objects, each with a function that has a name."
        raise InvalidRequestError(words, param="messages")
    arguments = given = function.get("arguments") or {}
    if isinstance(given, str):
        # What a model wrote may be no JSON; it comes back so that the model can see and mend it.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(given)
    if isinstance(arguments, dict):
        arguments = _Arguments(arguments, given if isinstance(given, str) else _to_json(given))
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark behind the final one, which the template shows too: its words may stand elsewhere."""
    final = messages[-1]["content"] if messages else None
    if not final or not final.strip():
        raise InvalidRequestError(
            "continue_final_message: there is no final message with text.", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": final + _MARK}]


def _cut_at_mark(text: str, final: str) -> str:
    """End the prompt inside the final message, so that the model goes on with it."""
    start = text.rfind(_MARK.strip())
    prompt = text[: max(start, 0)]
    if not text.startswith(_MARK, start):  # the template trims messages: then also where the mark was not
        prompt = prompt.rstrip()
    if start < 0 or not prompt.rstrip().endswith(final.strip()):
        raise InvalidRequestError(
            "continue_final_message: the template does not show the final message as it is.",
            param="continue_final_message",
        )
    return prompt
