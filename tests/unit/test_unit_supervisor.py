"""The supervisor over real child processes that load no model."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from gateway.process import bind_http
from novainfer.config import ParallelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints.children import ChildState, ChildTable, Phase, child_environment, exit_words
from novainfer.entrypoints.serve import LOCK, TEMPORARY, held_port, run_directory
from novainfer.errors import ConfigError
from novainfer.protocol.supervision import ChildReady, ChildStarted
from novainfer.transport import addresses

pytestmark = pytest.mark.unit

SCRIPT = Path(__file__).with_name("fake_children.py")
CHILDREN = {"scheduler 0", "gateway 0", "gateway 1"}
PATIENCE = 60  # seconds; only a failing test waits that long


class FakeServer:
    """A running `fake_children.py server`."""

    def __init__(self, folder: Path, behave: dict[str, str], environ: dict[str, str], *flags: str) -> None:
        self.run_dir, self._log = folder / "run", folder / "log"
        command = [sys.executable, str(SCRIPT), "server", "--run-dir", str(self.run_dir), "--log", str(self._log)]
        command += ["--behave", json.dumps(behave), *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"it ended: {self.finish()}"
        return line

    def wait_error(self, words: str) -> list[str]:
        """Read standard error up to a line with these words: the lines."""
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if words in line:
                return lines
        raise AssertionError(f"it ended without saying {words!r}")

    def begin_drain(self) -> None:
        """Tell it to stop, and wait until its gateways, which `drain`, have heard of it; they do until `end_drain`."""
        self.process.send_signal(signal.SIGTERM)
        for _ in range(2):
            self.wait_error(" drains")

    def end_drain(self) -> None:
        self._log.with_name("drained").touch()

    def lose_workers(self) -> None:
        self._log.with_name("die").touch()

    def log(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines()

    def pids(self) -> dict[str, int]:
        return {line.split(" pid ")[0]: int(line.split(" pid ")[1]) for line in self.log() if " pid " in line}

    def finish(self) -> tuple[int, str]:
        """The exit status and what was written to standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


Start = Callable[..., FakeServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[FakeServer] = []

    def _start(*flags: str, environ: dict[str, str] | None = None, **behave: str) -> FakeServer:
        servers.append(FakeServer(tmp_path, behave, environ or {}, *flags))
        return servers[-1]

    yield _start
    for server in servers:
        server.process.kill()
        server.process.communicate()
        assert gone(server.pids().values()), "a child outlived its supervisor"


def gone(pids: Iterable[int]) -> bool:
    """Whether all these processes end (they may need a moment to be taken away)."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_all_children_ready_when_sigterm_comes_then_gateways_scheduler_and_workers_stop_in_this_order(
    start: Start,
) -> None:
    server = start()
    ready = server.wait_ready()
    assert ready.startswith("NovaInfer is ready on http://127.0.0.1:4321 (model demo, 2 workers, ")
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.finish()
    assert status == 0, errors
    stops = [line for line in server.log() if line.endswith("stopped")]
    assert set(stops[:2]) == {"gateway 0 stopped", "gateway 1 stopped"}
    assert stops[2:] == ["scheduler 0 stopped", "workers stopped"]
    assert "scheduler 0 ends its ranks" in server.log()
    assert not server.run_dir.exists()
    assert "loading: weights (2 tensors)" in errors


@pytest.mark.parametrize("role", ["gateway", "scheduler"])
def test_a_child_that_fails_when_it_exits_then_everything_ends_with_status_1_and_its_last_word(
    start: Start, role: str
) -> None:
    server = start(**{role: "exit"})
    status, errors = server.finish()
    assert status == 1
    assert "exited with status 7: the disk is full" in errors, errors
    last = errors.splitlines()[-1]  # whatever else was said while all ended
    assert "the server has ended: " in last, errors
    assert last.endswith("exited with status 7: the disk is full")
    assert "workers stopped" in server.log()
    assert not server.run_dir.exists()


def test_a_worker_that_warns_when_it_loads_then_the_servers_log_has_it_and_the_server_serves(start: Start) -> None:
    server = start(worker="warn")
    assert "is ready" in server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.finish()
    assert status == 0
    assert any("WARNING" in line and "worker 0: slow kernels" in line for line in errors.splitlines()), errors


def test_a_serving_gateway_when_it_is_killed_then_another_one_is_started_and_nothing_else(start: Start) -> None:
    server = start()
    assert "is ready" in server.wait_ready()
    before = server.pids()
    os.kill(before["gateway 1"], signal.SIGKILL)
    server.wait_error("gateway 1 was killed by SIGKILL")
    server.wait_error("serving again")
    after = server.pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0
    assert {name for name in before if before[name] != after[name]} == {"gateway 1"}


def test_given_two_ranks_that_die_together_when_they_are_replaced_then_that_was_one_loss(start: Start) -> None:
    server = start("--max-restarts", "1", worker="processes")
    assert "is ready" in server.wait_ready()
    server.process.send_signal(signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)  # it sees both at once
    for rank in range(2):
        os.kill(server.pids()[f"worker {rank}"], signal.SIGKILL)
    server.process.send_signal(signal.SIGCONT)
    server.wait_error(" died")
    server.wait_error("serving again")
    assert [line for line in server.log() if line.startswith("workers of epoch")] == [
        "workers of epoch 1",
        "workers of epoch 2",
    ]
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


def test_given_a_replica_that_cannot_come_back_when_gateways_die_again_and_again_then_each_is_started_again(
    start: Start,
) -> None:
    server = start("--replicas", "2", "--max-restarts", "1", **{"replica 1": "once"})
    assert "is ready" in server.wait_ready()
    os.kill(server.pids()["replica 1"], signal.SIGKILL)
    server.wait_error("replica 1 was killed by SIGKILL")
    for _ in range(3):
        os.kill(server.pids()["gateway 1"], signal.SIGKILL)
        server.wait_error("all gateways serve again")
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


def test_given_gateways_that_drain_when_a_replica_dies_then_it_is_started_again_and_a_gateway_is_not(
    start: Start,
) -> None:
    server = start("--replicas", "2", gateway="drain")
    assert "is ready" in server.wait_ready()
    before = server.pids()
    server.begin_drain()
    os.kill(before["gateway 1"], signal.SIGKILL)
    server.wait_error("gateway 1 was killed by SIGKILL")
    os.kill(before["replica 1"], signal.SIGKILL)
    server.wait_error("replica 1 was killed by SIGKILL")
    while (after := server.pids())["replica 1"] == before["replica 1"]:
        assert server.process.poll() is None
    server.end_drain()
    assert server.finish()[0] == 0
    assert {name for name in before if before[name] != after[name]} == {"replica 1"}
    assert [line for line in server.log() if line.startswith("gateway") and line.endswith("ed")] == [
        "gateway 0 drained",
        "gateway 0 stopped",
    ]


def test_given_a_serving_gateway_when_it_is_stopped_then_another_one_is_started_and_nothing_else(start: Start) -> None:
    server = start()
    assert "is ready" in server.wait_ready()
    before = server.pids()
    os.kill(before["gateway 1"], signal.SIGSTOP)
    server.wait_error("gateway 1 hangs: silent for ")
    server.wait_error("serving again")
    after = server.pids()
    assert gone([before["gateway 1"]])
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0
    assert {name for name in before if before[name] != after[name]} == {"gateway 1"}


def test_given_a_server_when_all_are_ready_and_again_after_a_death_then_spare_workers_are_prepared(
    start: Start,
) -> None:
    server = start("--spare-workers", "1", worker="die-once")
    assert "is ready" in server.wait_ready()
    server.wait_error("serving again")
    while len([line for line in server.log() if line.startswith("prepare")]) < 2:
        assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0
    lines = [line for line in server.log() if line.startswith(("prepare", "workers of"))]
    # A spare group has what the rank with the fewest blocks has.
    assert lines == ["workers of epoch 1", "prepare 7", "workers of epoch 2", "prepare 7"]


@pytest.mark.parametrize(
    ("fingerprints", "worker", "known"),
    [
        ("aa", "die-once", ["", "a", "a", "a"]),
        ("aba", "die-once", ["", "a", "a", "ab", "a"]),
        ("abb", "die-once", ["", "a", "a", "ab", "b"]),
        ("abcc", "die-once", ["", "a", "a", "ab", "abc", "c"]),
        ("abbaa", "die-twice", ["", "a", "a", "ab", "b", "b", "ba", "a"]),
    ],
)
def test_given_a_group_that_computes_otherwise_when_it_is_to_take_over_then_two_must_agree(
    start: Start, fingerprints: str, worker: str, known: list[str]
) -> None:
    deaths = 2 if worker == "die-twice" else 1  # refusals do not count
    server = start("--spare-workers", "1", "--max-restarts", str(deaths), worker=worker, prints=fingerprints)
    assert "is ready" in server.wait_ready()
    errors = "".join(line for _ in range(deaths) for line in server.wait_error("serving again"))
    # At each start, and when each group that serves is to have a spare one.
    seen: list[str] = []
    while len(seen) < len(known):
        assert server.process.poll() is None, server.log()
        seen = [line.removeprefix("known ") for line in server.log() if line.startswith("known")]
    assert seen == known
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stderr is not None
    errors += server.process.stderr.read()  # what `wait_error` has buffered, too
    assert server.finish()[0] == 0
    changes = ["".join(two) for two in re.findall(r"compute otherwise than before \((.), not (.)\)", errors)]
    assert changes == {"abb": ["ba"], "abcc": ["ca"], "abbaa": ["ba", "ab"]}.get(fingerprints, [])
    assert ("it is strange" in errors) == (len(fingerprints) > 2)


def test_given_groups_of_which_no_two_agree_when_they_go_on_coming_then_the_server_gives_up(start: Start) -> None:
    server = start("--spare-workers", "1", "--max-restarts", "2", worker="die-once", prints="abcdefgh")
    assert "is ready" in server.wait_ready()
    status, errors = server.finish()
    assert status == 1
    starts = [line for line in server.log() if line.startswith("workers of")]
    assert len(starts) == 6  # three refusals of five do not count, and one restart was left
    assert "given up: nothing worked between one death and the next" in errors


def test_given_a_spare_group_that_is_lost_when_another_one_is_prepared_then_the_server_does_not_notice(
    start: Start,
) -> None:
    server = start("--spare-workers", "1", worker="spare-fails")
    assert "is ready" in server.wait_ready()
    before = server.pids()
    server.wait_error("the spare workers are lost (it will not stand); others in 1 s")
    server.process.send_signal(signal.SIGTERM)
    status, errors = server.finish()
    assert status == 0
    assert "ERROR" not in errors
    assert server.pids() == before
    assert "workers of epoch 2" not in server.log()


def test_a_serving_scheduler_when_it_is_killed_then_another_one_takes_the_same_workers_over_in_the_next_epoch(
    start: Start,
) -> None:
    server = start()
    assert "is ready" in server.wait_ready()
    os.kill(server.pids()["scheduler 0"], signal.SIGKILL)
    server.wait_error("serving again")
    server.process.send_signal(signal.SIGTERM)
    status, _ = server.finish()
    assert status == 0
    epochs = [line for line in server.log() if " epoch " in line]
    assert epochs == ["workers of epoch 1", "scheduler 0 epoch 1 group 1", "scheduler 0 epoch 2 group 1"]


def test_serving_workers_when_they_die_then_others_come_in_the_next_epoch_and_the_scheduler_stays(start: Start) -> None:
    server = start("--spare-workers", "1", worker="die-once")
    assert "is ready" in server.wait_ready()
    server.wait_error("serving again")
    server.process.send_signal(signal.SIGTERM)
    status, _ = server.finish()
    assert status == 0
    assert sorted(line for line in server.log() if " epoch " in line) == [
        "scheduler 0 epoch 1 group 1",
        "workers of epoch 1",
        "workers of epoch 2",
    ]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("fault", "worker 0: out of memory"), ("die", "a worker died"), ("no-start", "no room for the ranks")],
)
def test_workers_that_fail_when_noticed_then_everything_ends_with_status_1(
    start: Start, behaviour: str, words: str
) -> None:
    status, errors = start(worker=behaviour).finish()
    assert status == 1
    assert words in errors


def test_a_child_that_is_never_ready_when_the_start_timeout_passes_then_it_is_named(start: Start) -> None:
    status, errors = start("--start-timeout", "2", scheduler="late").finish()
    assert status == 1
    assert "not ready after 2 s; still waiting for scheduler 0" in errors


def test_a_gateway_that_ignores_sigterm_when_a_second_signal_comes_then_it_is_killed_at_once(start: Start) -> None:
    server = start(gateway="stubborn")
    assert "is ready" in server.wait_ready()
    server.process.send_signal(signal.SIGINT)
    server.wait_error("got SIGINT")
    server.process.send_signal(signal.SIGINT)
    status, errors = server.finish()
    assert status == 0
    assert "killing gateway 0, gateway 1" in errors


def test_given_gateways_that_drain_when_others_die_then_scheduler_and_workers_are_replaced_and_no_gateway(
    start: Start,
) -> None:
    server = start(gateway="drain")
    assert "is ready" in server.wait_ready()
    server.begin_drain()
    os.kill(server.pids()["gateway 1"], signal.SIGKILL)  # it is not missed
    server.wait_error("gateway 1 was killed by SIGKILL")
    os.kill(server.pids()["scheduler 0"], signal.SIGKILL)
    server.wait_error("serving again after")
    server.lose_workers()
    server.wait_error("serving again after")
    server.end_drain()
    assert server.finish()[0] == 0
    assert len([line for line in server.log() if line.startswith("gateway 1 pid")]) == 1
    assert [line for line in server.log() if " epoch " in line or line.endswith("stopped")] == [
        "workers of epoch 1",
        "scheduler 0 epoch 1 group 1",
        "scheduler 0 epoch 2 group 1",
        "workers of epoch 3",
        "gateway 0 stopped",
        "scheduler 0 stopped",
        "workers stopped",
    ]


def test_given_gateways_that_drain_when_the_engine_dies_once_too_often_then_they_are_told_and_the_status_is_1(
    start: Start,
) -> None:
    server = start("--max-restarts", "0", gateway="drain")
    assert "is ready" in server.wait_ready()
    server.begin_drain()
    os.kill(server.pids()["scheduler 0"], signal.SIGKILL)
    status, errors = server.finish()
    assert status == 1
    assert "given up: nothing worked between one death and the next" in errors
    assert {"gateway 0 gave up", "gateway 1 gave up", "workers stopped"} <= set(server.log())


def test_given_gateways_that_drain_and_no_scheduler_when_a_second_signal_comes_then_all_end_at_once(
    start: Start,
) -> None:
    server = start(gateway="drain")
    assert "is ready" in server.wait_ready()
    server.begin_drain()
    os.kill(server.pids()["scheduler 0"], signal.SIGKILL)
    server.wait_error("scheduler 0 was killed by SIGKILL")
    server.process.send_signal(signal.SIGINT)
    status, errors = server.finish()
    assert status == 0
    assert "killing gateway 0, gateway 1" in errors


def test_a_supervisor_when_it_is_killed_with_sigkill_then_its_children_die_too(start: Start) -> None:
    server = start()
    assert "is ready" in server.wait_ready()
    pids = server.pids()
    assert set(pids) == CHILDREN
    server.process.kill()
    server.process.wait()
    assert gone(pids.values())


def test_a_service_manager_when_the_server_starts_and_stops_then_it_is_told(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        server = start(environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=ready on http://127.0.0.1:4321")
        server.process.terminate()
        assert manager.recv(4096) == b"STOPPING=1"
        assert server.finish()[0] == 0


def test_a_full_disk_when_a_server_is_started_then_it_is_refused_and_no_directory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "MIN_SPACE", 2**62)
    config = ServeConfig(server=ServerConfig(run_dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"KiB free in .*choose another --run-dir"), run_directory(config):
        pass
    assert not (tmp_path / "run").exists()


def test_a_run_directory_in_use_when_another_server_wants_it_then_it_is_refused(tmp_path: Path) -> None:
    config = ServeConfig(server=ServerConfig(run_dir=str(tmp_path / "run")))
    with run_directory(config) as run_dir:
        assert (run_dir.config_file.stat().st_mode & 0o777) == 0o600
        assert ServeConfig.from_json(run_dir.config_file.read_text()) == config
        with pytest.raises(ConfigError, match="another server uses"), run_directory(config):
            pass
        assert run_dir.config_file.exists()
    assert not run_dir.path.exists()


def test_a_run_directory_that_was_there_when_the_server_ends_then_only_our_files_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "mine").write_text("keep")
    with run_directory(ServeConfig(server=ServerConfig(run_dir=str(folder)))):
        (folder / "scheduler-0.workers").write_text("")
        (folder / "ray" / "session").mkdir(parents=True)
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("replicas", [None, 2])
def test_given_files_of_a_server_that_was_killed_when_another_one_uses_the_directory_then_it_does_not_believe_them(
    tmp_path: Path, replicas: int | None
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    for name in ("replicas.json", "supervisor.ranks.json", "gateway-0.metrics", "mine"):
        (folder / name).write_text("{}")
    (folder / "replica-1").mkdir()
    (folder / "gateway-logs").mkdir()  # not ours
    config = ServeConfig(server=ServerConfig(run_dir=str(folder)), parallel=ParallelConfig(replicas=replicas))
    with run_directory(config):
        assert {path.name for path in folder.iterdir()} == {"config.json", LOCK, "mine", "gateway-logs"}
    assert {path.name for path in folder.iterdir()} == {"mine", "gateway-logs"}


def put_run_directory(path: Path, lock: bytes = TEMPORARY, mode: int = 0o700) -> Path:
    path.mkdir(mode=mode)
    (path / "ray").mkdir()
    (path / "mine").touch()
    (path / LOCK).write_bytes(lock)
    return path


def test_given_directories_that_are_no_abandoned_ones_when_a_server_starts_then_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs = put_run_directory(tmp_path / "novainfer-runs")
    put_run_directory(tmp_path / "novainfer-given", b"")
    put_run_directory(tmp_path / "novainfer-open", mode=0o755)
    other = put_run_directory(tmp_path / "other")
    (tmp_path / "novainfer-link").symlink_to(other)
    (tmp_path / "novainfer-lockless").mkdir(mode=0o700)
    led_away = put_run_directory(tmp_path / "novainfer-led-away")
    (led_away / LOCK).unlink()
    (led_away / LOCK).symlink_to(other / LOCK)
    before = sorted(tmp_path.rglob("*"))
    with open(runs / LOCK) as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        with run_directory(ServeConfig()) as run_dir:
            assert run_dir.path.parent == tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def test_given_a_server_that_is_killed_when_the_next_one_starts_then_its_temporary_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = """
from novainfer.config import ServeConfig
from novainfer.entrypoints.serve import run_directory
with run_directory(ServeConfig()) as run_dir:
    print(run_dir.path, flush=True)
    input()
"""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().strip())
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with run_directory(ServeConfig()):
            assert left.is_dir(), "it runs"
        server.kill()
        server.wait()
    with run_directory(ServeConfig()):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_when_a_server_wants_it_then_it_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"),
            held_port(ServeConfig(server=ServerConfig(port=port))),
        ):
            pass


def test_given_port_0_when_it_is_held_then_a_gateway_can_listen_there_and_nobody_else_gets_it() -> None:
    with held_port(ServeConfig(server=ServerConfig(port=0))) as config, socket.socket() as stranger:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", config.server.port))
        for _ in range(2):  # the second one replaces the first
            bind_http(config.server).close()


def test_the_child_table_when_reports_come_in_any_order_then_a_phase_never_goes_back() -> None:
    table = ChildTable(num_gateways=1, world_size=1, epoch=1)
    assert [child.name for child in table.behind(Phase.STARTED)] == ["scheduler 0", "gateway 0", "worker 0"]
    table.ready(ChildReady("gateway", 0))
    table.started(ChildStarted("gateway", 0, 10, 8000))
    table.started(ChildStarted("worker", 0, 11))
    assert [child.name for child in table.behind(Phase.STARTED)] == ["scheduler 0"]
    assert [child.name for child in table.behind(Phase.READY)] == ["scheduler 0", "worker 0"]
    assert table.of("gateway")[0].port == 8000
    with pytest.raises(KeyError):
        table.ready(ChildReady("gateway", 1))


def test_the_child_table_when_dead_gateways_are_left_out_then_nobody_waits_for_them() -> None:
    table = ChildTable(num_gateways=2, world_size=1, epoch=1)
    process = table.of("gateway")[0].process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    table.leave_out_dead("gateway")
    assert [child.name for child in table.behind(Phase.READY)] == ["scheduler 0", "gateway 0", "worker 0"]


def test_a_child_when_it_was_killed_by_a_signal_then_the_log_names_it() -> None:
    child = ChildState("gateway", 3, 1)
    child.process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    child.process.wait()
    assert exit_words(child) == "gateway 3 was killed by SIGSEGV"


def test_our_variables_when_a_child_is_started_then_it_does_not_see_them() -> None:
    places = {"NOVAINFER_CACHE_DIR": "/data", "NOVAINFER_KERNEL_DIR": "/kernels", "NOVAINFER_CPU_ISA": "avx2"}
    environ = child_environment({"NOVAINFER_API_KEY": "secret", "NOVAINFER_PORT": "1", "PATH": "/bin", **places})
    assert environ == {"PATH": "/bin", "NOVAINFER_SUPERVISOR_PID": str(os.getpid()), **places}
