"""uvicorn's cycle of a request and its answer, which writes answers in another way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NOT_IN_NAMES = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY = frozenset({204, 304})


class AnswerCycle(RequestResponseCycle):
    """The head of an answer goes with the first part of the body, in one system call; uvicorn writes each for itself,
    and looks at one header after the other.

    For a client that speaks HTTP/1.0, which knows no chunks, a body whose length is not announced ends with the
    connection. Names of headers are in lower case, as ASGI wants them.
    """

    _head = b""  # until it has gone
    _is_counted = True  # the body has the length that was announced
    _is_read = False  # its request's body was given out, all at once

    async def run_asgi(self, app: ASGI3Application) -> None:
        """To the end of the answer, or of the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            self.logger.error("Exception in ASGI application\n", exc_info=error)
            await self._break_off()
        else:
            if not (self.response_complete or self.disconnected):
                self.logger.error("ASGI callable returned without completing response.")
                await self._break_off()
        finally:
            self.on_response = _nothing  # it knows the connection, and that one us

    async def _break_off(self) -> None:
        if self._head:  # nothing has gone yet: what failed can still be told
            self._head, self.response_started, self._is_counted = b"", False, True
            self.chunked_encoding, self.expected_content_length = None, 0
        if self.response_started:
            self.transport.close()
        else:
            await self.send_500_response()

    async def receive(self) -> ASGIReceiveEvent:
        """See ASGI. A body that is here to its end when it is first asked for needs no waiting."""
        is_over = self.disconnected or self.response_complete
        if self.more_body or self._is_read or self.waiting_for_100_continue or is_over:
            return await super().receive()
        self._is_read = True
        self.flow.resume_reading()
        self.message_event.clear()  # what comes next is that the client leaves, or the answer's end
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: ASGISendEvent) -> None:
        """See ASGI. What a client that has gone does not hear is no error."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        fields: Mapping[str, Any] = message
        kind = fields["type"]
        if self.response_complete or kind != ("http.response.body" if self.response_started else "http.response.start"):
            raise RuntimeError(f"Unexpected ASGI message '{kind}'.")
        if not self.response_started:
            self._begin(fields["status"], [*self.default_headers, *fields.get("headers", ())])
        else:
            self._go_on(fields.get("body", b""), fields.get("more_body", False))

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        names, values = zip(*headers, strict=True) if headers else ((), ())
        if _NOT_IN_NAMES.search(b"".join(names)) or _NOT_IN_VALUES.search(b"".join(values)):
            raise RuntimeError("Invalid HTTP header.")
        self.response_started = True
        self.waiting_for_100_continue = False
        if b"content-length" in names:
            self.chunked_encoding = False
            self.expected_content_length = int(values[names.index(b"content-length")])
        elif self.scope["http_version"] == "1.0":
            self._is_counted = False
        elif self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY:
            self.chunked_encoding = True
            lines += b"transfer-encoding: chunked\r\n"
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines += b"connection: close\r\n"
        self._head = b"%b%b\r\n" % (STATUS_LINE[status], lines)

    def _go_on(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._is_counted:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("Response content longer than Content-Length")
        self._write(body)
        if not more:
            if self.expected_content_length != 0:
                raise RuntimeError("Response content shorter than Content-Length")
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _write(self, part: bytes) -> None:
        if self._head:
            part, self._head = self._head + part, b""
        if part:
            self.transport.write(part)


def _nothing() -> None:
    """The answer is no concern of the connection any more."""
