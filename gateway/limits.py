"""How many requests this gateway holds at once: a bound for all, and one for each API key.

A place is reserved before anything costly is done for a request and given back in one place, `Permit.release`.
"""

from __future__ import annotations

import time
from collections import Counter

from novainfer.errors import InvalidRequestError, OverloadedError

_SMOOTHING = 0.1  # weight of the newest duration in the running mean
_MAX_RETRY_AFTER = 30.0  # seconds


class Permit:
    """The right to hold `count` requests. Release it exactly once; a context manager does."""

    def __init__(self, limits: Limits, tenant: str, count: int) -> None:
        self._limits: Limits | None = limits
        self.tenant = tenant
        self.count = count
        self.started = time.monotonic()

    def release(self) -> None:
        """Give the places back. Idempotent."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits._give_back(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Limits:
    """Live requests of one gateway. `draining`: nothing new is let in."""

    def __init__(self, *, max_live: int, max_per_tenant: int = 0) -> None:
        self.draining = False
        self.num_live = 0
        self._max_live = max_live
        self._max_per_tenant = max_per_tenant
        self._by_tenant: Counter[str] = Counter()
        self._mean_seconds = 1.0

    def reserve(self, tenant: str, count: int = 1) -> Permit:
        """Places for `count` requests of `tenant`.

        Raises `OverloadedError` with 503 when the gateway is full or drains, with 429 when the tenant has its share;
        `InvalidRequestError` when so many can never be held.
        """
        if self.draining:
            raise OverloadedError("The server is shutting down.", retry_after=5.0)
        if count > self._max_live or (self._max_per_tenant and count > self._max_per_tenant):
            raise InvalidRequestError(f"{count} prompts in one request are too many.", param="prompt")
        if self._max_per_tenant and self._by_tenant[tenant] + count > self._max_per_tenant:
            raise OverloadedError(
                f"This API key may have {self._max_per_tenant} requests at once.",
                retry_after=self._until_next(self._by_tenant[tenant]),
                status=429,
            )
        if self.num_live + count > self._max_live:
            raise OverloadedError("The server is full.", retry_after=self._until_next(self.num_live))
        self.num_live += count
        self._by_tenant[tenant] += count
        return Permit(self, tenant, count)

    def _give_back(self, permit: Permit) -> None:
        self.num_live -= permit.count
        self._by_tenant[permit.tenant] -= permit.count
        if not self._by_tenant[permit.tenant]:
            del self._by_tenant[permit.tenant]
        duration = time.monotonic() - permit.started
        self._mean_seconds += _SMOOTHING * (duration - self._mean_seconds)

    def _until_next(self, live: int) -> float:
        """Seconds until one of `live` requests probably ends."""
        return min(max(self._mean_seconds / max(live, 1), 0.1), _MAX_RETRY_AFTER)
