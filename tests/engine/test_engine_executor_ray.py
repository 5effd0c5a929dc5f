"""Ranks as Ray actors: two of them generate what one does, and nothing of Ray outlives the process that started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from novainfer.config import ParallelConfig, ServeConfig
from novainfer.errors import ConfigError
from novainfer.transport.addresses import RunDir
from tests.builders import PlanWriter
from tests.engine.ray_driver import NUM_TOKENS, PROMPT, config
from tests.parity.builders import build_checkpoint
from workers import ray_group
from workers.local_executor import LocalExecutor
from workers.ray_group import RayWorkerGroup
from workers.ray_instance import RayInstance
from workers.ray_lean import has_idle_agents

pytestmark = pytest.mark.stage1

LOOPBACK = ("127.", "::ffff:127.", "::1")
WAIT = 30.0  # seconds; an event ends each wait long before


@pytest.fixture
def temp_dir() -> Iterator[str]:
    """Where a killed process leaves its run directory; short, for the sake of the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="nova-", ignore_cleanup_errors=True) as path:
        yield path


def start(model: str, world_size: int, temp_dir: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "tests.engine.ray_driver", model, str(world_size)]
    environ = {**os.environ, "TMPDIR": temp_dir}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        return process, json.loads(process.stdout.readline())
    except ValueError:
        process.kill()
        process.communicate()
        raise


def test_given_spare_workers_when_ray_has_gpus_for_the_ranks_then_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_group, "_uses_gpu", lambda parallel: True)
    monkeypatch.setattr(RayInstance, "start", lambda instance: None)
    monkeypatch.setattr(RayWorkerGroup, "_reserve", lambda group: pytest.fail("it went on"))
    group = RayWorkerGroup(ServeConfig(parallel=ParallelConfig(spare_workers=1)), RunDir(tmp_path))
    with pytest.raises(ConfigError, match="--spare-workers is for CPUs"):
        group.start(1)


def survivors(report: dict[str, Any], timeout: float) -> list[psutil.Process]:
    """Those of the reported processes that still run after `timeout` seconds."""
    processes: list[psutil.Process] = []
    for pid, created, _ in report["processes"]:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.NoSuchProcess:
            pass
    return psutil.wait_procs(processes, timeout)[1]


def test_two_ranks_when_run_on_ray_then_tokens_equal_one_rank_and_all_ends_with_close(
    tmp_path: Path, temp_dir: str
) -> None:
    model = str(build_checkpoint("qwen3", tmp_path / "qwen3"))
    process, report = start(model, 2, temp_dir)
    try:
        process.communicate(timeout=WAIT)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
    executor, writer = LocalExecutor(config(model, 1)), PlanWriter()
    writer.add(0, PROMPT)
    for count in [len(PROMPT)] + [1] * (NUM_TOKENS - 1):
        executor.submit(writer.plan({0: count}))
    results = [executor.collect(None) for _ in range(NUM_TOKENS)]
    assert report["tokens"] == [token for result in results if result is not None for token in result.token_ids]
    titles = {title for _, _, command in report["processes"] for title in command}
    assert {"novainfer: worker 0.0", "novainfer: worker 0.1"} <= titles
    assert report["niceness"] == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)] * 2  # Ray's own default is 15
    assert report["listening"]
    assert all(address.startswith(LOOPBACK) for address in report["listening"])
    assert survivors(report, 0) == []
    assert list(Path(temp_dir).glob("novainfer-*")) == []


def test_given_fingerprints_when_ranks_have_others_then_they_end_before_they_serve_and_spare_ones_before_they_stand_by(
    temp_dir: str,
) -> None:
    command = [sys.executable, "-m", "tests.engine.ray_strangers", temp_dir]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=4 * WAIT)
    first, spare, last = done.stdout.splitlines()
    assert first.startswith("rank 0 has ended: StrangeRankError: these ranks compute otherwise than those before them")
    assert spare.startswith("spare: ")
    assert "StrangeRankError" in spare
    assert last == "the one that serves lives: True"


def test_supervisor_when_killed_then_nothing_of_ray_is_left(temp_dir: str) -> None:
    process, report = start("demo", 1, temp_dir)
    process.kill()
    process.communicate()
    assert len(report["processes"]) >= 3
    assert survivors(report, WAIT) == []


def test_orphan_when_its_raylet_dies_then_it_lives_and_starts_another_ray(temp_dir: str) -> None:
    """The parent of an orphan, and of a server under systemd or a container's init, is process 1 (if no other takes
    orphans here): Ray itself would end us then."""
    command = [sys.executable, "-m", "tests.engine.ray_orphan", temp_dir]
    done = subprocess.run(
        ["sh", "-c", '"$@" &', "sh", *command], stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    assert done.stdout.split() == ["gone", "there", "ended"]


@pytest.mark.parametrize(
    "environ",
    [{}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}'}],
    ids=["alone", "in a job of Ray's"],
)
def test_given_agents_that_idle_when_ray_is_started_then_actors_run_and_the_agents_end_with_the_raylet(
    temp_dir: str, environ: dict[str, str]
) -> None:
    """What a job of Ray's wants of its workers' environments would need an agent."""
    command = [sys.executable, "-m", "tests.engine.ray_agents", temp_dir]
    done = subprocess.run(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, check=True, timeout=3 * WAIT
    )
    assert done.stdout.splitlines() == [str(["pipe", "pipe"] if has_idle_agents() else []), "here", "[]"]


def test_given_a_raylet_that_dies_when_it_is_started_then_the_start_fails_at_once_and_leaves_nothing(
    temp_dir: str,
) -> None:
    command = [sys.executable, "-m", "tests.engine.ray_lost_start", temp_dir]
    # Ray itself would wait for half a minute.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT)
    assert done.stdout.splitlines() == ["Ray has died while it was started", "[]", "there"]


@pytest.mark.parametrize("stopped", [("raylet",), ("gcs_server", "watch")])
def test_given_a_server_of_ray_that_is_stopped_when_ranks_run_or_are_to_end_then_it_is_as_if_it_had_died(
    tmp_path: Path, temp_dir: str, stopped: tuple[str, ...]
) -> None:
    """The run directory's path is too long for Ray's sockets: they are in a temporary one, until each instance ends."""
    command = [sys.executable, "-m", "tests.engine.ray_stopped", str(tmp_path), *stopped]
    environ = {**os.environ, "TMPDIR": temp_dir}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=2 * WAIT)
    assert done.stdout.splitlines() == ["lost ['nova-ray']", "there ['nova-ray']", "[] []"]


@pytest.mark.parametrize("last", ["dropped", "left"])
def test_given_offline_engines_that_nobody_ends_when_they_are_dropped_or_left_then_all_of_them_ends(
    temp_dir: str, last: str
) -> None:
    command = [sys.executable, "-m", "tests.engine.ray_dropped", last]
    environ = {**os.environ, "TMPDIR": temp_dir}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=4 * WAIT)
    assert done.returncode == 0, done.stderr
    dropped, refused, answered, went_on = done.stdout.splitlines()
    assert dropped == "dropped 0 0"
    assert refused.startswith("this process uses Ray already")
    assert answered == "the same text: True"
    assert went_on == "after Ctrl-C: True"
    assert "Traceback" not in done.stderr
    assert list(Path(temp_dir).glob("novainfer-*")) == []
