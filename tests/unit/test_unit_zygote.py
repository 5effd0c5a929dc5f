"""Processes forked from a zygote: how they come, end, and end with it. Real processes; the last one is a rank's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TextIO

import psutil
import pytest

from novainfer.errors import EngineError
from novainfer.transport.zygote import ZygoteProcess
from workers.rank_host import RankProcess
from workers.rank_zygote import Order

pytestmark = pytest.mark.unit

MODULE = "tests.unit.zygote_child"
PATIENCE = 60  # seconds; only a failing test waits that long
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def zygote() -> Iterator[ZygoteProcess]:
    zygote = ZygoteProcess(MODULE, ["--tell-end"], PATH)
    yield zygote
    zygote.close()


def fork(zygote: ZygoteProcess, slot: int) -> tuple[TextIO, psutil.Process]:
    """A child that has said who it is."""
    connection = zygote.fork(slot)
    connection.settimeout(PATIENCE)
    with connection:
        talk = connection.makefile("rw")
    said, pid = talk.readline().split()
    assert int(said) == slot
    return talk, psutil.Process(int(pid))


def tell(talk: TextIO, line: str) -> None:
    talk.write(line + "\n")
    talk.flush()


def test_given_two_slots_when_one_is_taken_anew_then_its_process_is_killed_and_the_other_lives(
    zygote: ZygoteProcess,
) -> None:
    (first, old), (other, bystander) = fork(zygote, 0), fork(zygote, 1)
    next_one, new = fork(zygote, 0)
    assert first.read() == "it was killed by SIGKILL\n"
    assert not old.is_running()
    assert bystander.is_running()
    assert new.ppid() == bystander.ppid() == zygote.pid
    for talk in (first, other, next_one):
        talk.close()


@pytest.mark.parametrize(("status", "words"), [(0, "\n"), (3, "it ended with status 3\n")])
def test_given_a_process_that_leaves_when_its_line_is_read_to_the_end_then_that_tells_how(
    zygote: ZygoteProcess, status: int, words: str
) -> None:
    talk, process = fork(zygote, 0)
    tell(talk, str(status))
    assert talk.read() == words
    assert not process.is_running()
    talk.close()


def test_given_a_slot_when_its_process_is_to_be_killed_then_nothing_takes_its_place_until_the_next_order(
    zygote: ZygoteProcess,
) -> None:
    talk, _ = fork(zygote, 5)
    zygote.kill_child(5)
    assert talk.read() == "it was killed by SIGKILL\n"
    talk.close()
    assert psutil.Process(zygote.pid).children() == []
    zygote.kill_child(5)
    fork(zygote, 5)[0].close()


def test_given_a_zygote_that_is_killed_when_a_process_is_needed_then_there_is_another_zygote(
    zygote: ZygoteProcess,
) -> None:
    talk, process = fork(zygote, 0)
    psutil.Process(zygote.pid).kill()
    assert talk.read() == ""
    talk.close()
    process.wait(PATIENCE)
    fork(zygote, 0)[0].close()


@pytest.mark.parametrize("arguments", [[], ["--tell-end"]])
def test_given_processes_when_the_zygote_is_closed_then_all_are_gone(arguments: list[str]) -> None:
    zygote = ZygoteProcess(MODULE, arguments, PATH)
    children = [fork(zygote, slot) for slot in range(3)]
    processes = [psutil.Process(zygote.pid), *(process for _, process in children)]
    zygote.close()
    assert not psutil.wait_procs(processes, PATIENCE)[1]
    for talk, _ in children:
        talk.close()
    with pytest.raises(EngineError, match="shutting down"):
        zygote.fork(0)


def test_given_the_zygote_of_ranks_when_it_has_imported_everything_then_it_has_one_thread_as_a_fork_needs() -> None:
    zygote = ZygoteProcess("workers.rank_zygote", environ=PATH)
    rank = RankProcess(zygote.fork(0))
    rank.order(Order(launch="{}"))
    assert rank.wait_end() == "KeyError: 'config'"
    assert psutil.Process(zygote.pid).num_threads() == 1
    zygote.close()
