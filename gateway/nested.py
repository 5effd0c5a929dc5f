"""Fields inside of others that this server does not know: for `--strict-params`, which refuses them.

What is the caller's own matter is not looked at: a tool's parameters, a template's arguments, documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    "response_format": {"type": None},
    "stream_options": {"include_usage": None, "continuous_usage_stats": None, "include_event_ids": None},
}


def unknown_inside(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The path of the first unknown field inside of a known one, as (where, its name); null counts as absent."""
    for name, known in _FIELDS.items():
        for found in _unknown(body.get(name), known, name):
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
                if item is not None:
                    yield where, name
            elif known[name] is not None:
                yield from _unknown(item, known[name], f"{where}.{name}")
