"""uvicorn's HTTP protocol with bounds that it lacks: on headers, their time and size; on answers that nobody reads; on
what comes before an answer's end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.answer_cycle import AnswerCycle
from gateway.body_writer import WatchedFlow
from gateway.door import Door
from gateway.errors import ApiError
from gateway.head_lines import HeadLines
from gateway.plain_request import PlainRequest, read_plain_head

log = logging.getLogger(__name__)

HEADER_SECONDS = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_HELD_BYTES = 32 * 1024  # of a body that is waited for; below what uvicorn stops to read at
BODY_WAIT_SECONDS = 0.05
MAX_DROPPED_BYTES = 8 * MAX_HEADER_BYTES


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
        self.flow = self._flow = WatchedFlow(transport)
        self._head = HeadLines()
        self._header_timer: asyncio.TimerHandle | None = None
        self._reads_headers = True
        self._at_door: PlainRequest | None = None  # a request that is not let in yet
        self._held = b""  # what has come of it
        self._door_timer: asyncio.TimerHandle | None = None
        self._unstarted: tuple[RequestResponseCycle, ASGI3Application] | None = None  # until its body is here
        self._body_timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._num_framing = 0  # bytes of a request since its head or the last of its body: sizes of chunks, trailers
        self._is_last = False  # nothing that comes is looked at any more
        self._start_header_timer()
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_stall_timer()
        self._leave_door()
        self._forget_unstarted()
        super().connection_lost(exc)
        self._flow.on_stop()
        self._flow.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES:
                self.transport.close()
            return
        if self.door is not None and (self._held or (self.door.is_guarded and self._is_idle())):
            self._pass_door(self.door, data)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        if not self._awaits_head():
            self._num_framing += len(data)
            self._parse(data)
            if self._num_framing > MAX_HEADER_BYTES:  # the parser keeps a trailer until it ends
                self._is_last = True
                self.transport.close()
            elif self._is_answered():
                self._await_next()
            return
        if self._is_answering():
            if data.strip(b"\r\n"):
                self._end_after_answer()
            return
        data = self._head.take(data)
        if self._head.num_bytes > MAX_HEADER_BYTES:
            words = f"The request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB."
            self._refuse(b"431 Request Header Fields Too Large", ApiError(431, words, "headers_too_large"))
            return
        if data:
            self._parse(data)
        if self._head.num_bytes and self._header_timer is None:  # heads nearly always come at once, and need no timer
            self._unset_keepalive_if_required()
            self._start_header_timer()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._unstarted is not None and self._body_timer is None:
            self._body_timer = self.loop.call_later(BODY_WAIT_SECONDS, self._start_unstarted)

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
            self._door_timer = self.loop.call_later(BODY_WAIT_SECONDS, self._let_in_without_body)

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

    def _let_in_without_body(self) -> None:
        self._let_in()
        self._start_unstarted()

    def _leave_door(self) -> None:
        self._at_door = None
        self._held = b""
        if self._door_timer is not None:
            self._door_timer.cancel()
            self._door_timer = None

    def _is_idle(self) -> bool:
        """No byte of a request that is not answered has come."""
        cycle = self.cycle
        if self._head.num_bytes:
            return False
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    def shutdown(self) -> None:
        """End the connection, after the answer to what has begun to come."""
        if self._held:
            self._let_in()
        self._start_unstarted()
        super().shutdown()

    def on_message_begin(self) -> None:
        if self._is_answering():
            self._end_after_answer()
        elif not self._head.num_bytes:  # behind a body that was not waited for: where it begins is not known
            self._is_last = True
            self.transport.close()
        if self._is_last:
            return
        super().on_message_begin()
        self._reads_headers = True

    def on_url(self, url: bytes) -> None:
        if not self._is_last:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_last or not self._reads_headers:  # it stands behind a body
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_last:
            return
        self._reads_headers = False
        self._num_framing = 0
        self._head.begin()
        self._stop_header_timer()
        if self.parser.should_upgrade():  # it is read as one without a body: what follows could be anything
            self._refuse(b"400 Bad Request", ApiError(400, "This server does not switch protocols.", "invalid_http"))
            return
        version = self.parser.get_http_version()
        if version != "1.0" and [name for name, _ in self.headers].count(b"host") != 1:
            self._refuse(b"400 Bad Request", ApiError(400, "A request needs one Host header.", "invalid_http"))
        else:
            self._begin_cycle(version)

    def _begin_cycle(self, version: str) -> None:
        """What uvicorn's does, with a cycle of ours: one request at a time, so none waits for another's end."""
        url = httptools.parse_url(self.url)
        scope, path = self.scope, url.path.decode("ascii")
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""
        self.cycle = AnswerCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",  # which does not know it
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)

    def on_body(self, body: bytes) -> None:
        self._num_framing = 0
        cycle = self.cycle
        if self._is_last or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if not self._is_last:
            self.cycle.more_body = False  # also when it was answered before its end
            if not self.cycle.response_complete:
                self.cycle.message_event.set()
            self._start_unstarted()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Once a short body is here, or a moment later: clients often send head and body one after the other, and an
        answer between the two (to a wrong key, say) leaves a body behind that the next request's head comes with.
        """
        if self._awaits_short_body():
            self._unstarted = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _awaits_short_body(self) -> bool:
        lengths = [value.lstrip(b"0") for name, value in self.headers if name == b"content-length"]
        is_short = bool(lengths and lengths[0]) and int(lengths[0][:20]) <= MAX_HELD_BYTES
        return is_short and not self.expect_100_continue

    def _start_unstarted(self) -> None:
        if self._unstarted is not None:
            cycle, app = self._unstarted
            self._forget_unstarted()
            super()._start_asgi_task(cycle, app)

    def _forget_unstarted(self) -> None:
        self._unstarted = None
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _awaits_head(self) -> bool:
        """What comes next belongs to a request's head."""
        return self._reads_headers or not self.cycle.more_body

    def _is_answering(self) -> bool:
        """A whole request is there, and its answer is not."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _is_answered(self) -> bool:
        """There is an answer, perhaps before the end of its request."""
        return self.cycle is not None and self.cycle.response_complete

    def _await_next(self) -> None:
        """The rest of a request that was answered early has stopped uvicorn's keep-alive timer."""
        if self.timeout_keep_alive_task is None and not (self._reads_headers or self.transport.is_closing()):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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

    def _refuse(self, status: bytes, error: ApiError) -> None:
        """Say so, and read on for a while: the client may not have sent all of its request yet, and bytes that nobody
        reads would reset the connection, our answer with it.
        """
        self._is_last = True
        self._write_last(status, error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._header_timer is None:
            self._start_header_timer()

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


def bounded_protocol(stall_seconds: float, door: Door | None = None) -> type[BoundedHttpProtocol]:
    """The protocol with this patience and this door, as uvicorn wants it: a class."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"stall_seconds": stall_seconds, "door": door})
