"""The content of an answer of `/v1/messages`: blocks that begin, grow and end with the deltas of a choice.

One is open at a time. A thought comes first; words and calls stand as the model wrote them, so words behind a call are
a block of their own. Which blocks there are depends on the text alone, however that was cut into deltas.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import groupby
from typing import Any

from gateway.message_turns import CALL_PREFIX, INVALID_JSON
from gateway.slices import to_json
from gateway.sse import json_string, one_line
from novainfer.client.output import ChoiceDelta
from novainfer.text.call_object import CallDelta, join_calls

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"


class Blocks(ABC):
    """Cuts deltas into blocks; subclasses tell them. call_id: of a call, by its number, as a chat tells it."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.kind: str | None = None  # of the one that is open
        self.count = 0  # of those that have begun
        self._call_id = call_id
        self._call = 0  # the last one's number

    def feed(self, delta: ChoiceDelta) -> None:
        """Take a delta."""
        if delta.reasoning:
            self._say(THINKING, delta.reasoning)
        told = 0
        for place, group in groupby(zip(delta.call_places, delta.calls, strict=True), lambda pair: pair[0]):
            if place > told:
                self._say(TEXT, delta.text[told:place])
                told = place
            for call in join_calls([call for _, call in group]):
                self._take_call(call)
        if told < len(delta.text):
            self._say(TEXT, delta.text[told:])
        if self.kind == TOOL_USE and self._call < delta.num_ended:
            self.close()

    def close(self) -> None:
        """The block that is open, if any, is whole."""
        if self.kind is not None:
            self._end(self.kind)
            self.kind = None

    def _say(self, kind: str, text: str) -> None:
        if self.kind != kind:
            self._next(kind)
        self._grow(kind, text)

    def _take_call(self, call: CallDelta) -> None:
        if call.name is not None:
            self._call = call.index
            chat_id = self._call_id(call.index).removeprefix("call_")
            self._next(TOOL_USE, id=CALL_PREFIX + chat_id, name=call.name)
        if call.arguments:
            self._grow(TOOL_USE, call.arguments)

    def _next(self, kind: str, **names: str) -> None:
        self.close()
        self.count += 1
        self.kind = kind
        self._begin(kind, names)

    @abstractmethod
    def _begin(self, kind: str, names: dict[str, str]) -> None:
        """A block begins. names: `id` and `name` of a call."""

    @abstractmethod
    def _grow(self, kind: str, text: str) -> None:
        """What is new of it."""

    @abstractmethod
    def _end(self, kind: str) -> None:
        """It is whole."""


class WholeBlocks(Blocks):
    """All blocks of an answer."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        super().__init__(call_id)
        self._written: list[str] = []  # as JSON
        self._texts: list[str] = []  # of the open one
        self._names: dict[str, str] = {}

    def write(self) -> str:
        """The list of them, as JSON, after the last delta."""
        self.close()
        return f"[{','.join(self._written)}]"

    def forget(self) -> None:
        """They are written, and will not be again."""
        self._written.clear()

    def _begin(self, kind: str, names: dict[str, str]) -> None:
        self._names = names

    def _grow(self, kind: str, text: str) -> None:
        self._texts.append(text)

    def _end(self, kind: str) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if kind == TOOL_USE:
            told = to_json({"type": kind, **self._names})
            self._written.append(f'{told[:-1]},"input":{_input_of(text)}}}')
        else:
            self._written.append(to_json(empty_block(kind, {}) | {kind: text}))


class BlockEvents(Blocks):
    """Events of the blocks of a stream. Nothing of what was told is kept."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        super().__init__(call_id)
        self.events: list[str] = []  # that are yet to be sent

    def tell(self, kind: str, fields: str) -> None:
        """One more event. fields: as JSON on one line, without braces."""
        self.events.append(f'event: {kind}\ndata: {{"type":"{kind}"{"," if fields else ""}{fields}}}\n\n')

    def text_around(self) -> tuple[str, str]:
        """What stands before and behind the JSON of a piece of text of the open block, in its event."""
        head = f'event: content_block_delta\ndata: {{"type":"content_block_delta",{self._where},'
        return f'{head}"delta":{{"type":"text_delta","text":', "}}\n\n"

    @property
    def _where(self) -> str:
        return f'"index":{self.count - 1}'

    def _begin(self, kind: str, names: dict[str, str]) -> None:
        self.tell("content_block_start", f'{self._where},"content_block":{one_line(to_json(empty_block(kind, names)))}')

    def _grow(self, kind: str, text: str) -> None:
        delta, field = {TOOL_USE: ("input_json_delta", "partial_json")}.get(kind, (f"{kind}_delta", kind))
        self._tell_delta(f'"type":"{delta}","{field}":{json_string(text)}')

    def _end(self, kind: str) -> None:
        if kind == THINKING:
            self._tell_delta('"type":"signature_delta","signature":""')
        self.tell("content_block_stop", self._where)

    def _tell_delta(self, fields: str) -> None:
        self.tell("content_block_delta", f'{self._where},"delta":{{{fields}}}')


def empty_block(kind: str, names: dict[str, str]) -> dict[str, Any]:
    """A block as it begins. Nothing signs a thought here: whoever sends it back is believed."""
    if kind == TOOL_USE:
        return {"type": kind, **names, "input": {}}
    return {"type": kind, kind: "", **({"signature": ""} if kind == THINKING else {})}


def _input_of(text: str) -> str:
    """A call's arguments as JSON of an object: as the model spelled them, or, where they are none, as a text in one."""
    if not text:
        return "{}"
    try:
        if isinstance(json.loads(text, parse_constant=_refuse), dict):
            return text
    except (ValueError, RecursionError):
        pass
    return to_json({INVALID_JSON: text})


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
