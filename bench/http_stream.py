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


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, and with which key."""

    base_url: str  # without /v1
    api_key: str | None = None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The parsed `data:` events of a streamed answer, up to `[DONE]`. Raises `RequestError`."""
        url = urlsplit(self.base_url)
        secure = url.scheme == "https"
        try:
            reader, writer = await asyncio.open_connection(
                url.hostname,
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
                limit=1 << 20,
            )
        except OSError as error:
            raise RequestError(f"cannot connect: {error}") from None
        try:
            writer.write(self._head_and_body(url.path + path, url.netloc, body))
            await writer.drain()
            async for event in _read_events(reader):
                yield event
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _head_and_body(self, path: str, host: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + payload


async def _read_events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    status, headers = await _read_head(reader)
    if status != 200:
        text = (await reader.read(4096)).decode(errors="replace")
        raise RequestError(f"HTTP {status}: {' '.join(text.split())[:200]}", status, headers)
    pending = b""
    async for piece in _pieces(reader, "chunked" in headers.get("transfer-encoding", "")):
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
