"""The server that a measurement starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench import executor_trip, ray_start
from tests.servers import assert_gone

pytestmark = pytest.mark.stage2

MEASUREMENT = """
import time
from bench.server import started_server
with started_server("demo") as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_given_a_measurement_when_it_is_told_to_end_then_its_server_ends_too(folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", MEASUREMENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as measurement:
        assert measurement.stdout is not None
        server = psutil.Process(int(measurement.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        measurement.send_signal(signal.SIGTERM)
        assert measurement.wait(60) == 128 + signal.SIGTERM
    assert_gone(processes)
    assert not list(folder.iterdir())


def test_given_ray_alone_when_its_start_is_measured_then_it_has_taken_time_and_left_nothing() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    folders = set(Path("/tmp").glob("ray-*"))
    assert (ray_start.seconds() or 0.0) > 0.0
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert set(Path("/tmp").glob("ray-*")) <= folders


def test_given_a_program_that_ray_cannot_start_in_when_measured_then_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_start, "_PROGRAM", "import ray; ray.init('127.0.0.1')")
    assert ray_start.seconds() is None


def test_given_a_rank_that_computes_nothing_when_its_trip_is_measured_then_it_has_taken_time_and_left_nothing() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert 0.0 < executor_trip.median_seconds(32, trips=20) < 60.0
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
