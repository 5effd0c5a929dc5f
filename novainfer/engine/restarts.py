"""How often, and how fast, what dies is started again. Pure; for the supervisor."""

from __future__ import annotations

DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0)  # seconds before the next start, by deaths since a step last ended
STABLE_SECONDS = 60.0  # an idle server proves itself by living so long


class Restarts:
    """Counts deaths of worker groups and schedulers between two signs that the engine works."""

    def __init__(self) -> None:
        self._deaths = 0
        self._serves_since: float | None = None

    def delay(self, now: float) -> float | None:
        """Something has died: seconds until its replacement may start; None = there have been too many, give up."""
        if self._serves_since is not None and now - self._serves_since > STABLE_SECONDS:
            self._deaths = 0
        self._serves_since = None
        if self._deaths == len(DELAYS):
            return None
        self._deaths += 1
        return DELAYS[self._deaths - 1]

    def serves(self, now: float) -> None:
        """Everything has been replaced and is ready."""
        self._serves_since = now

    def step_ended(self) -> None:
        """The engine works."""
        self._deaths = 0
