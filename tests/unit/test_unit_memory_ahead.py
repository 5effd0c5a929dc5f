"""Memory that is asked for while a server starts: how much, and that nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from novainfer.config import MIB, CacheConfig, ParallelConfig, ServeConfig
from novainfer.entrypoints import memory_ahead
from novainfer.entrypoints.memory_ahead import MemoryAhead, expected_bytes, free_bytes

pytestmark = [pytest.mark.unit, pytest.mark.stage0]

WEIGHTS = 300 * MIB
ON_CPU = ServeConfig(parallel=ParallelConfig(device="cpu"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with that much of weights, none of it on the disk."""
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(WEIGHTS)
    return tmp_path


def test_weights_and_cache_when_their_size_is_known_then_both_are_expected(model: Path) -> None:
    sized = replace(ON_CPU, cache=CacheConfig(kv_cache_memory_mib=1000))
    assert expected_bytes(model, sized) == WEIGHTS + 1000 * MIB
    assert WEIGHTS < expected_bytes(model, ON_CPU) < WEIGHTS + 1000 * MIB


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(device="cuda"),
        ParallelConfig(device="cpu", ray_address="auto"),
        ParallelConfig(device="cpu", cluster_host="127.0.0.1"),
        ParallelConfig(device="cpu", executor="null"),
    ],
)
def test_ranks_elsewhere_when_they_start_then_nothing_is_expected_here(model: Path, parallel: ParallelConfig) -> None:
    assert expected_bytes(model, ServeConfig(parallel=parallel)) == 0


def test_a_small_model_when_it_starts_then_no_process_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"few")
    assert expected_bytes(tmp_path, ON_CPU) == 0
    with MemoryAhead(tmp_path, ON_CPU):
        assert not of_ours()


def test_the_process_when_it_is_ended_then_it_is_gone_with_its_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_ahead, "free_bytes", lambda: 64 << 30)
    with MemoryAhead(model, ON_CPU) as memory:
        (process,) = of_ours()
        memory.end()
        assert not process.is_running()
    assert not of_ours()


def test_memory_that_is_given_at_once_when_touched_then_the_process_ends_by_itself() -> None:
    quick = f"import {memory_ahead.__name__} as m; m._SLOW_SECONDS = 60; m.touch({64 * MIB})"
    assert subprocess.run([sys.executable, "-c", quick], timeout=60, check=False).returncode == 0


def test_free_memory_when_asked_for_then_less_than_all() -> None:
    assert 0 < free_bytes() <= psutil.virtual_memory().total


def of_ours() -> list[psutil.Process]:
    """Such processes that this one has started."""
    return [child for child in psutil.Process().children() if memory_ahead.__file__ in child.cmdline()]
