"""Server-sent events: the frames, and the response that writes them while its client may be slow, quiet or gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from json.encoder import encode_basestring  # the C implementation where there is one
from typing import Protocol

from starlette.types import Receive, Scope, Send

from gateway.body import ClientGone
from gateway.body_writer import BodyWriter
from gateway.errors import ApiError, to_api_error
from gateway.generation import Generation
from gateway.plain_choice import PlainChoice
from gateway.slices import PART_BYTES, Slices, to_json
from gateway.watch import Watch
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.errors import EngineError, NovaInferError

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"  # some readers cut a stream at its empty lines, and pass over what begins with a colon
# Once an event has had an id, an empty line is an event without data to others, OpenAI's SDK among them.
KEEP_ALIVE_BETWEEN_IDS = b": keep-alive\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

# U+0085, U+2028 and U+2029 end a line for some readers of lines; JSON may escape them.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def json_string(text: str) -> str:
    """`text` as a JSON string on one line, other characters as they are."""
    return one_line(encode_basestring(text))


def one_line(text: str) -> str:
    """JSON on one line for every reader."""
    if not text.isascii():
        for char, escaped in _LINE_ENDS:  # `translate` takes a hundred times as long for a long text
            text = text.replace(char, escaped)
    return text


_SHORT = 16  # characters; tokens are not much longer
_MOST_KNOWN = 1 << 15
_known: dict[str, bytes] = {}  # short texts as JSON; tokens come again and again


def json_bytes(text: str) -> bytes:
    """`json_string` of a token's text, encoded."""
    data = _known.get(text)
    if data is None:
        data = json_string(text).encode()
        if len(text) <= _SHORT and len(_known) < _MOST_KNOWN:
            _known[text] = data
    return data


def event(payload: Mapping[str, object]) -> bytes:
    """One event with a JSON object."""
    return f"data: {one_line(to_json(payload))}\n\n".encode()


class Chunks(Protocol):
    """Writes the events of deltas."""

    async def prepare(self, delta: ChoiceDelta) -> None:
        """Do, in slices, what takes long: to be awaited before `delta` is written."""

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """The events of one delta."""

    @property
    def ends_at_once(self) -> bool:
        """Whether what follows the last delta takes no time."""

    @property
    def keep_alive(self) -> bytes:
        """What says to a client that waits that we are there."""

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""

    def plain(self, output: ChoiceOutput, writer: BodyWriter) -> PlainChoice | None:
        """The short way for the tokens of a choice that has begun; None if more is told of them than their text."""


class SseResponse:
    """Writes a generation as events.

    chunks writes those of one delta, last() gives those after the final one, `[DONE]` included, for which it may
    take its time. The status is sent with the first output, so that a refusal can still be an HTTP error; a failure
    after that is one `error` event and the end.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: Chunks,
        last: Callable[[], Awaitable[bytes]],
        headers: Mapping[str, str],
        stall_seconds: float,
    ) -> None:
        """stall_seconds: a client that takes nothing of what is sent to it for so long is given up."""
        self._generation = generation
        self._chunks = chunks
        self._last = last
        self._headers = [*_HEADERS, *((k.encode(), v.encode()) for k, v in headers.items())]
        self._started = False
        self._is_quiet = False  # for so long that the client shall hear that we are there
        self._slices = Slices()
        self._writer: BodyWriter | None = None
        self._stall_seconds = stall_seconds
        self._watch: Watch  # of the block that runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the end. Raises what went wrong only while nothing was sent."""
        self._generation.watch(receive)
        self._writer = BodyWriter.of(receive)
        transport = _transport(receive)
        if self._writer is not None:
            self._writer.on_stop(self._generation.dam)
        data = b""
        try:
            async with self._watched(transport):
                while not self._generation.finished:
                    data = await self._send_some(send)
                await self._send_last(send, data + await self._wait_for_last(send), transport)
        except (ClientGone, TimeoutError, OSError):
            self._generation.client_gone = True
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, NovaInferError):
                log.exception("a stream failed")
                error = EngineError("The server failed during this stream.")
            with contextlib.suppress(TimeoutError, OSError):
                async with self._watched(transport):
                    await self._send(send, self._chunks.failed(to_api_error(error)), more=False)
        finally:
            if self._writer is not None:
                self._writer.on_stop(None)

    def _watched(self, transport: asyncio.WriteTransport | None) -> Watch:
        told_at, unsent = self._generation.told_at, partial(_unsent, transport)
        self._watch = Watch(KEEP_ALIVE_SECONDS, self._stall_seconds, self._wake, told_at, unsent)
        return self._watch

    async def _send_some(self, send: Send) -> bytes:
        """Send what comes next; returns what may go with that which ends the stream."""
        self._watch.waits_since = self._watch.time()
        if self._started and self._writer is not None:
            await self._generation.wait_and_pour(self)
        else:
            await self._generation.wait()
        self._watch.waits_since = None
        self._slices.begin()
        if self._is_quiet:
            self._is_quiet = False
            await self._send(send, self._chunks.keep_alive)
        data, is_due = b"", False
        for delta in self._generation.take():
            await self._chunks.prepare(delta)
            data += self._chunks(delta)
            is_due = is_due or bool(delta.token_ids) or delta.finish_reason is not None
            if len(data) >= PART_BYTES:
                await self._send(send, data)
                data, is_due = b"", False
            await self._slices.pause()
        if self._generation.finished and self._chunks.ends_at_once:
            return data
        if is_due:
            await self._send(send, data)
        return b""

    @property
    def is_open(self) -> bool:
        """See `Sink`."""
        return self._writer is not None and self._writer.is_open

    def write(self, delta: ChoiceDelta) -> None:
        """See `Sink`."""
        data = self._chunks(delta)
        if data and self._writer is not None:
            self._writer.write(data)
            self._watch.waits_since = self._watch.time()

    def plain(self, output: ChoiceOutput) -> PlainChoice | None:
        """See `Sink`."""
        return None if self._writer is None else self._chunks.plain(output, self._writer)

    async def _wait_for_last(self, send: Send) -> bytes:
        if self._chunks.ends_at_once:
            return await self._last()
        last = asyncio.ensure_future(self._last())
        try:
            while not (await asyncio.wait([last], timeout=KEEP_ALIVE_SECONDS))[0]:
                await self._send(send, self._chunks.keep_alive)
            return await last
        finally:
            last.cancel()

    async def _send_last(self, send: Send, data: bytes, transport: asyncio.WriteTransport | None) -> None:
        """Return when the kernel has all of it: what is still in our buffers dies with this process, and as long as
        that may be, the engine keeps the stream.
        """
        if transport is not None and not transport.is_closing():  # of a closed one they cannot be set
            transport.set_write_buffer_limits(high=0)  # a further write waits until nothing is left
        await self._send(send, data)
        await self._send(send, b"", more=False)
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits()

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._watch.begin_send(len(data))
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._watch.sends_since = None

    def _wake(self) -> None:
        self._is_quiet = True
        self._generation.wake()


def _transport(receive: Receive) -> asyncio.WriteTransport | None:
    """The connection's, of uvicorn, which has no other way to it; None of another server."""
    transport: asyncio.WriteTransport | None = getattr(getattr(receive, "__self__", None), "transport", None)
    return transport


def _unsent(transport: asyncio.WriteTransport | None) -> int:
    """Bytes that wait for room in the kernel, which the client makes by reading."""
    return 0 if transport is None else transport.get_write_buffer_size()
