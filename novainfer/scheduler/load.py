"""How fast work gets done here, and how long what waits will wait. Pure: time comes from the caller."""

from __future__ import annotations

import math

_MEMORY_SECONDS = 10.0  # of busy time, over which the rate is averaged
_MEMORY_ENDS = 50  # sequences over which the need is averaged
_MIN_BUSY = 0.05  # seconds; less says nothing
_MAX_SECONDS = 3600.0


class LoadMeter:
    """Averages that forget. Work is counted in the units of `fairness`: tokens computed, and tokens sampled."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._busy = 0.0  # seconds, decayed
        self._units = 0.0  # done in them, decayed
        self._needed = self._bound = 1.0  # by sequences that ended, decayed

    def tick(self, now: float, *, busy: bool) -> None:
        """Time has come to `now`; `busy`: steps were in flight since the last tick."""
        if busy and self._last is not None:
            elapsed = max(now - self._last, 0.0)
            kept = math.exp(-elapsed / _MEMORY_SECONDS)
            self._busy = self._busy * kept + elapsed
            self._units *= kept
        self._last = now

    def done(self, units: int) -> None:
        """A step has done so much work."""
        self._units += units

    def ended(self, needed: int, bound: int) -> None:
        """A sequence ended by itself; it needed so much work, and might have needed `bound`."""
        kept = 1.0 - 1.0 / _MEMORY_ENDS
        self._needed = self._needed * kept + needed
        self._bound = self._bound * kept + bound

    def seconds_for(self, bound: int) -> float | None:
        """How long work with this bound will take; None as long as nothing was measured."""
        if self._busy < _MIN_BUSY or self._units <= 0.0:
            return None
        expected = bound * min(self._needed / self._bound, 1.0)
        return min(expected * self._busy / self._units, _MAX_SECONDS)
