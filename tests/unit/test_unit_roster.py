"""What becomes of replicas: pure rules, and the file that tells the gateways."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from novainfer.config import ParallelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints.children import ChildState, Phase
from novainfer.entrypoints.roster import Replica, Roster, num_cores
from novainfer.errors import ConfigError
from novainfer.protocol.supervision import ROLE_GATEWAY, GatewayPulse
from novainfer.transport.addresses import RunDir
from novainfer.transport.replicas import DRAINING, IN, NAME, OUT, Replicas, ReplicasFile, replica_dir, write_replicas

pytestmark = pytest.mark.unit

GATEWAYS = [ChildState(ROLE_GATEWAY, index, 1, Phase.READY) for index in range(2)]
GRACE = 30.0


class Server:
    """A roster whose replicas serve, and what gateways read of it."""

    def __init__(self, folder: Path, count: int) -> None:
        self.run_dir = RunDir.create(str(folder / "run"))
        config = ServeConfig(
            parallel=ParallelConfig(replicas=count), server=ServerConfig(orphan_grace=GRACE, max_restarts=2)
        )
        self.roster = Roster(config, self.run_dir)
        self.file = ReplicasFile(self.run_dir)
        self.now = 1000.0
        for _ in range(count):
            self.roster.add()
        self.start()

    def start(self) -> list[int]:
        """Start what is due, and let it serve: their numbers."""
        due = self.roster.take_due(float("inf"))
        for replica in due:
            self.roster.furnish(replica)
            self.serve(replica)
        return [replica.child.index for replica in due]

    def serve(self, replica: Replica) -> None:
        replica.child.phase = Phase.READY
        self.roster.serves(replica.child.index, self.now)

    def pulse(self, *live: dict[int, int]) -> None:
        """The gateways have these requests, and have read the file."""
        version = self.file.read().version
        for index, counts in enumerate(live):
            self.roster.note_gateway(GatewayPulse(index, 1, version, list(counts), list(counts.values())))

    def states(self) -> dict[int, str]:
        return dict(self.file.read().states)

    def drained(self) -> list[int]:
        return [child.index for child in self.roster.drained(GATEWAYS, self.now)]

    def end(self, number: int) -> bool:
        replica = self.roster[number]
        replica.child.phase = Phase.EXITED
        return self.roster.ended(replica, self.now)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, 2)


class _Process:
    """Stands for a process that a roster only asks for its existence."""


def alive(server: Server) -> None:
    for replica in server.roster:
        replica.child.process = _Process()  # type: ignore[assignment]


def test_replicas_when_added_then_they_are_in_and_have_a_directory_with_their_part_of_the_processors(
    server: Server,
) -> None:
    assert server.states() == {0: IN, 1: IN}
    config = ServeConfig.from_json(replica_dir(server.run_dir, 1).config_file.read_text())
    assert config.server.num_gateways == 0
    assert config.parallel.replicas is None
    assert config.parallel.threads_per_worker == max(1, num_cores() // 2)


def test_a_replica_when_it_dies_then_it_is_out_until_its_successor_serves(server: Server) -> None:
    assert not server.end(0)
    assert server.states() == {0: OUT, 1: IN}
    due = server.roster.take_due(float("inf"))
    assert [replica.child.epoch for replica in due] == [2]
    server.serve(due[0])
    assert server.states() == {0: IN, 1: IN}


def test_a_replica_when_it_dies_again_and_again_then_it_is_started_ever_later_as_long_as_another_serves(
    server: Server,
) -> None:
    waits = []
    for _ in range(6):
        server.end(0)
        replica = server.roster[0]
        assert replica.due is not None
        waits.append(replica.due - server.now)
        server.roster.take_due(float("inf"))
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] > 4.0
    assert not server.roster.is_hopeless()


def test_a_replica_that_never_starts_when_another_one_dies_then_there_is_hope_until_that_one_never_starts_either(
    server: Server,
) -> None:
    for _ in range(6):
        server.end(0)
        server.roster.take_due(float("inf"))
    for _ in range(2):  # max_restarts
        server.end(1)
        assert not server.roster.is_hopeless()
        server.roster.take_due(float("inf"))
    server.end(1)
    assert server.roster.is_hopeless()
    server.serve(server.roster[0])
    assert not server.roster.is_hopeless()


def test_a_replica_that_leaves_when_no_other_one_can_start_then_there_is_no_hope_once_it_has_died(
    server: Server,
) -> None:
    assert server.roster.drain([1]) is None
    for _ in range(3):
        server.end(0)
        assert not server.roster.is_hopeless()
        server.roster.take_due(float("inf"))
    server.roster.note_pulse_of(1, serves=False)
    assert server.roster.is_hopeless()


def test_a_replica_when_it_had_served_before_each_death_then_it_is_started_at_once_each_time(server: Server) -> None:
    for _ in range(6):
        server.end(0)
        assert server.roster[0].due == server.now
        server.serve(server.roster.take_due(server.now)[0])


def test_a_draining_replica_when_every_gateway_has_nothing_there_and_knows_it_then_it_ends(server: Server) -> None:
    alive(server)
    server.pulse({0: 0, 1: 0}, {0: 0, 1: 0})
    assert server.roster.drain([0]) is None
    assert server.states() == {0: DRAINING, 1: IN}
    assert server.drained() == []  # nobody has read the new file
    server.pulse({0: 3, 1: 0}, {0: 0, 1: 0})
    assert server.drained() == []
    server.pulse({0: 0, 1: 3}, {0: 0, 1: 0})
    assert server.drained() == [0]
    assert server.drained() == []  # it was told once
    assert server.end(0)
    assert server.states() == {1: IN}
    assert server.roster.listing().replicas == [1]


def test_a_draining_replica_when_a_gateway_has_died_then_it_stays_for_the_grace_time(server: Server) -> None:
    alive(server)
    assert server.roster.drain([0]) is None
    server.roster.gateway_lost(1, server.now)
    server.pulse({0: 0}, {0: 0})
    assert server.drained() == []
    server.now += GRACE
    assert server.drained() == [0]


def test_replicas_when_restarted_then_one_after_another_and_only_while_the_others_serve(server: Server) -> None:
    alive(server)
    assert server.roster.restart([]) is None
    assert server.roster.listing().states == ["waiting for a restart", "waiting for a restart"]
    server.roster.note_pulse_of(1, serves=False)
    assert server.drained() == []
    assert server.states() == {0: IN, 1: IN}
    server.roster.note_pulse_of(1, serves=True)
    assert server.drained() == []
    assert server.states() == {0: DRAINING, 1: IN}
    server.pulse({0: 0, 1: 5}, {0: 0, 1: 0})
    assert server.drained() == [0]
    assert server.end(0)
    assert server.states() == {0: OUT, 1: IN}
    assert server.start() == [0]
    alive(server)
    assert server.states() == {0: IN, 1: IN}
    assert server.drained() == []
    server.pulse({0: 5, 1: 0}, {0: 0, 1: 0})
    assert server.states() == {0: IN, 1: DRAINING}
    assert server.drained() == [1]
    assert server.end(1)
    assert server.start() == [1]
    alive(server)
    assert server.states() == {0: IN, 1: IN}
    server.pulse({}, {})
    assert server.drained() == []
    assert server.roster.listing().states == ["serving", "serving"]


def test_a_restarted_replica_when_its_new_process_dies_then_that_counts_as_a_death_and_the_next_one_waits(
    server: Server,
) -> None:
    alive(server)
    assert server.roster.restart([]) is None
    assert server.drained() == []
    server.pulse({0: 0, 1: 0}, {0: 0, 1: 0})
    assert server.drained() == [0]
    assert server.roster.listing().states == ["restarting", "waiting for a restart"]
    assert server.end(0)
    assert server.roster.listing().states == ["loading", "waiting for a restart"]
    replica, waits = server.roster[0], []
    for _ in range(3):
        server.roster.take_due(float("inf"))
        assert not server.end(0)
        assert replica.due is not None
        waits.append(replica.due - server.now)
        assert server.drained() == []
    assert waits == [0.0, 1.0, 2.0]
    assert server.roster.listing().states == ["dead", "waiting for a restart"]
    assert server.states() == {0: OUT, 1: IN}
    assert server.start() == [0]
    assert server.drained() == []
    assert server.states() == {0: IN, 1: DRAINING}


def test_a_draining_replica_when_it_dies_of_itself_then_a_leaving_one_is_forgotten_and_a_restarting_one_started(
    server: Server,
) -> None:
    alive(server)
    assert server.roster.restart([0]) is None
    assert server.drained() == []
    assert not server.end(0)
    server.pulse({0: 0}, {0: 0})
    server.drained()
    assert server.start() == [0]
    assert server.states() == {0: IN, 1: IN}
    alive(server)
    assert server.roster.drain([1]) is None
    assert not server.end(1)
    assert server.states() == {0: IN}


def test_commands_when_they_cannot_be_carried_out_then_the_reason_is_told_and_nothing_changes(server: Server) -> None:
    roster = server.roster
    assert "no replica 7" in (roster.drain([7]) or "")
    assert "no replica that serves would be left" in (roster.drain([0, 1]) or "")
    assert roster.drain([1]) is None
    assert "draining already" in (roster.drain([1]) or "")
    assert "nobody would serve" in (roster.restart([0]) or "")
    assert "no replica that serves would be left" in (roster.drain([0]) or "")
    assert server.states() == {0: IN, 1: DRAINING}


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file of this process can grow: what is written fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_when_a_replica_dies_then_gateways_are_told_once_there_is_room_and_its_files_are_as_before(
    server: Server,
) -> None:
    config = replica_dir(server.run_dir, 0).config_file.read_text()
    with no_room():
        server.end(0)
        (due,) = server.roster.take_due(server.now)
        with pytest.raises(OSError, match="too large"):
            server.roster.furnish(due)
        server.roster.catch_up(float("inf"))
        assert server.states() == {0: IN, 1: IN}
    assert replica_dir(server.run_dir, 0).config_file.read_text() == config
    server.roster.catch_up(float("inf"))
    assert server.states() == {0: OUT, 1: IN}
    server.roster.ended(due, server.now)  # it has not been started
    assert server.start() == [0]
    assert server.states() == {0: IN, 1: IN}
    assert [path.name for path in server.run_dir.path.glob("**/*.new")] == []


def test_a_full_disk_when_a_replica_is_restarted_then_it_goes_on_until_gateways_have_been_told(server: Server) -> None:
    alive(server)
    assert server.roster.restart([0]) is None
    with no_room():
        assert server.drained() == []
        server.pulse({0: 0, 1: 0}, {0: 0, 1: 0})
        assert server.drained() == []
    server.roster.catch_up(float("inf"))
    server.pulse({0: 0, 1: 0}, {0: 0, 1: 0})
    assert server.drained() == [0]


def test_a_full_disk_when_a_replica_is_added_or_to_leave_then_that_is_refused_and_nothing_changes(
    server: Server,
) -> None:
    with no_room():
        with pytest.raises(ConfigError, match="disk may be full"):
            server.roster.add()
        assert "disk may be full" in (server.roster.drain([0]) or "")
    server.roster.catch_up(float("inf"))
    assert server.states() == {0: IN, 1: IN}
    assert server.roster.listing().replicas == [0, 1]
    assert server.roster.add().child.index == 2
    assert server.roster.drain([0]) is None


def test_the_file_when_it_does_not_exist_then_the_server_is_one_replica(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path / "run"))
    replicas = ReplicasFile(run_dir).read()
    assert replicas == Replicas()
    assert replicas.endpoints(run_dir) == {0: run_dir.gateways(0)}


def test_the_file_when_written_then_read_back_with_endpoints_of_its_own(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path / "run"))
    file = ReplicasFile(run_dir)
    for version in (1, 2):
        write_replicas(run_dir, Replicas(version, {0: IN, 3: DRAINING}))
        assert file.read() == Replicas(version, {0: IN, 3: DRAINING})
    assert file.read().endpoints(run_dir)[3] == replica_dir(run_dir, 3).gateways(3)
    assert [path.name for path in run_dir.path.iterdir()] == [NAME]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', json.dumps({"version": "x", "states": {}})])
def test_the_file_when_it_is_broken_then_a_config_error_says_so(tmp_path: Path, content: str) -> None:
    run_dir = RunDir.create(str(tmp_path / "run"))
    (run_dir.path / NAME).write_text(content)
    with pytest.raises(ConfigError, match="not what a supervisor writes"):
        ReplicasFile(run_dir).read()
