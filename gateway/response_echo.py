"""What an answer of `/v1/responses` repeats of its request, and the words of that request for errors about its chat.

An answer repeats it in each of its last events, and it is held as long as the request runs: so it has a bound, and
what is longer is left out rather than refused. Nothing is written out that will not be told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gateway.asked_grammar import FORMATS, NAME_PATTERN, may_fit, to_json
from gateway.response_items import Places
from gateway.schemas import ResponseRequest
from gateway.sse import one_line
from novainfer.errors import InvalidRequestError

MAX_ECHO = 256 * 1024  # bytes of JSON
_MAX_NAME = 1024  # characters of what is repeated even where not all is
_NAMES = {  # of the chat's fields, where messages about them name such as have other names here
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "min_tokens": "min_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
    "structured_outputs": "structured_outputs",
    "tool_choice": "tool_choice",
}
_WORDS = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
)
_NUMBERED = re.compile(r"^messages\[(\d+)\](\.content)?")


@dataclass(frozen=True, slots=True)
class Echo:
    """What an answer repeats. data: fields of its object, as JSON without the braces, on one line.

    places: where in the input each message came from.
    """

    data: bytes
    places: Places

    @property
    def text(self) -> str:
        """`data`, which takes up to four times the room as a text."""
        return self.data.decode()

    def in_words(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error about the chat, told of the request that it came from."""
        message, param = error.message, error.param
        numbered = _NUMBERED.match(message)
        if numbered is not None and int(numbered[1]) < len(self.places):
            number = int(numbered[1])
            where = self.places.of_content(number) if numbered[2] else self.places.of_message(number)
            message = where + message[numbered.end() :]
        elif param in _NAMES:
            for pattern, words in _WORDS:
                message = pattern.sub(words, message)
        name = None if param is None else _NAMES.get(param, param)
        return InvalidRequestError(message, param=name, code=error.code)


def echo_of(request: ResponseRequest) -> bytes:
    """`Echo.data`: all that an answer repeats, or, where that is too much, what is always short."""
    text, reasoning = request.text or {}, request.reasoning or {}
    form = text.get("format") or {"type": "text"}
    fields: dict[str, Any] = {
        "instructions": request.instructions,
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in request.tools],
        "text": {"format": form},
        "max_output_tokens": request.max_output_tokens,
        "tool_choice": _choice_of(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary") or reasoning.get("generate_summary"),
        },
        "top_logprobs": request.top_logprobs or 0,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    data = _written(fields)
    if data is None:
        fields |= {"instructions": None, "tools": [], "text": {"format": _short_form(form)}}
        if len(request.user or "") > _MAX_NAME:
            fields["user"] = None
        choice = fields["tool_choice"]
        if len(choice if isinstance(choice, str) else choice["name"]) > _MAX_NAME:
            fields["tool_choice"] = "required"  # as a function does that is named
        data = one_line(to_json(fields, "metadata")[1:-1]).encode()
    return data


def _choice_of(choice: str | dict[str, Any] | None) -> str | dict[str, str]:
    """What of it has been looked at."""
    if isinstance(choice, dict):
        return {"type": "function", "name": choice["name"]}
    return "auto" if choice is None else choice


def _short_form(form: dict[str, Any]) -> dict[str, str]:
    """Its type and name; one with others is refused yet."""
    found = {"type": form["type"] if form.get("type") in FORMATS else FORMATS[0]}
    name = form.get("name")
    if isinstance(name, str) and re.fullmatch(NAME_PATTERN, name):
        found["name"] = name
    return found


def _written(fields: dict[str, Any]) -> bytes | None:
    """None: that is more than an answer repeats, or nothing that JSON can say."""
    if not may_fit(fields, MAX_ECHO):
        return None
    try:
        data = one_line(to_json(fields, "tools")[1:-1]).encode()
    except InvalidRequestError:
        return None
    return data if len(data) <= MAX_ECHO else None
