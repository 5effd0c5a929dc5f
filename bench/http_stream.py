"""A lean HTTP/1.1 client for server-sent events: the load generator shares the machine with what it measures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class RequestError(Exception):
    """The request did not end as it should; the text says how.

    `status` and `headers` (names in lower case) are those of an answer that is no stream, else 0 and none.
    """

    def __init__(self, text: str, status: int = 0, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, and with which key.

    idle: None, or connections that are kept for further requests, as the clients of most programs do; see `close`.
    """

    base_url: str  # without /v1
    api_key: str | None = None
    idle: list[Connection] | None = None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The parsed `data:` events of a streamed answer, up to `[DONE]`. Raises `RequestError`."""
        url = urlsplit(self.base_url)
        request = self._head_and_body(url.path + path, url.netloc, body)
        connection: Connection | None = None
        has_ended = False  # the answer, to its last byte
        try:
            connection, status, headers = await self._ask(request)
            is_chunked = "chunked" in headers.get("transfer-encoding", "")
            if status != 200:
                length = int(headers.get("content-length", "-1"))
                text = await (connection[0].readexactly(length) if length >= 0 else connection[0].read(4096))
                has_ended = length >= 0
                raise RequestError(f"HTTP {status}: {' '.join(text.decode().split())[:200]}", status, headers)
            pieces = _pieces(connection[0], is_chunked)
            async for event in _read_events(pieces):
                yield event
            if self.idle is not None and is_chunked:
                has_ended = not [piece async for piece in pieces]
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from None
        finally:
            if connection is not None:
                await self._leave(connection, is_usable=has_ended)

    async def _ask(self, request: bytes) -> tuple[Connection, int, dict[str, str]]:
        """Send it; the connection, and the head of the answer. One that was kept may have been closed meanwhile."""
        while True:
            is_old = bool(self.idle)
            connection = self.idle.pop() if self.idle else await self._connect()
            try:
                connection[1].write(request)
                await connection[1].drain()
                return connection, *await _read_head(connection[0])
            except (OSError, asyncio.IncompleteReadError) as error:
                await _close(connection[1])
                if not is_old or (isinstance(error, asyncio.IncompleteReadError) and error.partial):
                    raise
            except BaseException:
                await _close(connection[1])
                raise

    async def _connect(self) -> Connection:
        url = urlsplit(self.base_url)
        secure = url.scheme == "https"
        try:
            return await asyncio.open_connection(
                url.hostname,
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
                limit=1 << 20,
            )
        except OSError as error:
            raise RequestError(f"cannot connect: {error}") from None

    async def _leave(self, connection: Connection, *, is_usable: bool) -> None:
        if self.idle is not None and is_usable:
            self.idle.append(connection)
        else:
            await _close(connection[1])

    async def close(self) -> None:
        """Close what is kept."""
        while self.idle:
            await _close(self.idle.pop()[1])

    def _head_and_body(self, path: str, host: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close" if self.idle is None else "Connection: keep-alive",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + payload


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    pending = b""
    async for piece in pieces:
        *blocks, pending = (pending + piece).split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data:"):
                continue  # a comment that keeps the connection alive
            data = block[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestError(str(event["error"]))
            yield event
    raise RequestError("the stream broke off")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    fields = [line.partition(":") for line in lines if line]
    return int(first.split()[1]), {name: value.strip() for name, _, value in fields}


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
