"""A lock that goes round the tenants that wait for it: who asks for it often does not make the others wait."""

from __future__ import annotations

import asyncio
from collections import deque


class FairLock:
    """Of an event loop. Whoever has acquired it releases it. The tenants that wait have it one after the other, and of
    each first who came first.
    """

    def __init__(self) -> None:
        self.is_locked = False
        # In the order of their next turns; each has somebody who waits, or was cancelled while it did.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        """Those who wait."""
        return sum(not turn.cancelled() for turns in self._waiting.values() for turn in turns)

    async def acquire(self, tenant: str) -> None:
        """Wait for the tenant's turn."""
        if not self.is_locked:
            self.is_locked = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had the lock already
                self.release()
            raise

    def release(self) -> None:
        """Let the next one have it, if anybody waits."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            while turns and turns[0].cancelled():
                turns.popleft()
            if not turns:
                continue
            turns.popleft().set_result(None)
            if turns:
                self._waiting[tenant] = turns  # behind the others
            return
        self.is_locked = False
