"""How often, and how fast, what dies is started again. Pure; for the supervisor."""

from __future__ import annotations

from collections.abc import Sequence

DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)  # seconds before the next start, by deaths since a step last ended; then the last
SPARE_DELAYS = (*DELAYS, 15.0, 30.0, 60.0, 120.0, 300.0)  # they are not missed before something else dies
STABLE_SECONDS = 60.0  # an idle engine proves itself by living so long
GATEWAY_STABLE_SECONDS = 0.0  # one that became ready works: what it died of came later
REPLICA_STABLE_SECONDS = 0.0  # what its processes die of again and again it mends itself, with delays of its own


class Restarts:
    """Counts deaths (of worker groups and schedulers, or of gateways) between two signs that they work."""

    def __init__(self, max_restarts: int | None, stable_seconds: float, delays: Sequence[float] = DELAYS) -> None:
        """max_restarts: None = never give up."""
        self._max_restarts = max_restarts
        self._delays = delays
        self._stable_seconds = stable_seconds
        self._deaths = 0
        self._serves_since: float | None = None

    def delay(self, now: float) -> float | None:
        """Something has died: seconds until its replacement may start; None = there have been too many, give up."""
        if self._serves_since is not None and now - self._serves_since >= self._stable_seconds:
            self._deaths = 0
        self._serves_since = None
        if self._max_restarts is not None and self._deaths >= self._max_restarts:
            return None
        self._deaths += 1
        return self._delays[min(self._deaths, len(self._delays)) - 1]

    def serves(self, now: float) -> None:
        """Everything has been replaced and is ready."""
        self._serves_since = now if self._serves_since is None else self._serves_since

    def step_ended(self) -> None:
        """The engine works."""
        self._deaths = 0
