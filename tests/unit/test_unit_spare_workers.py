"""The thread that runs the worker groups, and what it does about spare ones: over a group that starts nothing."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from novainfer.entrypoints import worker_thread
from novainfer.entrypoints.worker_thread import WorkerThread

pytestmark = pytest.mark.unit

PATIENCE = 60  # seconds; only a failing test waits that long
BLOCKS = 40
KNOWN = ("a", "b")


class Group:
    """Writes down what is asked of it; `fault` is what its spare dies of, again and again."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[object, ...]] = queue.Queue()
        self.fault: Exception | None = None
        self.prepare_fault: Exception | None = None
        self.is_whole = True
        self.known: Sequence[str] = ()  # what it was told last
        self.num_blocks: int | None = None
        self.tended = threading.Semaphore(0)
        self.loads = False  # the spare does not stand by yet
        self.is_prepared = False

    def start(
        self, epoch: int, known: Sequence[str], is_wanted: Callable[[], bool], num_blocks: int | None = None
    ) -> None:
        self.is_whole = True
        self.known = known
        self.num_blocks = num_blocks
        self.calls.put(("start", epoch))

    def is_alive(self) -> bool:
        return self.is_whole

    def prepare(self, num_blocks: int, known: Sequence[str]) -> None:
        self.known = known
        self.calls.put(("prepare", num_blocks))
        if self.prepare_fault is not None:
            raise self.prepare_fault
        self.is_prepared = True

    def tend(self) -> bool:
        self.tended.release()
        if self.fault is not None and self.is_prepared:
            self.is_prepared = False
            raise self.fault
        return self.is_prepared and not self.loads

    def end(self) -> None:
        self.calls.put(("end",))

    def stop(self) -> None:
        self.calls.put(("stop",))

    def next_call(self) -> tuple[object, ...]:
        return self.calls.get(timeout=PATIENCE)


class Workers:
    """A thread with its group, started."""

    def __init__(self, num_spares: int) -> None:
        self.group = Group()
        self.lost = threading.Event()
        self.thread = WorkerThread(lambda: self.group, self.lost.set, num_spares=num_spares)
        self.thread.start(1)
        assert [self.group.next_call() for _ in range(2)] == [("end",), ("start", 1)]


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(getattr(request, "param", 1))
    yield workers
    assert workers.thread.stop(PATIENCE)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "SPARE_DELAYS", (0.0,))


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "SPARE_DELAYS", (0.0, 0.1))


@pytest.mark.parametrize("workers", [0], indirect=True)
def test_given_no_spares_when_the_group_serves_then_none_is_asked_for(workers: Workers) -> None:
    workers.thread.prepare(BLOCKS, KNOWN)
    for _ in range(3):
        assert workers.group.tended.acquire(timeout=PATIENCE)
    assert workers.group.calls.empty()


@pytest.mark.parametrize("workers", [0], indirect=True)
def test_given_a_group_that_has_served_when_it_dies_then_two_more_have_its_room_before_one_looks_for_itself(
    workers: Workers,
) -> None:
    assert workers.group.num_blocks is None
    for first in (2, 5):
        workers.thread.prepare(BLOCKS, KNOWN)
        for epoch, num_blocks in enumerate((BLOCKS, BLOCKS, None), first):
            workers.group.is_whole = False
            assert workers.lost.wait(PATIENCE)
            workers.lost.clear()
            workers.thread.replace(epoch, 0.0, KNOWN)
            assert [workers.group.next_call() for _ in range(2)] == [("end",), ("start", epoch)]
            assert workers.group.num_blocks == num_blocks


def test_given_a_spare_when_the_group_dies_then_its_successor_is_started_and_the_next_spare_waits_to_be_asked_for(
    workers: Workers,
) -> None:
    workers.thread.prepare(BLOCKS, KNOWN)
    assert workers.group.next_call() == ("prepare", BLOCKS)
    assert workers.group.known == KNOWN
    workers.group.is_whole = False
    assert workers.lost.wait(PATIENCE)
    assert workers.thread.losses.popleft() == (1, "a worker died")
    workers.thread.replace(2, 0.0, (*KNOWN, "c"))
    assert [workers.group.next_call() for _ in range(2)] == [("end",), ("start", 2)]
    assert workers.group.known == (*KNOWN, "c")
    workers.thread.prepare(BLOCKS + 1, KNOWN)
    assert workers.group.next_call() == ("prepare", BLOCKS + 1)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("where", ["fault", "prepare_fault"])
def test_given_spares_that_fail_again_and_again_when_asked_for_then_there_are_always_others_and_the_group_serves_on(
    workers: Workers, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(workers.group, where, RuntimeError("no memory"))
    workers.thread.prepare(BLOCKS, KNOWN)
    calls = [workers.group.next_call() for _ in range(20)]
    assert calls == [("prepare", BLOCKS)] * len(calls)
    words = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert words == {"the spare workers are lost (no memory); others in 0 s"}
    assert not workers.thread.losses


@pytest.mark.usefixtures("short_delays")
def test_given_a_spare_that_failed_when_the_next_one_was_of_use_then_that_failure_does_not_count_any_more(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    group = workers.group
    group.fault = RuntimeError("no memory")
    workers.thread.prepare(BLOCKS, KNOWN)
    assert [group.next_call() for _ in range(2)] == [("prepare", BLOCKS)] * 2
    group.fault = None
    while workers.thread.prepares_spare or not group.is_prepared:
        assert group.tended.acquire(timeout=PATIENCE)
    while not group.calls.empty():
        group.next_call()
    caplog.clear()
    workers.thread.replace(2, 0.0, KNOWN)
    assert [group.next_call() for _ in range(2)] == [("end",), ("start", 2)]
    group.fault = RuntimeError("no memory")
    workers.thread.prepare(BLOCKS, KNOWN)
    assert [group.next_call() for _ in range(2)] == [("prepare", BLOCKS)] * 2
    words = [record.getMessage() for record in caplog.records if "are lost" in record.getMessage()]
    assert words[0] == "the spare workers are lost (no memory); others in 0 s"


def test_given_a_spare_that_failed_when_the_group_dies_before_the_next_one_is_due_then_it_waits_to_be_asked_for(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.group.fault = RuntimeError("no memory")
    workers.thread.prepare(BLOCKS, KNOWN)
    assert [workers.group.next_call() for _ in range(2)] == [("prepare", BLOCKS)] * 2  # the third is due in a second
    workers.group.fault, workers.group.is_whole = None, False
    assert workers.lost.wait(PATIENCE)
    workers.thread.replace(2, 0.0, KNOWN)
    assert [workers.group.next_call() for _ in range(2)] == [("end",), ("start", 2)]
    for _ in range(8):  # two seconds
        assert workers.group.tended.acquire(timeout=PATIENCE)
    assert workers.group.calls.empty()


def test_given_a_spare_that_loads_when_the_server_stops_then_the_group_is_stopped_and_nothing_else_is_done(
    workers: Workers,
) -> None:
    workers.thread.prepare(BLOCKS, KNOWN)
    assert workers.group.next_call() == ("prepare", BLOCKS)
    assert workers.thread.stop(PATIENCE)
    assert [workers.group.next_call() for _ in range(2)] == [("end",), ("stop",)]
    assert workers.group.calls.empty()


@pytest.mark.parametrize("is_lost", [False, True])
def test_given_a_spare_that_loads_when_it_stands_by_or_is_lost_then_nobody_waits_for_it_any_more(
    workers: Workers, is_lost: bool
) -> None:
    group, thread = workers.group, workers.thread
    group.loads = True
    assert not thread.prepares_spare
    thread.prepare(BLOCKS, KNOWN)
    assert group.next_call() == ("prepare", BLOCKS)
    for _ in range(2):
        assert group.tended.acquire(timeout=PATIENCE)
    assert thread.prepares_spare
    if is_lost:
        group.fault = RuntimeError("lost")
    group.loads = False
    for _ in range(100):  # the look after the one that is on
        assert group.tended.acquire(timeout=PATIENCE)
        if not thread.prepares_spare:
            return
    raise AssertionError("it is still waited for")
