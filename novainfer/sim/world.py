"""Virtual time: one heap of events, one thread; and processes that can crash, stop, be slow. No wall clock, no asyncio.

Everything random comes from `World.rng(purpose)`: one stream per purpose, so that leaving one fault out does not
change what the others do. Nothing here, or built on it, may depend on `hash()` or on the order of a set.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random

_LINES_KEPT = 60
_ALL_LINES = 1_000_000


class Violation(Exception):
    """The system did what it must never do. The text says what."""


class World:
    """The clock, the events to come, and a hash over all that have happened."""

    def __init__(self, seed: int, *, keep_all: bool = False) -> None:
        """keep_all: keep every line of the trace, not only the last ones."""
        self.seed = seed
        self.now = 0.0
        self.num_events = 0
        self.lines: deque[str] = deque(maxlen=_ALL_LINES if keep_all else _LINES_KEPT)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._digest = hashlib.blake2b(digest_size=8)

    def rng(self, purpose: str) -> Random:
        """A stream of its own for this purpose."""
        return Random(f"{self.seed}/{purpose}")  # seeded by SHA-512 of the text, whatever PYTHONHASHSEED says

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` then; what is due at the same time runs in the order of these calls."""
        self._numbers += 1
        heapq.heappush(self._heap, (max(time, self.now), self._numbers, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Call `action` so many seconds from now."""
        self.at(self.now + delay, action)

    def note(self, line: str) -> None:
        """Something happened: it enters the hash, and the trace."""
        line = f"{self.now:.6f} {line}"
        self._digest.update(line.encode())
        self.lines.append(line)

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.num_events += 1
        action()
        return True

    @property
    def trace_hash(self) -> str:
        """Of everything so far, the times included."""
        return self._digest.hexdigest()


class Process:
    """Something that runs turns: when it is woken, if it lives and is not stopped. Its clock is its own."""

    def __init__(self, world: World, name: str, *, clock_offset: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.stopped_at: float | None = None
        self.slowness = 1.0  # times that everything takes
        self._clock_offset = clock_offset
        self._due = float("inf")

    @property
    def clock(self) -> float:
        """Its monotonic clock: not to be compared with another process's."""
        return self.world.now + self._clock_offset

    def turn(self) -> None:
        """Do what is to be done now, and `wake` for what comes next."""
        raise AssertionError("every kind of process has its own turn")

    def wake(self, delay: float = 0.0) -> None:
        """Have a turn in so many seconds, or earlier if that was arranged before."""
        due = self.world.now + delay
        if due < self._due:
            self._due = due
            self.world.at(due, lambda: self._on_wake(due))

    def kill(self) -> None:
        """SIGKILL: also a stopped one is gone."""
        if self.is_alive:
            self.is_alive = False
            self.world.note(f"{self.name} is dead")

    def stop(self) -> None:
        """SIGSTOP."""
        if self.is_alive and self.stopped_at is None:
            self.stopped_at = self.world.now
            self.world.note(f"{self.name} is stopped")

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_alive and self.stopped_at is not None:
            self.stopped_at = None
            self.world.note(f"{self.name} goes on")
            self.wake()

    @property
    def heard_at(self) -> float:
        """When a watcher of its pulses last heard of it, on the world's clock."""
        return self.world.now if self.stopped_at is None else self.stopped_at

    def _on_wake(self, due: float) -> None:
        if not self.is_alive or due != self._due:
            return
        self._due = float("inf")
        if self.stopped_at is None:
            self.turn()
