"""The records that the tasks produce: messages in OpenAI's shape, and conversations made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]  # {"role", "content"} and, on an assistant turn, "tool_calls"
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class Conversation:
    """Messages ending with an assistant turn, and the tools offered to it."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant turn of plain text."""
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    """A system turn."""
    return {"role": "system", "content": text}


def tool_result(text: str) -> Message:
    """What a tool returned."""
    return {"role": "tool", "content": text}


def tool_calls(*calls: tuple[str, dict[str, Any]]) -> Message:
    """An assistant turn that calls tools, given as (name, arguments)."""
    listed = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def exchange(question: str, answer: str) -> Conversation:
    """One question and its answer."""
    return Conversation((user(question), assistant(answer)))
