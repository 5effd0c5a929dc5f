"""The short way into an answer that has begun: past uvicorn's layers, into its connection."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Receive
from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class WatchedFlow(FlowControl):
    """uvicorn's, which says at once when a client takes no more: others need not ask for each part."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.on_stop: Callable[[], None] = _nothing
        self.on_lost: Callable[[], None] = _nothing

    def pause_writing(self) -> None:
        super().pause_writing()
        self.on_stop()


class BodyWriter:
    """Writes into an answer whose body has begun what `send` would, without the way through all layers."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle, flow: WatchedFlow) -> None:
        self._cycle = cycle
        self._flow = flow

    @classmethod
    def of(cls, receive: Receive) -> BodyWriter | None:
        """That of the request which this belongs to; None where another server, protocol or parser has it."""
        protocol = sys.modules.get("uvicorn.protocols.http.httptools_impl")  # not there without httptools
        cycle = getattr(receive, "__self__", None)
        if protocol is None or not isinstance(cycle, protocol.RequestResponseCycle):
            return None
        if cycle.scope["method"] == "HEAD" or not isinstance(cycle.flow, WatchedFlow):
            return None
        return cls(cycle, cycle.flow)

    @property
    def is_open(self) -> bool:
        """The client takes what is written, at once."""
        cycle = self._cycle
        has_room = not (self._flow.write_paused or cycle.disconnected)
        return has_room and cycle.chunked_encoding is True and not cycle.response_complete

    @property
    def is_lost(self) -> bool:
        """The client has gone."""
        return self._cycle.disconnected

    def on_lost(self, lost: Callable[[], None] | None) -> None:
        """What is called when the client goes, where a task would have to wait for it; None: nothing."""
        self._flow.on_lost = _nothing if lost is None else lost
        if lost is not None:
            self._flow.resume_reading()  # a long body may have stopped it, and with it any news of the client

    def on_stop(self, stopped: Callable[[], None] | None) -> None:
        """What is called when it is open no more, but for the answer's end; None: nothing."""
        self._flow.on_stop = _nothing if stopped is None else stopped

    def write(self, data: bytes) -> None:
        """A part of the body, not empty."""
        self.write_part(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def write_part(self) -> Callable[[bytes], None]:
        """Writes a part that has its size before it; the same one for the rest of an answer whose body has begun."""
        return self._cycle.transport.write


def _nothing() -> None:
    """Nobody asks."""
