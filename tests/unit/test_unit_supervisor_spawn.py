"""Processes that cannot be started, and a disk that is full, beside others that serve: they go on."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from novainfer.entrypoints.replicas import ask
from novainfer.errors import ConfigError
from novainfer.protocol.supervision import ADD, DRAIN, LIST, ReplicaCommand
from novainfer.transport.addresses import RunDir
from tests.unit.test_unit_supervisor import Start, start

pytestmark = pytest.mark.unit

__all__ = ["start"]  # the fixture


class Program:
    """What runs the children of a server: it may be away for a while, and no process can be started then."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "program"
        self.come_back()

    def come_back(self) -> None:
        draft = self.path.with_name("draft")
        draft.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        draft.chmod(0o700)
        draft.rename(self.path)

    def go_away(self) -> None:
        self.path.unlink()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.mark.parametrize("name", ["gateway 1", "scheduler 0"])
def test_given_a_successor_that_cannot_be_started_when_it_can_then_it_comes_and_the_others_have_gone_on(
    start: Start, program: Program, name: str
) -> None:
    server = start("--program", str(program.path))
    assert "is ready" in server.wait_ready()
    before = server.pids()
    program.go_away()
    os.kill(before[name], signal.SIGKILL)
    server.wait_error(f"{name} cannot be started")
    program.come_back()
    server.wait_error("serving again")
    after = server.pids()
    assert {one for one in before if after[one] != before[one]} == {name}
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


@pytest.mark.parametrize("name", ["gateway 1", "scheduler 0"])
def test_given_a_successor_that_can_never_be_started_when_it_was_tried_often_enough_then_that_ends_the_server(
    start: Start, program: Program, name: str
) -> None:
    server = start("--max-restarts", "1", "--program", str(program.path))
    assert "is ready" in server.wait_ready()
    program.go_away()
    os.kill(server.pids()[name], signal.SIGKILL)
    status, errors = server.finish()
    assert status == 1
    assert "given up" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("flags", [(), ("--replicas", "2")])
def test_given_no_process_when_a_server_starts_then_it_ends_with_the_reason(
    start: Start, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "log").touch()
    server = start("--program", str(tmp_path / "nothing"), *flags)
    status, errors = server.finish()
    assert status == 1
    assert "cannot be started: " in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["gateway 1", "replica 1"])
def test_given_replicas_when_a_successor_cannot_be_started_then_it_is_tried_again_and_the_others_go_on(
    start: Start, program: Program, name: str
) -> None:
    server = start("--replicas", "2", "--program", str(program.path))
    assert "is ready" in server.wait_ready()
    before = server.pids()
    program.go_away()
    os.kill(before[name], signal.SIGKILL)
    server.wait_error(f"{name} cannot be started")
    program.come_back()
    while server.pids()[name] == before[name]:
        assert server.process.poll() is None, server.finish()
    after = server.pids()
    assert {one for one in before if after[one] != before[one]} == {name}
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


def test_given_replicas_on_a_full_disk_when_one_dies_then_commands_are_refused_and_it_comes_once_there_is_room(
    start: Start,
) -> None:
    server = start("--replicas", "2")
    assert "is ready" in server.wait_ready()
    before, run_dir = server.pids(), RunDir(server.run_dir)
    _, most = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, most))  # its files cannot grow
    os.kill(before["replica 1"], signal.SIGKILL)
    server.wait_error("replica 1 cannot be started")
    for command in (ReplicaCommand(ADD, []), ReplicaCommand(DRAIN, [1])):
        with pytest.raises(ConfigError):
            ask(run_dir, command)
    assert ask(run_dir, ReplicaCommand(LIST, [])).replicas == [0, 1]
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (most, most))
    while server.pids()["replica 1"] == before["replica 1"]:
        assert server.process.poll() is None, server.finish()
    after = server.pids()
    assert {one for one in before if after[one] != before[one]} == {"replica 1"}
    assert ask(run_dir, ReplicaCommand(ADD, [])).replicas == [0, 1, 2]
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0
