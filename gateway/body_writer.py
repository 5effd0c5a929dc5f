"""The short way into an answer that has begun: past uvicorn's layers, into its connection."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from starlette.types import Receive

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class BodyWriter:
    """Writes into an answer whose body has begun what `send` would, without the way through all layers."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, receive: Receive) -> BodyWriter | None:
        """That of the request which this belongs to; None where another server or parser has it."""
        protocol = sys.modules.get("uvicorn.protocols.http.httptools_impl")  # not there without httptools
        cycle = getattr(receive, "__self__", None)
        if protocol is None or not isinstance(cycle, protocol.RequestResponseCycle):
            return None
        return cls(cycle) if cycle.scope["method"] != "HEAD" else None

    @property
    def is_open(self) -> bool:
        """The client takes what is written, at once."""
        cycle = self._cycle
        has_room = not (cycle.flow.write_paused or cycle.disconnected)
        return has_room and cycle.chunked_encoding is True and not cycle.response_complete

    def write(self, data: bytes) -> None:
        """A part of the body, not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def write_between(self, head: bytes, data: bytes, tail: bytes) -> None:
        """The three as one part."""
        size = len(head) + len(data) + len(tail)
        self._cycle.transport.write(b"%x\r\n%b%b%b\r\n" % (size, head, data, tail))
