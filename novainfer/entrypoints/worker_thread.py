"""Runs the worker group in a thread of its own, because starting Ray takes seconds in which signals must be heard.

The thread lives as long as the group: on Linux Ray's own processes die with the thread that started them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.5  # seconds


class WorkerGroup(Protocol):
    """All ranks of one replica, placed and owned by somebody (Ray)."""

    def start(self) -> None:
        """Create every rank; returns when all are placed, before they have loaded. Raises if that is impossible."""
        ...

    def is_alive(self) -> bool:
        """Whether every rank still lives."""
        ...

    def stop(self) -> None:
        """End the ranks and everything that was started for them (idempotent; also after a failed start)."""
        ...


class WorkerThread:
    """Owns one group. `failure` is set once, in words, when the group cannot start or has lost a rank."""

    def __init__(self, make_group: Callable[[], WorkerGroup], wake: Callable[[], None]) -> None:
        self._make_group = make_group
        self._wake = wake
        self._stopping = threading.Event()
        self._may_end = False
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self.failure: str | None = None

    def start(self) -> None:
        """Begin to start the group."""
        self._thread.start()

    def expect_end(self) -> None:
        """From now on ranks may end by themselves: the scheduler is about to tell them to."""
        self._may_end = True

    def stop(self, timeout: float) -> bool:
        """End the group; False if that took longer than `timeout` seconds and was left to itself."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            group = self._make_group()
            try:
                group.start()
                self._watch(group)
            finally:
                group.stop()
        except Exception as error:
            logger.debug("the worker group failed", exc_info=True)
            self._fail(f"workers: {type(error).__name__}: {error}")

    def _watch(self, group: WorkerGroup) -> None:
        while not self._stopping.wait(_CHECK_INTERVAL):
            if not self._may_end and not group.is_alive():
                self._fail("a worker died")
                return

    def _fail(self, words: str) -> None:
        if self.failure is None and not self._stopping.is_set():
            self.failure = words
            self._wake()
