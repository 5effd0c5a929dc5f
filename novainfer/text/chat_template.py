"""Chat templates: messages -> prompt text, in Jinja as Hugging Face checkpoints write it.

The environment offers what transformers' does (trimmed blocks, `tojson` that keeps non-ASCII, `raise_exception`,
`strftime_now`, loop controls, a `generation` tag) inside jinja2's immutable sandbox, with bounds on time and output.
Templates come from the checkpoint or the operator, never from a request.
"""

from __future__ import annotations

import json
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
from novainfer.text.tokenizer import NAMED_SPECIALS, Tokenizer

RENDER_SECONDS = 2.0  # of this thread's CPU time: a busy machine is not the template's fault
MAX_RENDERED_CHARS = 16 * 1024 * 1024
_DEADLINE = "_novainfer_deadline"
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
        plain = [
            _plain_message(message, f"messages[{number}]", keep_developer="developer" in self._sources[name])
            for number, message in enumerate(messages)
        ]
        variables: dict[str, Any] = {**(template_kwargs or {}), **self._special_tokens}
        variables.update(
            messages=plain,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )
        text = self._render(name, variables)
        return _cut_after_final_message(text, plain) if continue_final_message else text

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
        return "".join(parts)


def _short(error: Exception) -> str:
    return str(error)[:200]


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


def _plain_message(message: Message, where: str, *, keep_developer: bool) -> dict[str, Any]:
    """The message as templates expect it: text content as one string, tool arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text_content(message.get("content"), where)
    if plain.get("role") == "developer" and not keep_developer:
        plain["role"] = "system"  # the newer name of the same role; most templates know only the older
    if "tool_calls" in plain:
        calls = plain["tool_calls"] if isinstance(plain["tool_calls"], list) else [None]
        plain["tool_calls"] = [_plain_tool_call(call, f"{where}.tool_calls") for call in calls]
    return plain


def _text_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}.content: only text is supported.", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        words = f"{where} must be a list of objects, each with a function that has a name."
        raise InvalidRequestError(words, param="messages")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{where}: the arguments of a call are not JSON.", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    """End the prompt inside the final message, so that the model goes on with it."""
    final: str = messages[-1]["content"] if messages else ""
    start = text.rfind(final.strip())
    if not final.strip() or start < 0:
        raise InvalidRequestError(
            "continue_final_message: the template does not show the final message as it is.",
            param="continue_final_message",
        )
    whole = final.lstrip()  # with its trailing space, unless the template cut that off
    return text[: start + len(whole if text.startswith(whole, start) else final.strip())]
