"""Reads streams of `/v1/messages` as strictly as any client may: the order of events, and the message they make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
# For each type of block: that of its deltas, and the field of these.
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
EMPTY: dict[str, Any] = {"stop_reason": None, "stop_sequence": None, "content": []}


def events_of(lines: Iterable[str]) -> list[Event]:
    """The events of a stream; each says twice what it is. Comments and pings are passed over."""
    found, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            assert name == ""
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            told = json.loads(line.removeprefix("data: "))
            assert told["type"] == name
            found.append(told)
        elif not line:
            name = ""
        else:
            assert line.startswith(":")
    return [event for event in found if event["type"] != "ping"]


def message_of(events: list[Event]) -> dict[str, Any]:
    """The whole message that a stream tells. Raises `AssertionError` where an event stands elsewhere than it may."""
    first, *middle, end, last = events
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert {key: message[key] for key in EMPTY} == EMPTY
    assert message["usage"]["output_tokens"] == 0
    message["content"] = [*_blocks(middle)]
    assert (end["type"], last) == ("message_delta", {"type": "message_stop"})
    message |= end["delta"]
    message["usage"] |= end["usage"]
    return message


def _blocks(events: list[Event]) -> Iterable[dict[str, Any]]:
    at = count = 0
    while at < len(events):
        start = events[at]
        assert (start["type"], start["index"]) == ("content_block_start", count)
        block: dict[str, Any] = start["content_block"]
        kind = block["type"]
        delta, field = DELTAS[kind]
        assert block["input" if kind == "tool_use" else kind] in ("", {})
        texts = []
        at += 1
        while events[at]["type"] == "content_block_delta":
            told = events[at]["delta"]
            assert events[at]["index"] == count
            at += 1
            if told["type"] == "signature_delta":
                assert (kind, events[at]["type"]) == ("thinking", "content_block_stop")
                block["signature"] = told["signature"]
                continue
            assert told["type"] == delta
            assert told[field]
            texts.append(told[field])
        assert events[at] == {"type": "content_block_stop", "index": count}
        text = "".join(texts)
        block["input" if kind == "tool_use" else kind] = input_of(text) if kind == "tool_use" else text
        yield block
        at, count = at + 1, count + 1


def input_of(text: str) -> dict[str, Any]:
    """What a whole answer has for arguments that a stream tells as this text."""
    try:
        found = json.loads(text or "{}", parse_constant=_refuse)
    except ValueError:
        return {"INVALID_JSON": text}
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # JSON has none


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common."""
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}
