"""The output of `/v1/responses`: items that begin, grow and end with the deltas of a choice, and the events of that.

A thought comes first. Words are one message, like the content of a chat, whatever calls stand between them: it stays
open to the end. Each call is an item of its own, open until all of its arguments have come. Items stand in the order in
which they began, and what they are depends on the text alone, however that was cut into deltas. An answer that was cut
off is incomplete in all that was open then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.logprobs import ChatLogprobs
from gateway.slices import Written, to_json
from gateway.sse import json_string
from novainfer.client.output import FINISH_TOOL_CALLS, ChoiceDelta
from novainfer.protocol.messages import FINISH_CANCELLED, FINISH_STOP
from novainfer.text.call_object import CallDelta, join_calls

COMPLETED, INCOMPLETE, IN_PROGRESS, CANCELLED, FAILED = "completed", "incomplete", "in_progress", "cancelled", "failed"
_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}
_EMPTY_LIST = Written(["[]"])

Tell = Callable[[str, Written], None]
"""Takes the name of an event without `response.`, and its fields as JSON without braces."""


@dataclass(slots=True)
class _Item:
    """One item. place: its number in the output. name, call_id: of a call, and `index`, its number among calls."""

    kind: str
    id: str
    place: int
    name: str = ""
    call_id: str = ""
    index: int = 0
    status: str = IN_PROGRESS
    texts: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Fields that all events about it have."""
        return f'"item_id":"{self.id}","output_index":{self.place}'

    def text(self) -> str:
        """So far, as JSON; kept joined."""
        self.texts[:] = ["".join(self.texts)]
        return json_string(self.texts[0])

    def part(self, text: str, logprobs: Written) -> Written:
        """Of its content."""
        if self.kind == _REASONING:
            return Written([f'{{"type":"reasoning_text","text":{text}}}'])
        return Written([f'{{"type":"output_text","text":{text},"annotations":[],"logprobs":', *logprobs, "}"])

    def write(self, parts: Written, text: str) -> Written:
        """The item around the parts of its content, or with a call's arguments, as JSON."""
        head = f'{{"id":"{self.id}","type":"{self.kind}","status":"{self.status}"'
        if self.kind == _CALL:
            names = f'"call_id":{json_string(self.call_id)},"name":{json_string(self.name)}'
            return Written([f'{head},{names},"arguments":{text}}}'])
        more = '"role":"assistant"' if self.kind == _MESSAGE else '"summary":[],"encrypted_content":null'
        return Written([f'{head},{more},"content":[', *parts, "]}"])


class ResponseOutput:
    """The output of one answer. Feed it all deltas of the choice, then `end` it.

    suffix: what ids of items have in common with the answer's. call_id: of a call, by its number. logprobs: of all
    tokens, for the message; None: they are not told. tell: takes the events.
    """

    def __init__(
        self,
        suffix: str,
        call_id: Callable[[int], str],
        *,
        logprobs: ChatLogprobs | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._suffix = suffix
        self._call_id = call_id
        self._logprobs = logprobs
        self._num_told = 0  # of these
        self._tell = tell
        self._items: list[_Item] = []
        self._open: _Item | None = None  # a thought or a call
        self._message: _Item | None = None

    def feed(self, delta: ChoiceDelta) -> None:
        """Take a delta; its log-probabilities have been added already."""
        if delta.reasoning:
            thought = (
                self._open if self._open is not None and self._open.kind == _REASONING else self._begin(_REASONING)
            )
            self._grow(thought, delta.reasoning, "reasoning_text")
        first = delta.call_places.count(0) if delta.text else 0
        self._feed_calls(delta.calls[:first])
        if delta.text:
            if self._open is not None and self._open.kind == _REASONING:
                self._close()
            self._grow(self._begun_message(), delta.text, "output_text")
        self._feed_calls(delta.calls[first:])
        if self._open is not None and self._open.kind == _CALL and self._open.index < delta.num_ended:
            self._close()

    def end(self, finish_reason: str | None) -> str:
        """The status of the answer; every item ends. None: it failed."""
        status = INCOMPLETE
        if finish_reason in (FINISH_STOP, FINISH_TOOL_CALLS):
            status = COMPLETED
            if self._message is None and not any(item.kind == _CALL for item in self._items):
                self._close()
                self._begun_message()  # without words, as a chat's content would be
        for item in self._items:
            if item.status == IN_PROGRESS:
                self._end(item, status)
        self._open = None
        if finish_reason == FINISH_CANCELLED:
            return CANCELLED
        return FAILED if finish_reason is None else status

    def write(self) -> Written:
        """The list of its items."""
        parts = Written(["["])
        for item in self._items:
            parts += ["," if item.place else "", *self._write(item)]
        parts.append("]")
        return parts

    def forget(self) -> None:
        """It is written, and will not be again; nor does it know who takes its events."""
        self._items.clear()
        self._tell = self._logprobs = self._message = self._open = None

    def _feed_calls(self, deltas: list[CallDelta]) -> None:
        for call in join_calls(deltas):
            if call.name is not None:
                self._close()
                self._begin(_CALL, call.name, self._call_id(call.index)).index = call.index
            if self._open is not None and call.arguments:
                self._grow(self._open, call.arguments, "function_call_arguments")

    def _begun_message(self) -> _Item:
        if self._message is None:
            self._message = self._begin(_MESSAGE)
        return self._message

    def _begin(self, kind: str, name: str = "", call_id: str = "") -> _Item:
        place = len(self._items)
        item = _Item(kind, f"{_PREFIXES[kind]}_{self._suffix}_{place}", place, name, call_id)
        self._items.append(item)
        if kind != _MESSAGE:
            self._open = item
        if self._tell is not None:
            self._tell("output_item.added", self._placed(item, item.write(Written(), '""')))
            if kind != _CALL:
                part = item.part('""', _EMPTY_LIST)
                self._tell("content_part.added", Written([f'{item.where},"content_index":0,"part":', *part]))
        return item

    def _grow(self, item: _Item, text: str, what: str) -> None:
        item.texts.append(text)
        if self._tell is None:
            return
        fields = f'{item.where},"delta":{json_string(text)}'
        if item.kind == _CALL:
            self._tell(f"{what}.delta", Written([fields]))
        elif item.kind == _REASONING:
            self._tell(f"{what}.delta", Written([f'{fields},"content_index":0']))
        else:
            logprobs = self._list_logprobs(self._num_told)
            self._num_told = 0 if self._logprobs is None else len(self._logprobs)
            self._tell(f"{what}.delta", Written([f'{fields},"content_index":0,"logprobs":', *logprobs]))

    def _close(self) -> None:
        """Something else begins: the thought or call that was open is whole."""
        if self._open is not None:
            self._end(self._open, COMPLETED)
            self._open = None

    def _end(self, item: _Item, status: str) -> None:
        item.status = status
        if self._tell is None:
            return
        text = item.text()
        if item.kind == _CALL:
            name = json_string(item.name)
            self._tell("function_call_arguments.done", Written([f'{item.where},"name":{name},"arguments":{text}']))
        else:
            logprobs = self._list_logprobs()
            fields = f'{item.where},"content_index":0'
            if item.kind == _REASONING:
                self._tell("reasoning_text.done", Written([f'{fields},"text":{text}']))
            else:
                self._tell("output_text.done", Written([f'{fields},"text":{text},"logprobs":', *logprobs]))
            self._tell("content_part.done", Written([f'{fields},"part":', *item.part(text, logprobs)]))
        self._tell("output_item.done", self._placed(item, self._write(item)))

    def _write(self, item: _Item) -> Written:
        text = item.text()
        return item.write(Written() if item.kind == _CALL else item.part(text, self._list_logprobs()), text)

    def _list_logprobs(self, start: int = 0) -> Written:
        return _EMPTY_LIST if self._logprobs is None else self._logprobs.write_list(start)

    @staticmethod
    def _placed(item: _Item, written: Written) -> Written:
        return Written([f'"output_index":{item.place},"item":', *written])


def usage_of(usage: dict[str, Any]) -> str:
    """A chat's usage in the words of a response, as JSON. Thoughts are counted as a chat counts them."""
    told = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,  # none that anybody would count: the SDK wants the field
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
    return to_json(told)
