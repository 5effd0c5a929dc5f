"""The answers of `/v1/responses`, whole and as events. Both are made by `ResponseOutput` from the same deltas."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from gateway.body_writer import BodyWriter
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.logprobs import MAX_OF_ANSWER, ChatLogprobs, LogprobRoom
from gateway.plain_choice import PlainChoice
from gateway.receipts import Receipts
from gateway.response_echo import Echo
from gateway.response_output import CANCELLED, COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, ResponseOutput, usage_of
from gateway.slices import Slices, Written, to_json
from gateway.sse import KEEP_ALIVE, one_line
from gateway.stream_record import StreamRecord
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.errors import InvalidRequestError

RESPONSE_PREFIX = "resp_"  # of the id
_COPIES = 4  # of log-probabilities, in the last events of a stream
_SLICE = 4096  # pieces of JSON
_ENDS = {COMPLETED: "completed", INCOMPLETE: "incomplete", CANCELLED: "incomplete"}
_REASONS = {INCOMPLETE: "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """See `Form`. echo: what an answer repeats."""

    echo: Echo
    prefix: str = RESPONSE_PREFIX

    def chunks(
        self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack
    ) -> ResponseChunks:
        """The writer of a stream."""
        chunks = ResponseChunks(generation, record, self.echo, room)
        held.callback(chunks.close)
        return chunks

    def answer(
        self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack
    ) -> ResponseAnswer:
        """The writer of a whole answer."""
        answer = ResponseAnswer(generation, record, self.echo, room)
        held.callback(answer.close)
        return answer


class _Response:
    """What a whole answer and a stream have in common: the object, and the log-probabilities that are held for it."""

    def __init__(
        self, generation: Generation, record: StreamRecord, echo: Echo, room: LogprobRoom, copies: int
    ) -> None:
        self._generation = generation
        self._record = record
        self._echo = echo
        self._room = room
        self._copies = copies
        self._num_held = 0
        self._logprobs = ChatLogprobs(ascii_only=True) if record.logprobs else None
        self._output = ResponseOutput(
            record.response_id.removeprefix(RESPONSE_PREFIX),
            lambda index: record.call_id(0, index),
            logprobs=self._logprobs,
            tell=self._tell if copies > 1 else None,
        )

    def close(self) -> None:
        """It holds no more, itself among that: a circle would stay until a garbage collection. Idempotent."""
        self._output.forget()
        self._room.give_back(self._generation.tenant, self._num_held)
        self._num_held = 0

    def _tell(self, name: str, fields: Written) -> None:
        """A whole answer has no events."""

    def _feed(self, delta: ChoiceDelta) -> None:
        """Raises what `LogprobRoom.take` raises."""
        if delta.logprobs and self._logprobs is not None:
            count = sum([1 + len(entry.top) for entry in delta.logprobs]) * self._copies
            try:
                self._room.take(self._generation.tenant, count, self._num_held)
            except InvalidRequestError:  # in words of a chat, of which a stream may have any number
                words = f"include: an answer can tell {MAX_OF_ANSWER // self._copies} log-probabilities. Ask for fewer."
                raise InvalidRequestError(words, param="include") from None
            self._num_held += count
            for entry in delta.logprobs:
                self._logprobs.add(entry)
        self._output.feed(delta)

    def _object(self, status: str, error: dict[str, object] | None = None) -> Written:
        """`response` as it is now."""
        record, params = self._record, self._generation.prompts[0].params
        reason = _REASONS.get(status)
        head = {
            "id": record.response_id,
            "object": "response",
            "created_at": record.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": record.model,
            "previous_response_id": None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            "service_tier": "default",
            "store": False,
        }
        usage = "null" if status == IN_PROGRESS else usage_of(self._generation.usage())
        before = f'{one_line(to_json(head)[:-1])},{self._echo.text},"usage":{usage},"output":'
        return Written([before, *self._output.write(), "}"])


class ResponseAnswer(_Response):
    """A whole answer. Close it in the end."""

    def __init__(self, generation: Generation, record: StreamRecord, echo: Echo, room: LogprobRoom) -> None:
        super().__init__(generation, record, echo, room, copies=1)

    def describe(self, delta: ChoiceDelta) -> None:
        """Take the next delta. Raises what `LogprobRoom.take` raises."""
        self._feed(delta)

    async def write(self, wholes: list[ChoiceDelta], receipts: Receipts | None) -> Written:
        """The answer's JSON, once its choice has ended: of that one nothing else is needed here. It has no receipt."""
        return self._object(self._output.end(wholes[0].finish_reason))

    def forget(self) -> None:
        """It is written, and will not be again."""
        self._output.forget()


class ResponseChunks(_Response):
    """The events of a stream, each with a number; see `Chunks`. Close it in the end.

    There is no short way for tokens: each event holds the number of those before it. Nor can another gateway go on.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, generation: Generation, record: StreamRecord, echo: Echo, room: LogprobRoom) -> None:
        super().__init__(generation, record, echo, room, copies=_COPIES)
        self._number = 0
        self._events = Written()  # that are yet to be sent
        self._finish_reason: str | None = None

    @property
    def ends_at_once(self) -> bool:
        """What stands in the last events may be long only with log-probabilities."""
        return self._logprobs is None

    async def prepare(self, delta: ChoiceDelta) -> None:
        """See `Chunks`: nothing takes long."""

    def plain(self, output: ChoiceOutput, writer: BodyWriter) -> PlainChoice | None:
        """See `Chunks`."""
        return None

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """All events of one delta."""
        self._begin()
        self._feed(delta)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        return self._take()

    async def last(self) -> bytes:
        """The ends of all items that are open, and of the answer."""
        slices = Slices()
        status = self._output.end(self._finish_reason)
        self._tell(_ENDS[status], Written(['"response":', *self._object(status)]))
        await slices.pause()
        if len(self._events) <= _SLICE:
            return self._take()
        parts = []
        for start in range(0, len(self._events), _SLICE):  # log-probabilities, over and over
            parts.append("".join(self._events[start : start + _SLICE]).encode())
            await slices.pause()
        self._events.clear()
        return b"".join(parts)

    def failed(self, error: ApiError) -> bytes:
        """See `Chunks`."""
        self._begin()
        if error.status == 400:
            told = self._echo.in_words(InvalidRequestError(error.message, param=error.param))
            error = ApiError(400, told.message, told.code, told.param)
        about = {**error.body["error"], "code": _code_of(error)}
        self._output.end(None)
        self._tell(FAILED, Written(['"response":', *self._object(FAILED, about)]))
        return self._take()

    def _begin(self) -> None:
        if self._number == 0:
            for name in ("created", IN_PROGRESS):
                self._tell(name, Written(['"response":', *self._object(IN_PROGRESS)]))

    def _tell(self, name: str, fields: Written) -> None:
        kind = f"response.{name}"
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._number},'
        self._events += [head, *fields, "}\n\n"]
        self._number += 1

    def _take(self) -> bytes:
        text = "".join(self._events)
        self._events.clear()
        return text.encode()


def _code_of(error: ApiError) -> str:
    """One of those that OpenAI's object has."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
