"""A short directory beside a long one: who may remove it, and what is never removed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from novainfer.config import ParallelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints.serve import LOCK, TEMPORARY, run_directory
from novainfer.transport.replicas import RAY_DIR, REPLICA_DIR
from novainfer.transport.short_dir import PREFIX, make_short_dir, remove_short_dir

pytestmark = pytest.mark.unit

LONGEST = 40


def put_short_dir(directory: Path) -> Path:
    """One with a file in it, as a process that was killed leaves it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    short = make_short_dir(directory / RAY_DIR, LONGEST)
    (short / "session").mkdir()
    (short / "session" / "log").touch()
    return short


def test_a_short_directory_when_made_then_it_is_private_and_short_and_the_one_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 10)))
    old = put_short_dir(tmp_path)
    new = put_short_dir(tmp_path)
    assert not old.exists()
    assert len(os.fsencode(new)) <= LONGEST
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    remove_short_dir(tmp_path / RAY_DIR)
    assert not new.exists()
    assert not (tmp_path / RAY_DIR).is_symlink()
    remove_short_dir(tmp_path / RAY_DIR)


@pytest.mark.parametrize(("name", "mode"), [("mine", 0o700), (f"{PREFIX}open", 0o755)])
def test_a_link_to_what_is_not_ours_when_removed_then_what_it_names_stays_and_so_does_another_ones_link(
    tmp_path: Path, name: str, mode: int
) -> None:
    target = tmp_path / name
    target.mkdir(mode=mode)
    (target / "file").touch()
    link = tmp_path / RAY_DIR
    link.symlink_to(target)
    remove_short_dir(link)
    assert (target / "file").exists()
    assert link.is_symlink() == (name == "mine")


def test_a_directory_where_the_link_would_be_when_removed_then_it_stays(tmp_path: Path) -> None:
    (tmp_path / RAY_DIR).mkdir()
    remove_short_dir(tmp_path / RAY_DIR)
    assert (tmp_path / RAY_DIR).is_dir()


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("place", [".", f"{REPLICA_DIR}1"])
def test_short_directories_of_a_server_that_was_killed_when_the_next_one_starts_then_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, *, is_given: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_dir = tmp_path / "novainfer-killed"
    run_dir.mkdir(mode=0o700)
    short = put_short_dir(run_dir / place)
    (run_dir / LOCK).write_bytes(TEMPORARY)
    other = tmp_path / "other"  # not ours, whatever leads there
    (other / RAY_DIR).mkdir(parents=True)
    (run_dir / f"{REPLICA_DIR}9").symlink_to(other)
    given = str(run_dir) if is_given else None
    config = ServeConfig(server=ServerConfig(run_dir=given), parallel=ParallelConfig(replicas=2))
    with run_directory(config) as mine:
        assert not short.exists()
        during = put_short_dir(mine.path / place)
    assert not during.exists()
    assert (other / RAY_DIR).is_dir()
