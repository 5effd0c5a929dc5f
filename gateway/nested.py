"""Fields inside of others that this server does not know: for `--strict-params`, which refuses them.

A form is what a body looks like: CHAT of all that is named as in a chat, RESPONSE of `/v1/responses`, MESSAGE of
`/v1/messages`.

What is the caller's own matter is not looked at: a tool's parameters, a template's arguments, documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CHAT, RESPONSE, MESSAGE = "chat", "response", "message"
# What an object may hold. A name leads to what the objects in it may hold, be it one or a list; None: anything.
_Known = Mapping[str, Any]

_FUNCTION_CALL: _Known = {"name": None, "arguments": None}
_MESSAGE: _Known = {
    "role": None,
    "type": None,  # some programs that evaluate models write it
    "content": {
        "type": None,
        "text": None,
        "refusal": None,
        **dict.fromkeys(("cache_control", "annotations", "logprobs")),  # hints for other servers, and what they told
    },
    "name": None,
    "tool_calls": {"id": None, "type": None, "index": None, "function": _FUNCTION_CALL},
    "tool_call_id": None,
    # What an answer holds is sent back with the next question, as it is; templates read the last two.
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": _FUNCTION_CALL,
    "reasoning": None,
    "reasoning_content": None,
}
_TOOL: _Known = {
    "type": None,
    "function": {"name": None, "description": None, "parameters": None, "strict": None},
}
_FIELDS: _Known = {
    "messages": _MESSAGE,
    "tools": _TOOL,
    "response_format": {
        "type": None,
        "json_schema": {"name": None, "schema": None, "strict": None, "description": None},
        **dict.fromkeys(("schema", "value")),  # of an object, as llama.cpp and TGI have it
    },
    "stream_options": {"include_usage": None, "continuous_usage_stats": None, "include_event_ids": None},
}


_PART: _Known = dict.fromkeys(
    ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint", "parsed")
)
_RESPONSE_FIELDS: _Known = {
    "input": {
        **dict.fromkeys(("type", "id", "status", "role", "phase", "call_id", "name", "arguments", "encrypted_content")),
        "parsed_arguments": None,  # the SDK's own, as `parsed` of a part is: it sends back what it made of an answer
        **dict.fromkeys(("content", "output", "summary"), _PART),
    },
    "tools": dict.fromkeys(("type", "name", "description", "parameters", "strict")),
    "text": {"format": dict.fromkeys(("type", "name", "schema", "strict", "description")), "verbosity": None},
    "reasoning": dict.fromkeys(("effort", "summary", "generate_summary")),
    "stream_options": {"include_obfuscation": None},
}
_TEXT_BLOCK: _Known = dict.fromkeys(("type", "text", "cache_control", "citations"))
_MESSAGE_FIELDS: _Known = {
    "messages": {
        "role": None,
        "content": {
            **_TEXT_BLOCK,
            **dict.fromkeys(("id", "name", "input", "caller", "tool_use_id", "is_error")),
            **dict.fromkeys(("thinking", "signature", "data")),
            "source": None,  # of media, which are refused in better words
            "content": {**_TEXT_BLOCK, "source": None},
        },
    },
    "system": _TEXT_BLOCK,
    "tools": {
        **dict.fromkeys(("type", "name", "description", "input_schema", "strict")),
        **dict.fromkeys(("cache_control", "eager_input_streaming")),  # hints
    },
    "tool_choice": dict.fromkeys(("type", "name", "disable_parallel_tool_use")),
    "thinking": dict.fromkeys(("type", "budget_tokens")),
    "metadata": {"user_id": None},
    "output_config": {"effort": None, "format": dict.fromkeys(("type", "schema"))},
    "output_format": dict.fromkeys(("type", "schema")),
}
_FORMS: Mapping[str, _Known] = {CHAT: _FIELDS, RESPONSE: _RESPONSE_FIELDS, MESSAGE: _MESSAGE_FIELDS}
# Of lists in one: the types whose fields are known. Others are refused, in better words than for a field of theirs.
_KINDS: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {
    RESPONSE: {
        "input": (None, "message", "function_call", "function_call_output", "reasoning"),
        "tools": ("function",),
    },
    MESSAGE: {"tools": (None, "custom")},
}
_TIERS = {RESPONSE: ("auto", "default"), MESSAGE: ("auto", "standard_only")}
_VERBOSITY = "medium"


def without_effect(body: Mapping[str, Any], form: str) -> list[str]:
    """What a body of RESPONSE or MESSAGE asks for in known fields, and does not get."""
    found: list[str] = []
    text, thinking = body.get("text"), body.get("thinking")
    if form == RESPONSE and isinstance(text, dict) and text.get("verbosity") not in (None, _VERBOSITY):
        found.append("text.verbosity")
    if form == MESSAGE and isinstance(thinking, dict) and thinking.get("budget_tokens") is not None:
        found.append("thinking.budget_tokens")
    if body.get("service_tier") not in (None, *_TIERS[form]):
        found.append("service_tier")
    return found


SWITCHES = frozenset({"defer_loading"})  # of what there is none: off, they change nothing


def unknown_inside(body: Mapping[str, Any], form: str) -> tuple[str, str] | None:
    """The path of the first unknown field inside of a known one, as (where, its name); null counts as absent."""
    for name, known in _FORMS[form].items():
        value = body.get(name)
        kinds = _KINDS.get(form, {}).get(name)
        if kinds is not None and isinstance(value, list):
            value = [item if isinstance(item, dict) and item.get("type") in kinds else None for item in value]
        for found in _unknown(value, known, name):
            return found
    return None


def _unknown(value: Any, known: _Known, where: str) -> Iterator[tuple[str, str]]:
    """Only a few levels deep, as deep as what is known."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict):
                yield from _unknown(item, known, f"{where}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in known:
                if item is not None and not (item is False and name in SWITCHES):
                    yield where, name
            elif known[name] is not None:
                yield from _unknown(item, known[name], f"{where}.{name}")
