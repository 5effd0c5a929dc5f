"""Tenants have the lock in turns, whoever leaves while it waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from gateway.fair_lock import FairLock

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Crowd:
    """Those who want one lock."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.got: list[str] = []

    async def come(self, *names: str) -> list[asyncio.Task[None]]:
        """Each is a tenant's letter and a number; they come in this order."""
        tasks = [asyncio.ensure_future(self._use(name)) for name in names]
        await asyncio.sleep(0)
        return tasks

    async def _use(self, name: str) -> None:
        await self.lock.acquire(name[0])
        self.got.append(name)

    async def go_on(self) -> None:
        """Whoever has it gives it back, until nobody wants it."""
        while self.lock.is_locked:
            self.lock.release()
            await asyncio.sleep(0)


def test_given_a_tenant_that_asks_often_when_others_wait_then_all_have_it_in_turns() -> None:
    async def run() -> None:
        crowd = Crowd()
        await crowd.come("a0", "a1", "a2", "a3", "b1", "c1", "b2")
        assert crowd.got == ["a0"]
        assert crowd.lock.num_waiting == 6
        await crowd.go_on()
        assert crowd.got == ["a0", "a1", "b1", "c1", "a2", "b2", "a3"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("gone", "order"),
    [("a1", "a0 a2 b1 c1"), ("a2", "a0 a1 b1 c1"), ("b1", "a0 a1 c1 a2"), ("c1", "a0 a1 b1 a2")],
)
def test_given_one_that_waits_when_it_is_cancelled_then_the_others_have_it_all_the_same(gone: str, order: str) -> None:
    async def run() -> None:
        crowd = Crowd()
        await crowd.come("a0")
        names = ["a1", "a2", "b1", "c1"]
        tasks = dict(zip(names, await crowd.come(*names), strict=True))
        tasks[gone].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[gone]
        assert crowd.lock.num_waiting == 3
        await crowd.go_on()
        assert crowd.got == order.split()
        assert crowd.lock.num_waiting == 0

    asyncio.run(run())


def test_given_one_that_just_got_it_when_it_is_cancelled_before_it_knows_then_the_next_has_it() -> None:
    async def run() -> None:
        crowd = Crowd()
        await crowd.come("a0")
        first, _ = await crowd.come("b1", "c1")
        crowd.lock.release()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await asyncio.sleep(0)
        assert crowd.got == ["a0", "c1"]
        await crowd.go_on()
        assert not crowd.lock.is_locked

    asyncio.run(run())


def test_given_nobody_who_waits_when_it_is_given_back_then_whoever_comes_has_it_at_once() -> None:
    async def run() -> None:
        lock = FairLock()
        for tenant in "aab":
            await lock.acquire(tenant)
            assert lock.is_locked
            lock.release()
        assert not lock.is_locked

    asyncio.run(run())
