"""A connection to the gateway's HTTP protocol, driven read by read, with an application that says what it got."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.connection import BoundedHttpProtocol, bounded_protocol
from gateway.plain_request import PlainRequest

ANSWER = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


class ScriptedDoor:
    """Refuses what is sent to `/full`."""

    def __init__(self) -> None:
        self.is_guarded = True
        self.asked: list[int] = []  # bytes of each body
        self.fails = False

    def is_watched(self, request: PlainRequest) -> bool:
        return request.path != "/open"

    def refusal(self, request: PlainRequest, headers_of_all: object) -> bytes | None:
        self.asked.append(request.body_bytes)
        if self.fails:
            raise ZeroDivisionError
        return ANSWER if request.path == "/full" else None


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.has_ended = self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Talk:
    """A connection. `parts` of the application's answer: none stands for one of a known length.

    has_leave: it answers; reads_body: after all of the request has come.
    """

    def __init__(self, *, has_door: bool = True, parts: tuple[bytes, ...] = (), reads_body: bool = True) -> None:
        self.has_leave = asyncio.Event()
        self.has_leave.set()
        self._parts = parts
        self._reads_body = reads_body
        self.door = ScriptedDoor()
        self.got: list[tuple[str, bytes]] = []
        self.has_answered = asyncio.Event()
        kind = bounded_protocol(30.0, self.door if has_door else None)  # type: ignore[arg-type]
        config = uvicorn.Config(
            self._app, http=kind, interface="asgi3", proxy_headers=False, log_config=None, access_log=False
        )
        config.load()
        self.wire = Wire()
        self.protocol: BoundedHttpProtocol = kind(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(self.wire)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", self._reads_body
        while more:
            part = await receive()
            body += part.get("body", b"")
            more = part.get("more_body", False)
        self.got.append((scope["path"], body))
        await self.has_leave.wait()
        headers = [] if self._parts else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if self._parts else b"ok"})
        self.has_answered.set()

    def read(self, data: bytes) -> bytes:
        """One read; what is written in it."""
        before = len(self.wire.written)
        self.protocol.data_received(data)
        return self.wire.written[before:]

    async def answer(self) -> bytes:
        """The application's, once it is there; then it may be waited for again."""
        await self.has_answered.wait()
        self.has_answered.clear()
        return self.wire.written


def post(path: str, body: bytes = b"{}", *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: h", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(main())
