"""How a scheduler process ends: with its ranks only where it is told so."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from novainfer.config import ParallelConfig, ServeConfig
from novainfer.protocol.step import WORKER_SCHEMA, Shutdown, WorkerHello
from novainfer.protocol.supervision import GIVE_UP_SIGNAL, SUPERVISOR_SCHEMA, ChildReady, ChildStarted
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import bind_pull, connect_dealer

pytestmark = pytest.mark.stage1

WAIT_MS = 60_000  # an event ends each wait long before


class Started:
    """A scheduler process whose one rank is this test, and so is its supervisor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        run_dir = RunDir.create(folder)
        config = ServeConfig(parallel=ParallelConfig(device="cpu"))
        run_dir.config_file.write_text(config.to_json())
        self._reports = bind_pull(context, run_dir.supervisor())
        command = [sys.executable, "-m", "novainfer.engine.server", "--run-dir", str(run_dir.path)]
        self.process = subprocess.Popen(command)
        self.wait_report(ChildStarted)
        self.rank = connect_dealer(context, run_dir.workers(0), b"rank-0-1")
        self.rank.send(WORKER_SCHEMA.encode(WorkerHello(1, 1, 0, 1, 10, 16, 100, 512, 8, 256, mode="cpu")))
        self.wait_report(ChildReady)

    def wait_report(self, kind: type) -> None:
        while True:
            assert self._reports.poll(WAIT_MS), f"no {kind.__name__}"
            if isinstance(SUPERVISOR_SCHEMA.decode(self._reports.recv()), kind):
                return

    def end(self, number: signal.Signals) -> list[object]:
        """What the rank hears when the scheduler gets the signal; it has ended."""
        self.process.send_signal(number)
        assert self.process.wait(WAIT_MS / 1000) == 0
        heard = []
        while self.rank.poll(200):  # what was sent is here: closing waits for that
            heard.append(WORKER_SCHEMA.decode(self.rank.recv()))
        return heard


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Started]:
    with zmq.Context() as context:
        started = Started(context, tmp_path / "run")
        yield started
        started.process.kill()
        started.process.wait()
        context.destroy(linger=0)


def test_given_the_signal_of_a_server_that_goes_on_when_the_scheduler_ends_then_its_ranks_hear_nothing(
    scheduler: Started,
) -> None:
    assert scheduler.end(signal.SIGTERM) == []


def test_given_the_signal_of_a_server_that_stops_when_the_scheduler_ends_then_its_ranks_are_to_end(
    scheduler: Started,
) -> None:
    assert scheduler.end(GIVE_UP_SIGNAL) == [Shutdown(1)]
