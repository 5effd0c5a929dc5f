"""One timer for all waits and sends of a task."""

from __future__ import annotations

import asyncio

import pytest

from gateway.watch import Watch

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


async def _send_for_ever(watch: Watch) -> None:
    async with watch:
        for _ in range(3):  # each has the whole time
            watch.begin_send()
            await asyncio.sleep(0)
            watch.sends_since = None
        watch.begin_send()
        await asyncio.Event().wait()


def test_given_a_send_that_does_not_end_when_its_time_is_over_then_it_raises_and_the_task_lives_on() -> None:
    async def main() -> int:
        with pytest.raises(TimeoutError):
            await _send_for_ever(Watch(60.0, 0.02, lambda: None))
        await asyncio.sleep(0)  # a cancel that is left over would come here
        task = asyncio.current_task()
        return -1 if task is None else task.cancelling()

    assert asyncio.run(main()) == 0


def test_given_a_send_of_which_some_was_taken_when_its_time_is_over_then_it_has_all_of_it_again() -> None:
    left = [1, 7, 4, 4]  # eight more, of one that may have been large: one of nine was taken, then three, then none

    async def send() -> None:
        async with Watch(60.0, 0.005, lambda: None, left=lambda: left.pop(0)) as watch:
            watch.begin_send(8)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(send())
    assert left == []


def test_given_a_wait_that_goes_on_when_its_time_is_over_then_it_is_told_so_again_and_again() -> None:
    async def wait() -> None:
        told = asyncio.Semaphore(0)
        watch = Watch(0.005, 60.0, told.release)
        async with watch:
            watch.waits_since = watch.time()
            for _ in range(3):
                await told.acquire()
            watch.waits_since = None
        await asyncio.sleep(0.02)
        assert told.locked(), "it is over with the block"

    asyncio.run(wait())


def test_given_a_task_that_others_cancel_when_it_is_watched_then_it_is_cancelled() -> None:
    async def main() -> None:
        began = asyncio.Event()

        async def work() -> None:
            async with Watch(60.0, 60.0, lambda: None):
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_given_another_error_when_a_task_is_watched_then_it_comes_through() -> None:
    async def main() -> None:
        async with Watch(60.0, 60.0, lambda: None):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(main())
