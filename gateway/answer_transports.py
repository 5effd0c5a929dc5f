"""What stands in a cycle of uvicorn's for its transport, and writes what uvicorn writes in another way."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CHUNKED = b"transfer-encoding: chunked\r\n"


class HeldHead:
    """Until the head of an answer has gone: with the first part of the body, in one system call. uvicorn writes the two
    one right after the other, but each for itself.
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


class WithoutChunks:
    """For a client that speaks HTTP/1.0, which knows no chunks: a body whose length is not announced ends with the
    connection. What is written is the head and the first chunks, then whole chunks.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._has_head = self._is_chunked = False

    def write(self, data: bytes) -> None:
        """A part of the answer; nothing of what comes before it (100), which HTTP/1.0 does not know either."""
        if not self._cycle.response_started:
            return
        head = b""
        if not self._has_head:
            head, blank, data = data.partition(b"\r\n\r\n")
            head += blank
            self._has_head, self._is_chunked = True, _CHUNKED in head
            head = head.replace(_CHUNKED, b"")
        self._transport.write(head + (_joined_chunks(data) if self._is_chunked else data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _joined_chunks(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


def stand_in(cycle: RequestResponseCycle) -> None:
    """Before the application runs."""
    if cycle.scope["method"] == "HEAD":
        return  # no body follows
    if cycle.scope["http_version"] == "1.0":
        cycle.transport = cast(Any, WithoutChunks(cycle))
    cycle.transport = cast(Any, HeldHead(cycle))
