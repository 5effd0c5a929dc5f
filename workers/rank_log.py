"""What a rank warns of, told to the supervisor: its own standard error goes to a file of Ray's."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq

from novainfer.protocol.supervision import SUPERVISOR_SCHEMA, RankWarning
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import connect_push

MOST_PER_MINUTE = 60
_MOST_CHARACTERS = 2000  # of one; a compiler may say much
_MINUTE = 60.0  # seconds


class RankLog(logging.Handler):
    """Of all loggers of the process, from whichever thread; nobody waits for who listens.

    What has a traceback stays where it is: it is the fault that ends the rank, of which a report says the words.
    """

    def __init__(self, context: zmq.Context[Any], supervisor: Endpoint | None, rank: int, epoch: int) -> None:
        """supervisor: None = nobody listens."""
        super().__init__(logging.WARNING)
        self._rank, self._epoch = rank, epoch
        self._minute, self._count = time.monotonic(), 0
        self._socket = None if supervisor is None else connect_push(context, supervisor)

    def __enter__(self) -> RankLog:
        if self._socket is not None:
            logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)
        self.acquire()
        socket, self._socket = self._socket, None
        self.release()
        if socket is not None:
            socket.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock, so that one thread at a time has the socket."""
        if logging.lastResort is not None and logging.getLogger().handlers == [self]:
            logging.lastResort.handle(record)  # what Python would have done without us
        if self._socket is None or record.exc_info:
            return
        now = time.monotonic()
        if now > self._minute + _MINUTE:
            self._minute, self._count = now, 0
        self._count += 1
        if self._count > MOST_PER_MINUTE:
            return
        try:
            self._tell(record)
        except Exception:  # whoever warns goes on, as with all handlers
            self.handleError(record)

    def _tell(self, record: logging.LogRecord) -> None:
        assert self._socket is not None
        # A client's own words may be in it: nothing in them looks like a line of the log, or is no text.
        words = " ".join(record.getMessage()[:_MOST_CHARACTERS].split()).encode("utf-8", "replace").decode()
        if self._count == MOST_PER_MINUTE:
            words += " (what this process warns of in the rest of the minute is left out)"
        message = SUPERVISOR_SCHEMA.encode(RankWarning(self._rank, self._epoch, record.levelno, words))
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
