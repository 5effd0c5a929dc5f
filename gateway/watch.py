"""Time limits for what a task does again and again: one timer for all of it, where `asyncio.timeout` takes one each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Watch:
    """Whether its task waits, or sends, for too long; to be used in one `async with` of that task, and by it alone.

    Set `waits_since` (`time`; None: it does not) around a wait, `begin_send` and `sends_since = None` around a send.
    After `wait_seconds` of a wait `on_wait` is called, again and again. A send of which nothing is taken for
    `send_seconds` raises TimeoutError there.
    """

    def __init__(
        self,
        wait_seconds: float,
        send_seconds: float,
        on_wait: Callable[[], None],
        told_at: Callable[[], float] | None = None,
        left: Callable[[], int] | None = None,
    ) -> None:
        """told_at: when the task's client was last told something without it; a wait begins anew then.

        left: bytes that the client has yet to take.
        """
        self.waits_since: float | None = None
        self.sends_since: float | None = None
        self._wait_seconds = wait_seconds
        self._send_seconds = send_seconds
        self._on_wait = on_wait
        self._told_at = told_at or _never
        self._left = left or _none
        self._left_before = 0  # when the send began, or was last looked at
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Watch:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be watched")
        self._task = task
        self._num_cancels = task.cancelling()  # others', from before
        self._loop = asyncio.get_running_loop()
        self._is_late = False
        self.waits_since = self.sends_since = None
        self._arm(self.time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        task, self._task, self._on_wait = self._task, None, _nothing  # they may know us: no circle is left
        self._told_at, self._left = _never, _none
        was_ours = self._is_late and task is not None and task.uncancel() <= self._num_cancels
        if was_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @staticmethod
    def time() -> float:
        """Of the performance counter, in seconds."""
        return time.perf_counter()

    def begin_send(self, size: int = 0) -> None:
        """What follows is a send of so many bytes, until `sends_since` is None again."""
        self.sends_since = self.time()
        self._left_before = self._left() + size

    def _arm(self, now: float) -> None:
        """For the moment when something that goes on, or begins now, may have taken too long."""
        waits = now if self.waits_since is None else self.waits_since
        sends = now if self.sends_since is None else self.sends_since
        self._timer = self._loop.call_later(
            max(min(waits + self._wait_seconds, sends + self._send_seconds) - now, 0.0), self._look
        )

    def _look(self) -> None:
        now = self.time()
        if self.sends_since is not None and now >= self.sends_since + self._send_seconds:
            left = self._left()
            if left >= self._left_before:
                self._is_late = True
                if self._task is not None:
                    self._task.cancel()
                return
            self.sends_since, self._left_before = now, left  # its client is slow, but there
        if self.waits_since is not None:
            self.waits_since = max(self.waits_since, self._told_at())
            if now >= self.waits_since + self._wait_seconds:
                self.waits_since = now
                self._on_wait()
        self._arm(now)


def _nothing() -> None:
    """Nobody waits any more."""


def _never() -> float:
    return 0.0


def _none() -> int:
    return 0
