"""When there is time for work that can wait: one of the processors that this process may use idles."""

from __future__ import annotations

import os

import psutil

_MOST_DELAYS = 12  # times the delay: then it has come, whatever the processors do
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
        self._idle: list[float] = []  # seconds, of each processor, when it looked
        self._has_come = False

    def has_come(self, now: float) -> bool:
        """Whether the delay is over and a processor idled in the last second, or the delay is long over."""
        self._has_come = self._has_come or self._comes(now)
        return self._has_come

    def _comes(self, now: float) -> bool:
        self._asked_at = now if self._asked_at is None else self._asked_at
        waited = now - self._asked_at
        if waited < _MOST_DELAYS * self._delay and now >= self._looked_at + _LOOK_SECONDS:
            return self._look(now) and waited >= self._delay
        return waited >= _MOST_DELAYS * self._delay

    def _look(self, now: float) -> bool:
        """Whether a processor idled since it looked before; so it is where nobody knows."""
        before, since = self._idle, now - self._looked_at
        self._idle, self._looked_at = _idle_seconds(), now
        if not self._idle:
            return True
        return any(new - old >= _IDLE_SHARE * since for new, old in zip(self._idle, before, strict=False))


def _idle_seconds() -> list[float]:
    """Of each processor that this process may use, since the system's start; none where they cannot be told."""
    try:
        times = psutil.cpu_times(percpu=True)
        usable = psutil.Process().cpu_affinity() if hasattr(os, "sched_getaffinity") else range(len(times))
    except (OSError, psutil.Error):
        return []
    return [times[number].idle for number in usable if number < len(times)]
