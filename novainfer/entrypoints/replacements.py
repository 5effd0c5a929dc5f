"""What is being replaced, and when each replacement may start. Pure; the supervisor's. Times: seconds, monotonic."""

from __future__ import annotations

from novainfer.config import ServerConfig
from novainfer.engine.restarts import GATEWAY_STABLE_SECONDS, STABLE_SECONDS, Restarts


class Replacements:
    """Begins when something dies and ends when everything is ready again. The start of a server counts as one."""

    def __init__(self, config: ServerConfig, now: float) -> None:
        """Engine and gateways may each be restarted `max_restarts` times in a row."""
        self._start_timeout = config.start_timeout
        self._engine = Restarts(config.max_restarts, STABLE_SECONDS)
        self._gateways = Restarts(config.max_restarts, GATEWAY_STABLE_SECONDS)
        self._began: float | None = None
        self._due: dict[tuple[str, int], float] = {}
        self.ready_by = now + config.start_timeout

    def engine_died(self, now: float, *, counts: bool = True) -> float | None:
        """A worker group or scheduler: seconds until the next may start, None if there have been too many."""
        return self._begin(self._engine, now, counts=counts)

    def gateway_died(self, now: float) -> float | None:
        """The same for a gateway."""
        return self._begin(self._gateways, now)

    def step_ended(self) -> None:
        """The engine works."""
        self._engine.step_ended()

    def all_ready(self, now: float) -> float | None:
        """Everything is ready: how long it took, None if nothing was being replaced."""
        self._engine.serves(now)
        self._gateways.serves(now)
        began, self._began = self._began, None
        return None if began is None else now - began

    @property
    def is_going_on(self) -> bool:
        """Something was replaced and not everything is ready yet."""
        return self._began is not None

    def schedule(self, role: str, index: int, at: float) -> None:
        """A process is to be started then."""
        self._due[role, index] = at

    def take_due(self, now: float) -> list[tuple[str, int]]:
        """(role, index) of those whose time has come."""
        due = [key for key, at in self._due.items() if at <= now]
        for key in due:
            del self._due[key]
        return due

    def _begin(self, restarts: Restarts, now: float, *, counts: bool = True) -> float | None:
        delay = restarts.delay(now) if counts else 0.0
        if delay is not None:
            self._began = now if self._began is None else self._began
            self.ready_by = now + delay + self._start_timeout
        return delay
