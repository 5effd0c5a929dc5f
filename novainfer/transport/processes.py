"""What becomes of processes that are not our children. One that is gone is an answer here, never an error."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal holds it (SIGSTOP)."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def is_pid_stopped(pid: int) -> bool:
    """`is_stopped`, of the process with this number; False where that cannot be known."""
    try:
        return is_stopped(psutil.Process(pid))
    except (psutil.Error, OSError):
        return False


def cpu_seconds(pid: int) -> float | None:
    """CPU time that the process has had; None where that cannot be known."""
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)


def children_named(names: Collection[str]) -> list[psutil.Process]:
    """Those children of this process that run and have such a name."""
    return [child for child in psutil.Process().children() if runs(child) and _name(child) in names]


def below(process: psutil.Process) -> list[psutil.Process]:
    """Its children, and theirs, and so on."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    """SIGKILL; psutil makes sure that it is not another one that got the same number."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
