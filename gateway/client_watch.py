"""Notices that the client of an answer has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from gateway.body_writer import BodyWriter


class ClientWatch:
    """From now until `stop`. lost: called then, perhaps at once.

    The connection says it where it is one of ours; elsewhere a task waits for it, and nothing else may read from there.
    """

    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        self._task: asyncio.Task[None] | None = None
        self._writer = BodyWriter.of(receive)
        if self._writer is None:
            self._task = asyncio.create_task(_wait(receive, lost))
        elif self._writer.is_lost:
            lost()
        else:
            self._writer.on_lost(lost)

    def stop(self) -> None:
        """Nobody cares any more."""
        if self._task is not None:
            self._task.cancel()
        elif self._writer is not None:
            self._writer.on_lost(None)


async def _wait(receive: Receive, lost: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    lost()
