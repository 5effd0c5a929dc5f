"""Ranks that are stopped before the supervisor has heard of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from novainfer.entrypoints.ranks import StrayRanks

pytestmark = pytest.mark.unit

PARENT = """
import subprocess, sys, setproctitle
setproctitle.setproctitle(sys.argv[1])
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def child_of() -> Iterator[Callable[[str], psutil.Process]]:
    """Starts a process of that name with a child, and returns the child."""
    parents: list[subprocess.Popen[str]] = []
    children: list[psutil.Process] = []

    def start(name: str) -> psutil.Process:
        command = [sys.executable, "-c", PARENT, name]
        parents.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert parents[-1].stdout is not None
        children.append(psutil.Process(int(parents[-1].stdout.readline())))
        return children[-1]

    yield start
    for child in children:
        if is_alive(child):
            child.kill()
    for parent in parents:
        parent.send_signal(signal.SIGCONT)  # if it lives
        parent.communicate()


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        pass


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_given_a_child_of_the_raylet_when_it_is_stopped_for_a_second_then_it_is_killed(
    child_of: Callable[[str], psutil.Process],
) -> None:
    rank, other = child_of("raylet"), child_of("another")
    strays = StrayRanks()
    strays.kill_stopped(0.0)
    stop(rank)
    stop(other)
    strays.kill_stopped(10.0)
    strays.kill_stopped(11.0)
    assert is_alive(rank)
    strays.kill_stopped(11.1)
    while is_alive(rank):
        pass
    assert is_alive(other)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_given_a_server_of_ray_when_it_is_stopped_for_a_second_then_it_is_killed(
    child_of: Callable[[str], psutil.Process], name: str
) -> None:
    server, strays = child_of(name).parent(), StrayRanks()
    assert server is not None
    stop(server)
    strays.kill_stopped(10.0)
    assert is_alive(server)
    strays.kill_stopped(11.1)
    while is_alive(server):
        pass


def test_given_a_child_of_the_raylet_when_it_goes_on_in_time_then_its_second_begins_anew(
    child_of: Callable[[str], psutil.Process],
) -> None:
    rank, strays = child_of("raylet"), StrayRanks()
    stop(rank)
    strays.kill_stopped(0.0)
    rank.send_signal(signal.SIGCONT)
    while rank.status() == psutil.STATUS_STOPPED:
        pass
    strays.kill_stopped(0.9)
    stop(rank)
    strays.kill_stopped(1.2)
    strays.kill_stopped(2.1)
    assert is_alive(rank)
