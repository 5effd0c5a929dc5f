"""Replicas of a real server die whole, are drained, restarted, added: streams are what undisturbed ones are."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from novainfer.entrypoints.replicas import ask
from novainfer.errors import ConfigError
from novainfer.protocol.supervision import ADD, DRAIN, LIST, RESTART, ReplicaCommand, ReplicaList
from novainfer.transport.addresses import RunDir
from tests.chaos.blows import KILL, STOP, strike, wait_replaced
from tests.chaos.replica_loop import kill_replica, wait_until_all_serve
from tests.chaos.rolling import restart_all
from tests.chaos.streams import REQUESTS, Answer, Streams, read_all, run
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2


class Fleet:
    """A server with two replicas, and what it says when nothing happens to it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(Path(tempfile.mkdtemp(prefix="n")))  # short: Ray's sockets lie below it
        flags = ("--replicas", "2", "--run-dir", str(self.run_dir.path), "--drain-timeout", "20")
        self.server = RunningServer(*flags, log=folder / "log")
        self.answers: list[Answer] = read_all(self.server, REQUESTS)

    def command(self, action: str, *replicas: int) -> ReplicaList:
        return ask(self.run_dir, ReplicaCommand(action, list(replicas)))

    def wait_until_serving(self, *numbers: int) -> None:
        """Until these replicas, and no others, are here, and all of them serve."""
        listing = self.command(LIST)
        while listing.replicas != list(numbers) or any(state != "serving" for state in listing.states):
            assert self.server.process.poll() is None, self.server.errors
            listing = self.command(LIST)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
        fleet.wait_until_serving(*fleet.command(LIST).replicas)
        fleet.server.wait_until_nothing_is_held()
        fleet.server.stop()
    finally:
        fleet.server.kill()
        shutil.rmtree(fleet.run_dir.path)


def test_given_streams_when_every_process_of_a_replica_is_killed_then_they_go_on_and_another_one_comes(
    fleet: Fleet,
) -> None:
    numbers = fleet.command(LIST).replicas

    def disturb(streams: Streams) -> None:
        for number in numbers:
            old = fleet.server.processes()[f"replica {number}"]
            kill_replica(fleet.server, number, random.Random(number))
            wait_until_all_serve(fleet.server, fleet.run_dir, old, number)

    assert run(fleet.server, disturb) == fleet.answers


@pytest.mark.parametrize(("title", "number"), [("worker 0.0", KILL), ("scheduler 0", KILL), ("replica 0", STOP)])
def test_given_streams_when_one_process_of_a_replica_dies_then_they_go_on(
    fleet: Fleet, title: str, number: int
) -> None:
    def disturb(streams: Streams) -> None:
        old = strike(fleet.server, title, number)  # type: ignore[arg-type]
        wait_replaced(fleet.server, title, old)

    assert run(fleet.server, disturb) == fleet.answers
    fleet.wait_until_serving(0, 1)


def test_given_streams_when_all_replicas_are_restarted_then_none_is_disturbed(fleet: Fleet) -> None:
    with Streams(fleet.server) as streams:
        streams.wait_all_have_begun()
        restart_all(fleet.server, fleet.run_dir, 2)
        assert streams.answers() == fleet.answers


def test_given_streams_when_a_replica_is_added_and_another_leaves_then_none_is_disturbed(fleet: Fleet) -> None:
    with Streams(fleet.server) as streams:
        streams.wait_all_have_begun()
        assert fleet.command(ADD).replicas == [0, 1, 2]
        fleet.wait_until_serving(0, 1, 2)
        fleet.command(DRAIN, 0)
        fleet.wait_until_serving(1, 2)
        assert streams.answers() == fleet.answers
    assert read_all(fleet.server, REQUESTS) == fleet.answers
    assert not (fleet.run_dir.path / "replica-0").exists()


def test_given_two_replicas_when_both_are_to_leave_then_that_is_refused(fleet: Fleet) -> None:
    numbers = fleet.command(LIST).replicas
    with pytest.raises(ConfigError, match="no replica that serves would be left"):
        fleet.command(DRAIN, *numbers)
    with pytest.raises(ConfigError, match="no replica 77"):
        fleet.command(RESTART, 77)
