"""Streamed completions over connections that are kept, as most clients do, at a cost per request and token that leaves
the machine to the server: no task, no parser, callbacks alone.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from bench.http_stream import RequestError

_TOKENS = b'"token_ids":['


class Listener(Protocol):
    """Hears what comes of one request. Exactly one of `ended` and `failed` is called, and nothing after it."""

    def tokens(self, count: int) -> None:
        """So many have come."""

    def ended(self) -> None:
        """With `[DONE]`."""

    def failed(self, error: RequestError) -> None:
        """With another status than 200 (of the headers `retry-after` alone is kept), an error event, or a connection
        that broke.
        """


class Pool:
    """Connections to one server; `api_key` goes with every request."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._url = urlsplit(base_url)
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        path = f"{self._url.path}/v1/completions"
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n{key}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_resent = 0  # requests sent once more, over a new connection

    def send(self, body: bytes, listener: Listener) -> None:
        """Send a completion request, a JSON object, over a connection that is free or else a new one."""
        if self._is_closed:
            return
        request = self._head + b"%d\r\n\r\n%b" % (len(body), body)
        if self._idle:
            self._idle.pop().ask(request, listener, is_first=False)
        else:
            self.open(request, listener)

    def open(self, request: bytes, listener: Listener) -> None:
        """Send it over a new connection."""
        task = asyncio.ensure_future(self._open(request, listener))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, request: bytes, listener: Listener) -> None:
        secure = self._url.scheme == "https"
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                partial(_Connection, self),
                self._url.hostname or "",
                self._url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        except OSError as error:
            listener.failed(RequestError(f"cannot connect: {error}"))
        else:
            connection.ask(request, listener, is_first=True)

    def add(self, connection: _Connection) -> None:
        """It is there."""
        self._all.add(connection)

    def keep(self, connection: _Connection) -> None:
        """It is free."""
        self._idle.append(connection)

    def drop(self, connection: _Connection) -> None:
        """It is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Cut all of them off. No listener hears more, nor of what is sent from now on."""
        self._is_closed = True
        for task in self._opening:
            task.cancel()
        for connection in list(self._all):
            connection.abandon()


class _Connection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._listener: Listener | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._pool.add(self)

    def ask(self, request: bytes, listener: Listener, *, is_first: bool) -> None:
        self._request = request
        self._listener = listener
        self._is_first = is_first
        self._data = b""  # what has come and is not looked at yet
        self._status = 0  # of the answer; 0 = its head is not here
        self._events = b""  # the part of an event that is here
        self._is_done = False
        self._transport.write(request)

    def abandon(self) -> None:
        self._listener = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._listener is None:
            return
        self._data += data
        if not self._status and not self._take_head():
            return
        if self._status == 200:
            self._take_chunks()
        elif len(self._data) >= self._length:
            text = " ".join(self._data[: self._length].decode(errors="replace").split())[:200]
            headers = {"retry-after": self._header(b"retry-after").decode()}
            self._end(RequestError(f"HTTP {self._status}: {text}", self._status, headers))

    def _take_head(self) -> bool:
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return False
        self._data = rest
        self._head = head.lower() + b"\r\n"
        self._status = int(head[9:12])
        self._length = int(self._header(b"content-length") or 0)
        if self._status == 200 and self._header(b"transfer-encoding") != b"chunked":
            self._end(RequestError("the answer is no stream", self._status))
            return False
        return True

    def _header(self, name: bytes) -> bytes:
        _, _, rest = self._head.partition(b"\r\n%b:" % name)
        return rest.partition(b"\r\n")[0].strip()

    def _take_chunks(self) -> None:
        data, at = self._data, 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            at = end + 2
            if size == 0:
                self._data = data[at:]
                self._end(None if self._is_done else RequestError("the stream broke off"))
                return
            self._take_events(data[line_end + 2 : end])
            if self._listener is None:
                return
        self._data = data[at:]

    def _take_events(self, piece: bytes) -> None:
        *events, self._events = (self._events + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b'data: {"error"'):
                self._transport.close()
                self._end(RequestError(event[6:].decode(errors="replace")))
                return
            self._is_done |= event == b"data: [DONE]"
            count, at = 0, event.find(_TOKENS)
            while at >= 0:
                at += len(_TOKENS)
                end = event.find(b"]", at)
                count += event.count(b",", at, end) + (end > at)
                at = event.find(_TOKENS, end)
            if count and self._listener is not None:
                self._listener.tokens(count)

    def _end(self, error: RequestError | None) -> None:
        listener, self._listener = self._listener, None
        if not self._transport.is_closing():
            if self._header(b"connection") == b"close" or (error is not None and error.status in (0, 200)):
                self._transport.close()
            else:
                self._pool.keep(self)
        if listener is not None:
            listener.ended() if error is None else listener.failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.drop(self)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if not self._is_first and not self._status and not self._data:  # the server closed it before it had the request
            self._pool.num_resent += 1
            self._pool.open(self._request, listener)
        else:
            listener.failed(RequestError(f"the connection ended: {exc}"))
