"""uvicorn's HTTP protocol with bounds that it lacks: on headers, their time and size; on answers that nobody reads; on
what comes before an answer's end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.door import Door
from gateway.errors import ApiError
from gateway.plain_request import PlainRequest, read_plain_head

log = logging.getLogger(__name__)

HEADER_SECONDS = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_HELD_BYTES = 32 * 1024  # of a body at the door; below what uvicorn stops to read at
DOOR_SECONDS = 0.05
MAX_DROPPED_BYTES = 8 * MAX_HEADER_BYTES
_UPGRADE = re.compile(rb"(\r\n)u(pgrade[ \t]*:)", re.IGNORECASE)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers come too slowly, or are too large (after a 431).

    The clock runs from the connection, or from the first byte of a later request, until the headers are complete;
    between requests uvicorn's own keep-alive timeout rules. A connection that has more to send than its buffers hold,
    and gets rid of none of it for `stall_seconds`, is cut: to close it would mean to wait for its client.

    One request at a time: what comes after a request before its answer has ended is dropped, and the connection is
    closed after that answer. uvicorn would keep it and read no more, and so never see that the client has left.
    """

    stall_seconds = 30.0
    door: Door | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._reads_headers = True
        self._at_door: PlainRequest | None = None  # a request that is not let in yet
        self._held = b""  # what has come of it
        self._door_timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._is_last = False  # nothing that comes is looked at any more
        self._start_header_timer()
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_stall_timer()
        self._leave_door()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES:
                self.transport.close()
            return
        if self.door is None or not (self._held or self._is_idle()):
            self._feed(data)
        else:
            self._pass_door(self.door, data)

    def _feed(self, data: bytes) -> None:
        if self._awaits_head() and b"pgrade" in data.lower():
            data = _without_upgrade(data)
        super().data_received(data)
        if self._reads_headers:  # which nearly always come at once, and need no timer
            if self._header_timer is None:
                self._start_header_timer()
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse()

    def _pass_door(self, door: Door, data: bytes) -> None:
        """Refuse a request that is here to its end, or let it in. Clients often send head and body one after the other:
        a moment's wait for a body that is not long.
        """
        held = self._held = self._held + data
        request = self._at_door = self._at_door or read_plain_head(held)
        # One that does not read its answers is better off with a task that waits.
        if request is None or self.flow.write_paused or not door.is_watched(request):
            self._let_in()
        elif len(held) >= request.num_bytes:
            self._refuse_or_let_in(door, request)
        elif request.body_bytes > MAX_HELD_BYTES:
            self._let_in()
        elif self._door_timer is None:
            self._unset_keepalive_if_required()
            self._door_timer = self.loop.call_later(DOOR_SECONDS, self._let_in)

    def _refuse_or_let_in(self, door: Door, request: PlainRequest) -> None:
        answer = None
        if len(self._held) == request.num_bytes:  # what follows is the parser's matter
            try:
                answer = door.refusal(request, self.server_state.default_headers)
            except Exception:
                log.exception("the door failed")
        if answer is None:
            self._let_in()
            return
        self._leave_door()
        self._stop_header_timer()
        self.transport.write(answer)
        self.on_response_complete()

    def _let_in(self) -> None:
        held = self._held
        self._leave_door()
        self._feed(held)

    def _leave_door(self) -> None:
        self._at_door = None
        self._held = b""
        if self._door_timer is not None:
            self._door_timer.cancel()
            self._door_timer = None

    def _is_idle(self) -> bool:
        """No byte of a request that is not answered has come."""
        cycle = self.cycle
        if self._reads_headers and self._header_bytes:
            return False
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    def shutdown(self) -> None:
        """End the connection, after the answer to what has begun to come."""
        if self._held:
            self._let_in()
        super().shutdown()

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._end_after_answer()
        if self._is_last:
            return
        super().on_message_begin()
        self._header_bytes = 0
        self._reads_headers = True

    def on_url(self, url: bytes) -> None:
        if not self._is_last:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_last:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_last:
            self._reads_headers = False
            self._stop_header_timer()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_last:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_last:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["method"] != "HEAD":  # a body follows
            cycle.transport = cast(asyncio.Transport, HeldHead(cycle))
        super()._start_asgi_task(cycle, app)

    def _awaits_head(self) -> bool:
        """What comes next belongs to a request's head."""
        return self._reads_headers or not self.cycle.more_body

    def _is_answering(self) -> bool:
        """A whole request is there, and its answer is not."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _end_after_answer(self) -> None:
        self._is_last = True
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no HTTP request: an answer in the shape of all others."""
        if self._is_answering():  # they came after one
            self._end_after_answer()
            return
        self._write_last(b"400 Bad Request", ApiError(400, msg, "invalid_http"))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _watch_writing(self) -> None:
        self._stop_stall_timer()
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self._cut_if_stalled, left)

    def _cut_if_stalled(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch_writing()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self) -> None:
        """Say that the headers are too large, and read on for a while: the client may not have sent all of them yet,
        and bytes that nobody reads would reset the connection, our answer with it.
        """
        self._is_last = True
        words = f"The request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB."
        self._write_last(b"431 Request Header Fields Too Large", ApiError(431, words, "headers_too_large"))
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _write_last(self, status: bytes, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _without_upgrade(data: bytes) -> bytes:
    """The same with a header of another name for `Upgrade`, in the first head.

    A server may go on in HTTP/1.1 whatever a client offers, and some offer h2c with every request; httptools takes such
    a request for one without a body.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(rb"\1x\2", head) + end + rest


class HeldHead:
    """Stands in a cycle for its transport until the head of its answer has gone: with the first part of the body, in
    one system call. uvicorn writes the two one right after the other, but each for itself.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """The head, then the body's first part."""
        if not self._cycle.response_started:  # that the request may go on (100)
            self._transport.write(data)
        elif self._head:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)
        else:
            self._head = data

    def close(self) -> None:
        """Nothing follows."""
        self._transport.write(self._head)
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def bounded_protocol(stall_seconds: float, door: Door | None = None) -> type[BoundedHttpProtocol]:
    """The protocol with this patience and this door, as uvicorn wants it: a class."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"stall_seconds": stall_seconds, "door": door})
