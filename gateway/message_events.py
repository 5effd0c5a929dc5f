"""The answers of `/v1/messages`, whole and as events: what stands around the blocks, which `message_blocks` makes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.answers import spelling_of
from gateway.body_writer import BodyWriter
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.logprobs import LogprobRoom
from gateway.message_blocks import TEXT, BlockEvents, WholeBlocks
from gateway.message_chat import Words
from gateway.plain_choice import PlainChoice
from gateway.receipts import Receipts
from gateway.slices import Written, to_json
from gateway.sse import KEEP_ALIVE, event, one_line
from gateway.stream_record import StreamRecord
from novainfer.client.output import FINISH_TOOL_CALLS, ChoiceDelta, ChoiceOutput
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import FINISH_CANCELLED, FINISH_LENGTH, FINISH_STOP

MESSAGE_PREFIX = "msg_"  # of the id
STOP_REASONS = {
    FINISH_STOP: "end_turn",
    FINISH_LENGTH: "max_tokens",
    FINISH_TOOL_CALLS: "tool_use",
    FINISH_CANCELLED: "cancelled",  # Anthropic's has no word for it
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageForm:
    """See `Form`. words: for errors that come when a stream has begun."""

    words: Words
    prefix: str = MESSAGE_PREFIX

    def chunks(self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack) -> MessageChunks:
        """The writer of a stream."""
        return MessageChunks(generation, record, self.words)

    def answer(self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack) -> MessageAnswer:
        """The writer of a whole answer."""
        return MessageAnswer(generation, record)


class MessageAnswer:
    """A whole answer."""

    def __init__(self, generation: Generation, record: StreamRecord) -> None:
        self._generation = generation
        self._record = record
        self._blocks = WholeBlocks(partial(record.call_id, 0))

    def describe(self, delta: ChoiceDelta) -> None:
        """Take the next delta."""
        self._blocks.feed(delta)

    async def write(self, wholes: list[ChoiceDelta], receipts: Receipts | None) -> Written:
        """The answer's JSON, once its choice has ended: of that one its end is needed here. It has no receipt."""
        head = _head_of(self._record)
        rest = {**_end_of(wholes[0]), "usage": _usage_of(self._generation)}
        return Written([f'{to_json(head)[:-1]},"content":', self._blocks.write(), f",{to_json(rest)[1:]}"])

    def forget(self) -> None:
        """It is written, and will not be again."""
        self._blocks.forget()


class MessageChunks:
    """The events of a stream; see `Chunks`. Another gateway cannot go on: events have no ids."""

    ends_at_once = True

    def __init__(self, generation: Generation, record: StreamRecord, words: Words) -> None:
        self._generation = generation
        self._record = record
        self._words = words
        self._has_begun = False
        self._blocks = BlockEvents(partial(record.call_id, 0))
        self._end: ChoiceDelta | None = None

    @property
    def keep_alive(self) -> bytes:
        """See `Chunks`. Before a message has begun there is no event."""
        return _PING if self._has_begun else KEEP_ALIVE

    async def prepare(self, delta: ChoiceDelta) -> None:
        """See `Chunks`: nothing takes long."""

    def plain(self, output: ChoiceOutput, writer: BodyWriter) -> PlainChoice | None:
        """See `Chunks`: only while a block of text is open, whose number each event has."""
        if self._blocks.kind != TEXT:
            return None
        head, tail = self._blocks.text_around()
        return PlainChoice(output, (head.encode(), tail.encode()), spelling_of(self._generation.tokenizer), writer)

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """All events of one delta."""
        if not self._has_begun:
            self._has_begun = True
            head = {**_head_of(self._record), "content": [], "stop_reason": None, "stop_sequence": None}
            head["usage"] = _usage_of(self._generation) | {"output_tokens": 0}
            self._blocks.tell("message_start", f'"message":{one_line(to_json(head))}')
        self._blocks.feed(delta)
        if delta.finish_reason is not None:
            self._end = delta
        return self._take()

    async def last(self) -> bytes:
        """The ends of the block that is open, and of the message."""
        self._blocks.close()
        if self._end is not None:
            end, usage = one_line(to_json(_end_of(self._end))), to_json(_usage_of(self._generation))
            self._blocks.tell("message_delta", f'"delta":{end},"usage":{usage}')
        self._blocks.tell("message_stop", "")
        return self._take()

    def failed(self, error: ApiError) -> bytes:
        """See `Chunks`."""
        if error.status == 400:
            told = self._words.of(InvalidRequestError(error.message, param=error.param))
            error = ApiError(400, told.message)
        return b"event: error\n" + event(error.message_body)

    def _take(self) -> bytes:
        text = "".join(self._blocks.events)
        self._blocks.events.clear()
        return text.encode()


def _head_of(record: StreamRecord) -> dict[str, Any]:
    return {"id": record.response_id, "type": "message", "role": "assistant", "model": record.model}


def _end_of(delta: ChoiceDelta) -> dict[str, Any]:
    """A stop token's id is no sequence."""
    reason, stop = STOP_REASONS[delta.finish_reason or FINISH_STOP], delta.stop_reason
    if delta.finish_reason != FINISH_STOP or not isinstance(stop, str):
        return {"stop_reason": reason, "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": stop}


def _usage_of(generation: Generation) -> dict[str, int]:
    """So far. What was read from the cache does not count as input there."""
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
