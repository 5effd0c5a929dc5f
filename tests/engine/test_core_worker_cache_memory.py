"""The memory of a KV cache on a CPU, taken before it is used."""

from __future__ import annotations

import gc
import math
import threading
import weakref

import pytest
import torch
from torch import Tensor

from kernels.memory import lazy_zeros
from tests.resident import resident_bytes
from workers import cache_memory as module
from workers import kv_cache
from workers.cache_memory import CacheMemory
from workers.kv_cache import KVCache

BLOCK = 1 << 20
NUM_BLOCKS = 32
MUCH = 1 << 40


def tensors() -> list[Tensor]:
    return [lazy_zeros((NUM_BLOCKS, BLOCK), torch.uint8) for _ in range(2)]


def blocks_taken(cache: list[Tensor]) -> int:
    """How many blocks of all tensors have their memory."""
    return round(sum(resident_bytes(tensor) for tensor in cache) / (len(cache) * BLOCK))


class Looks(threading.Event):
    """An event that says how often somebody waited for it in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self.looked.release()
        return found


@pytest.mark.parametrize(("ahead", "has_step"), [(NUM_BLOCKS, False), (NUM_BLOCKS, True), (4, False), (4, True)])
def test_given_all_is_wanted_when_it_may_be_taken_then_all_is(
    ahead: int, has_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAITS", 0.1)  # that a step which does not end holds it up
    cache = tensors()
    memory = CacheMemory(cache, ahead, lambda: MUCH, is_whole=ahead < NUM_BLOCKS)
    if has_step:
        memory.step_begins([])

    memory.start()
    memory._thread.join()
    assert blocks_taken(cache) == NUM_BLOCKS
    assert not any(bool(tensor.any()) for tensor in cache)


@pytest.mark.parametrize(("is_whole", "expected"), [(True, NUM_BLOCKS), (False, 4)])
def test_given_time_before_anything_runs_when_it_is_enough_then_several_threads_take_what_is_wanted(
    is_whole: bool, expected: int
) -> None:
    cache = tensors()
    memory = CacheMemory(cache, 4, lambda: MUCH, is_whole=is_whole)
    memory.take_first(60.0, 3)
    assert blocks_taken(cache) == pytest.approx(expected, abs=2)


def test_given_no_time_when_it_is_up_then_the_rest_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITS", 0.1)
    cache = tensors()
    memory = CacheMemory(cache, 4, lambda: MUCH, is_whole=True)
    memory.take_first(0.0, 2)
    assert blocks_taken(cache) == 0
    memory.start()
    memory._thread.join()
    assert blocks_taken(cache) == NUM_BLOCKS


def test_given_a_step_that_runs_when_memory_is_wanted_then_only_what_is_soon_used_is_taken_before_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WAITS", math.inf)
    asked = threading.Semaphore(0)
    looks: list[Looks] = []
    with monkeypatch.context() as patched:
        patched.setattr(module.threading, "Event", lambda: looks.append(Looks()) or looks[-1])
        memory = CacheMemory(tensors(), 4, lambda: asked.release() or MUCH, is_whole=True)

    def assert_taken(count: int) -> None:
        for _ in range(count):
            assert asked.acquire(timeout=30)
        while looks[1].looked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert looks[1].looked.acquire(timeout=30)
        assert not asked.acquire(blocking=False)

    memory.step_begins([])
    memory.start()
    assert_taken(4)  # two tensors, two blocks at a time
    memory.step_begins([5])
    assert_taken(6)  # up to block 10
    memory.step_ends()
    for _ in range(NUM_BLOCKS - 10):
        assert asked.acquire(timeout=30)
    memory._thread.join()


def test_given_some_ahead_when_blocks_are_used_then_so_many_more_are_taken() -> None:
    asked = threading.Semaphore(0)

    def room() -> int:
        asked.release()
        return MUCH

    memory = CacheMemory(tensors(), 4, room)

    def take(count: int) -> None:
        for _ in range(count):
            assert asked.acquire(timeout=30)

    try:
        memory.start()
        take(4)  # two pieces of both tensors
        memory.step_begins([7, 3])
        memory.step_ends()
        take(8)  # up to block 12
        memory.step_begins([1])
        memory.step_ends()
        assert not asked.acquire(timeout=0)
    finally:
        memory.close()
    assert not memory._thread.is_alive()


def test_given_a_cache_that_nobody_closes_when_nobody_holds_it_then_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_AHEAD_BYTES", 4 * BLOCK)  # its thread waits for more to be used
    cache = KVCache(NUM_BLOCKS, 16, [(lazy_zeros((NUM_BLOCKS, BLOCK), torch.uint8), torch.zeros(NUM_BLOCKS, 1))])
    cache.take_memory(whole=False)
    held, memory = weakref.ref(cache.layers[0][0]), cache._memory
    assert memory is not None
    thread = memory._thread
    del cache, memory
    gc.collect()
    thread.join(30)
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("whole", [False, True])
def test_given_a_cache_that_is_taken_as_a_whole_when_it_is_then_more_is_there_at_once_beyond_what_is_used(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_AHEAD_BYTES", 3 * BLOCK)
    monkeypatch.setattr(kv_cache, "_WHOLE_AHEAD_BYTES", 7 * BLOCK)
    monkeypatch.setattr(module, "_WAITS", math.inf)
    storage = lazy_zeros((NUM_BLOCKS, BLOCK), torch.uint8)
    cache = KVCache(NUM_BLOCKS, 16, [(storage, torch.zeros(NUM_BLOCKS, 1))])
    cache.take_memory(whole=whole)
    try:
        assert cache._memory is not None
        assert cache._memory._is_soon_used(3 if whole else 1)
        assert not cache._memory._is_soon_used(6 if whole else 2)
    finally:
        cache.close()


def test_given_no_room_when_memory_is_wanted_then_the_rest_is_left_for_later() -> None:
    rooms, cache = iter([MUCH, MUCH, 2 * BLOCK - 1]), tensors()
    memory = CacheMemory(cache, NUM_BLOCKS, lambda: next(rooms))
    memory.start()
    memory._thread.join()
    assert blocks_taken(cache) == pytest.approx(2, abs=1)
    memory.close()
