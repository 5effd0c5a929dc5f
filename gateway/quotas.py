"""An API key's own limits: how many requests, and how many tokens a minute. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from novainfer.config import KeyDigest


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's limits in one gateway; 0 = none."""

    max_requests: int = 0
    max_queued: int = 0
    tokens_per_minute: int = 0

    def with_default(self, max_requests: int) -> Quota:
        """The same, with this number of requests where none is set."""
        return replace(self, max_requests=self.max_requests or max_requests)


NO_QUOTA = Quota()


def quotas_of(keys: Sequence[KeyDigest], num_gateways: int) -> dict[str, Quota]:
    """By tenant: this gateway's part of each limit, rounded up."""
    return {
        key.tenant: Quota(
            max_requests=-(-key.max_requests // num_gateways),
            max_queued=-(-key.max_queued // num_gateways),
            tokens_per_minute=-(-key.tokens_per_minute // num_gateways),
        )
        for key in keys
    }


class TokenBucket:
    """Tokens that may be used now: a minute's worth at most, refilled all the time. Below 0 after an underestimate."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = per_minute
        self._rate = per_minute / 60  # tokens per second
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """Tokens in it now."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._rate, self._capacity)
        self._at = now
        return self._level

    def take(self, count: int) -> None:
        """Use so many; a negative count gives some back."""
        self._level = min(self.level - count, self._capacity)

    def seconds_until(self, count: int) -> float:
        """When so many can be had: 0 = now. What is more than a minute's worth needs a full bucket."""
        return max(min(count, self._capacity) - self.level, 0.0) / self._rate

    @property
    def seconds_until_full(self) -> float:
        """When it is as if nothing had been used."""
        return (self._capacity - self.level) / self._rate


def as_duration(seconds: float) -> str:
    """As OpenAI writes durations: 250ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{rest:.3g}s"
