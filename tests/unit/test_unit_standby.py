"""Processes that wait to become a child: real ones, of a module that says what it was told."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from novainfer.entrypoints.children import ChildState, python_module
from novainfer.entrypoints.standby import Standbys

pytestmark = pytest.mark.unit

MODULE = "said"
SOURCE = """
import sys
def main(argv):
    with open(argv[0], "w") as file:
        file.write(f"{argv[1:]} {sys.stdin.read()!r}")
    return 7
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def standbys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standbys]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    standbys = Standbys({"sayer": MODULE})
    yield standbys
    standbys.close()


def waiting() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "standby" in " ".join(child.cmdline())]


def spawn(standbys: Standbys, *arguments: str) -> ChildState:
    child = ChildState("gateway", 0, 1)
    standbys.spawn(child, python_module(MODULE, *arguments))
    return child


def finish(child: ChildState) -> int:
    assert child.process is not None
    return child.process.wait(60)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_given_a_child_when_it_is_started_then_it_does_the_same_with_a_standby_and_without(
    standbys: Standbys, tmp_path: Path, *, is_prepared: bool
) -> None:
    pids = []
    if is_prepared:
        standbys.prepare(0.0)
        pids = [process.pid for process in waiting()]
    child = spawn(standbys, str(tmp_path / "file"), "--index", "ä")
    assert pids == [child.pid] * is_prepared
    assert finish(child) == 7
    assert (tmp_path / "file").read_text() == "['--index', 'ä'] ''"


def test_given_a_standby_when_it_is_asked_for_again_then_there_is_one_and_none_once_it_is_taken(
    standbys: Standbys, tmp_path: Path
) -> None:
    standbys.prepare(0.0)
    standbys.prepare(0.0)
    assert len(waiting()) == 1
    children = [spawn(standbys, str(tmp_path / name)) for name in "ab"]
    assert [finish(child) for child in children] == [7, 7]


def test_given_a_first_delay_when_a_load_keeps_the_processors_busy_then_none_starts_until_it_ends(
    standbys: Standbys, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, idle = Standbys({"sayer": MODULE}, first_delay=5.0), 0.0
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(idle=idle)] * (os.cpu_count() or 1))
    try:
        for second in range(100, 120):
            late.prepare(float(second))
            assert waiting() == []
        idle = 1.0
        late.prepare(120.0)
        assert len(waiting()) == 1
    finally:
        late.close()


def test_given_a_standby_that_was_killed_when_a_child_is_started_then_it_comes_all_the_same(
    standbys: Standbys, tmp_path: Path
) -> None:
    standbys.prepare(0.0)
    process = waiting()[0]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert finish(spawn(standbys, str(tmp_path / "file"))) == 7


def test_given_no_file_descriptor_when_a_standby_is_to_start_then_it_is_done_without_and_tried_again_after_a_while(
    standbys: Standbys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        for now in (0.0, 100.0):
            standbys.prepare(now)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # it is said once
    standbys.prepare(100.1)
    assert waiting() == []
    assert finish(spawn(standbys, str(tmp_path / "file"))) == 7
    standbys.prepare(200.0)
    assert len(waiting()) == 1


def test_given_a_standby_that_dies_when_it_is_asked_for_again_then_the_next_one_comes_after_a_while(
    standbys: Standbys,
) -> None:
    standbys.prepare(0.0)
    process = waiting()[0]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    standbys.prepare(1.0)
    assert not any(child.status() != psutil.STATUS_ZOMBIE for child in waiting())
    standbys.prepare(100.0)
    assert len(waiting()) == 1


def test_given_another_command_when_it_is_started_then_no_standby_is_taken(standbys: Standbys) -> None:
    standbys.prepare(0.0)
    child = ChildState("scheduler", 0, 1)
    standbys.spawn(child, python_module("timeit", "-n", "1"))
    assert finish(child) == 0
    assert len(waiting()) == 1


def test_given_a_standby_when_it_is_closed_or_its_parent_is_killed_then_it_is_gone(standbys: Standbys) -> None:
    standbys.prepare(0.0)
    process = waiting()[0]
    standbys.close()
    assert not process.is_running()
    code = "import sys\nfrom novainfer.entrypoints.standby import Standbys\n"
    code += f"Standbys({{'sayer': {MODULE!r}}}).prepare(0.0)\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        child = psutil.Process(parent.pid).children()[0]
        parent.send_signal(signal.SIGKILL)
    child.wait(60)
