"""Runs the worker groups in a thread of its own, because starting Ray takes seconds in which signals must be heard.

The thread lives as long as the server: on Linux Ray's own processes die with the thread that started them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.25  # seconds


class WorkerGroup(Protocol):
    """All ranks of one replica, placed and owned by somebody (Ray). Start follows start, each after an `end`."""

    def start(self, epoch: int) -> None:
        """Create every rank; returns when all are placed, before they have loaded. Raises if that is impossible."""
        ...

    def is_alive(self) -> bool:
        """Whether every rank still lives."""
        ...

    def prepare(self) -> None:
        """Get ready what makes the next start faster. Does not wait for it."""
        ...

    def end(self) -> None:
        """Kill every rank."""
        ...

    def stop(self) -> None:
        """End the ranks and everything that was started for them (idempotent; also after a failed start)."""
        ...


class WorkerThread:
    """Owns the group. When it cannot start or has lost a rank, `losses` gets (epoch, words); then `replace` is due."""

    def __init__(self, make_group: Callable[[], WorkerGroup], wake: Callable[[], None]) -> None:
        self._make_group = make_group
        self._wake = wake
        self._news = threading.Condition()
        self._wanted: tuple[int, float] | None = None  # epoch to start, and when (monotonic)
        self._is_stopping = False
        self._may_end = False
        self._shall_prepare = False
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self.losses: deque[tuple[int, str]] = deque()

    def start(self, epoch: int) -> None:
        """Begin to start the first group."""
        self.replace(epoch, 0.0)
        self._thread.start()

    def replace(self, epoch: int, delay: float) -> None:
        """Kill what is there now, and start a group of this epoch after `delay` seconds. Does not wait."""
        with self._news:
            self._wanted = epoch, time.monotonic() + delay
            self._shall_prepare = False
            self._news.notify()

    def prepare(self) -> None:
        """The group serves: get ready for the next one."""
        with self._news:
            self._shall_prepare = True
            self._news.notify()

    def expect_end(self) -> None:
        """From now on ranks may end by themselves: the scheduler is about to tell them to."""
        self._may_end = True

    def stop(self, timeout: float) -> bool:
        """End the group; False if that took longer than `timeout` seconds and was left to itself."""
        with self._news:
            self._is_stopping = True
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        group = self._make_group()
        try:
            while (epoch := self._next_epoch(group)) is not None:
                try:
                    group.start(epoch)
                    self._watch(group, epoch)
                except Exception as error:
                    logger.debug("the worker group failed", exc_info=True)
                    self._lose(epoch, f"workers: {type(error).__name__}: {error}")
        finally:
            group.stop()

    def _next_epoch(self, group: WorkerGroup) -> int | None:
        """Wait until a group is wanted and due; None when the server stops."""
        with self._news:
            self._news.wait_for(lambda: self._is_stopping or self._wanted)
        group.end()
        with self._news:
            while self._wanted is not None and not self._is_stopping:
                epoch, due = self._wanted
                if time.monotonic() >= due:
                    self._wanted = None
                    return epoch
                self._news.wait(due - time.monotonic())
        return None

    def _watch(self, group: WorkerGroup, epoch: int) -> None:
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._is_stopping or self._wanted or self._shall_prepare, timeout=_CHECK_INTERVAL
                )
                if self._is_stopping or self._wanted:
                    return
                shall_prepare, self._shall_prepare = self._shall_prepare, False
            if shall_prepare:
                group.prepare()
            if not self._may_end and not group.is_alive():
                self._lose(epoch, "a worker died")
                return

    def _lose(self, epoch: int, words: str) -> None:
        self.losses.append((epoch, words))
        self._wake()
