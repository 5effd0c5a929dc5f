"""When there is time for work that can wait: a processor idles."""

from __future__ import annotations

import psutil

_MOST_DELAYS = 12  # so many times the delay, and time it is
_LOOK_SECONDS = 1.0  # over which a processor idles, or does not
_IDLE_SHARE = 0.8  # of one processor


class Leisure:
    """Comes once, and stays: to be asked again and again, with the time on any clock that does not go back."""

    def __init__(self, delay: float) -> None:
        """Seconds from the first question on. It takes longer beside a load that keeps all processors busy, but not
        for ever.
        """
        self._delay = delay
        self._asked_at: float | None = None  # first
        self._looked_at = 0.0
        self._idle: float | None = None  # seconds, of all processors together, when it looked
        self._has_come = False

    def has_come(self, now: float) -> bool:
        """Whether the delay is over and a processor idled in the last second, or the delay is long over."""
        self._has_come = self._has_come or self._comes(now)
        return self._has_come

    def _comes(self, now: float) -> bool:
        self._asked_at = now if self._asked_at is None else self._asked_at
        waited = now - self._asked_at
        return waited >= _MOST_DELAYS * self._delay or (self._idles(now) and waited >= self._delay)

    def _idles(self, now: float) -> bool:
        since = now - self._looked_at
        if self._idle is not None and since < _LOOK_SECONDS:
            return False
        before, self._idle, self._looked_at = self._idle, psutil.cpu_times().idle, now
        return before is not None and self._idle - before >= _IDLE_SHARE * since
