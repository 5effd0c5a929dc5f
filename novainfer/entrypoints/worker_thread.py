"""Runs the worker groups in a thread of its own, because starting Ray takes seconds in which signals must be heard.

The thread lives as long as the server: on Linux Ray's own processes die with the thread that started them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from novainfer.engine.restarts import SPARE_DELAYS, STABLE_SECONDS, Restarts
from novainfer.errors import words_of

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.25  # seconds
_PLACING_PATIENCE = 2.0  # seconds
_MOST_TRIES = 2  # of groups with as much room as the last one had, in a row


class WorkerGroup(Protocol):
    """All ranks of one replica, placed and owned by somebody (Ray). Start follows start, each after an `end`."""

    def start(
        self, epoch: int, known: Sequence[str], is_wanted: Callable[[], bool], num_blocks: int | None = None
    ) -> None:
        """Create every rank; returns when all are placed, before they have loaded. Raises if that is impossible.

        known: the fingerprints that the group may have; none: any.
        num_blocks: KV blocks of each rank; None: what there is room for.
        is_wanted: while it waits for a place, it asks this, and returns without one as soon as that is False.
        """
        ...

    def is_alive(self) -> bool:
        """Whether every rank still lives."""
        ...

    def prepare(self, num_blocks: int, known: Sequence[str]) -> None:
        """Begin to load a spare group, unless there is one: each rank with room for so many KV blocks."""
        ...

    def tend(self) -> bool:
        """Look after the spare group: True once it stands by. Never waits.

        Raises with the reason if it is lost; it is gone then, and `prepare` may be called again.
        """
        ...

    def end(self) -> None:
        """Kill every rank; a spare group lives on, for the next `start`."""
        ...

    def stop(self) -> None:
        """End the ranks and everything that was started for them (idempotent; also after a failed start)."""
        ...


class WorkerThread:
    """Owns the group. When it cannot start or has lost a rank, `losses` gets (epoch, words); then `replace` is due.

    A spare that is lost is this thread's own matter: another one is prepared, with growing delays.
    """

    def __init__(self, make_group: Callable[[], WorkerGroup], wake: Callable[[], None], *, num_spares: int = 0) -> None:
        self._make_group = make_group
        self._wake = wake
        self._spare_restarts = Restarts(None, STABLE_SECONDS, SPARE_DELAYS)
        self._has_spares = num_spares > 0
        self._news = threading.Condition()
        self._wanted: tuple[int, float] | None = None  # epoch to start, and when (monotonic)
        self._known: Sequence[str] = ()  # fingerprints of the groups so far
        self._has_placed = threading.Event()  # or could not
        self._is_stopping = False
        self._may_end = False
        self._prepare_at: float | None = None  # monotonic
        self._num_blocks = 0  # of each rank of the newest group that served
        self._num_tries = 0  # of groups since then
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self.losses: deque[tuple[int, str]] = deque()
        self.prepares_spare = False  # a spare group is on its way, and nothing of it has been heard yet
        self._stands_by = False

    def start(self, epoch: int) -> None:
        """Begin to start the first group; returns when its ranks are placed, or after a while.

        They are what takes longest: what else the caller starts shall not compete with Ray for the processor.
        """
        self.replace(epoch, 0.0, ())
        self._thread.start()
        self._has_placed.wait(_PLACING_PATIENCE)

    def replace(self, epoch: int, delay: float, known: Sequence[str]) -> None:
        """Kill what is there now, and start a group of this epoch after `delay` seconds. Does not wait."""
        with self._news:
            self._known = known
            self._wanted = epoch, time.monotonic() + delay
            self._prepare_at = None
            self._news.notify()

    def prepare(self, num_blocks: int, known: Sequence[str]) -> None:
        """The group serves, each rank with so many KV blocks: time for a spare one, if there shall be any."""
        with self._news:
            self._num_blocks, self._num_tries = num_blocks, 0
            if self._has_spares:
                self._known = known
                self._prepare_at = time.monotonic()
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
                    group.start(
                        epoch, self._known, lambda: not (self._is_stopping or self._wanted), self._next_num_blocks()
                    )
                    self._has_placed.set()
                    self._watch(group, epoch)
                except Exception as error:
                    self._has_placed.set()
                    logger.debug("the worker group failed", exc_info=True)
                    self._lose(epoch, f"workers: {words_of(error)}")
        finally:
            group.stop()

    def _next_epoch(self, group: WorkerGroup) -> int | None:
        """Wait until a group is wanted and due; None when the server stops."""
        with self._news:
            self._news.wait_for(lambda: self._is_stopping or self._wanted)
        group.end()
        if self._stands_by:
            self._spare_restarts.step_ended()  # it is used now, and nothing was wrong with it
        self.prepares_spare = self._stands_by = False
        with self._news:
            while self._wanted is not None and not self._is_stopping:
                epoch, due = self._wanted
                if time.monotonic() >= due:
                    self._wanted = None
                    return epoch
                self._news.wait(due - time.monotonic())
        return None

    def _next_num_blocks(self) -> int | None:
        """As many as before, so that whatever lives fits the next group too, however much memory is free by then. None,
        which is what there is room for, if there was no group yet, or groups of that size have failed to serve.
        """
        with self._news:
            self._num_tries += 1
            return self._num_blocks if self._num_blocks and self._num_tries <= _MOST_TRIES else None

    def _watch(self, group: WorkerGroup, epoch: int) -> None:
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._is_stopping or self._wanted or self._is_due(), timeout=_CHECK_INTERVAL
                )
                if self._is_stopping or self._wanted:
                    return
                shall_prepare = self._is_due()
                if shall_prepare:
                    self._prepare_at = None
            if not self._may_end and not group.is_alive():
                self._lose(epoch, "a worker died")
                return
            self._care(group, shall_prepare)

    def _is_due(self) -> bool:
        return self._prepare_at is not None and time.monotonic() >= self._prepare_at

    def _care(self, group: WorkerGroup, shall_prepare: bool) -> None:
        """Prepare a spare group, and see how far it is. Whatever becomes of it, the group that serves goes on."""
        try:
            if shall_prepare:
                self.prepares_spare = True
                group.prepare(self._num_blocks, self._known)
            if group.tend():
                self.prepares_spare, self._stands_by = False, True
                self._spare_restarts.serves(time.monotonic())
        except Exception as error:
            self.prepares_spare = self._stands_by = False
            logger.debug("no spare worker group", exc_info=True)
            delay = self._spare_restarts.delay(time.monotonic()) or 0.0
            logger.warning("the spare workers are lost (%s); others in %g s", error, delay)
            with self._news:
                if self._wanted is None:
                    self._prepare_at = time.monotonic() + delay

    def _lose(self, epoch: int, words: str) -> None:
        self.losses.append((epoch, words))
        self._wake()
