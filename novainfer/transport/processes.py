"""What becomes of processes that are not our children. One that is gone is an answer here, never an error."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

import psutil

RAY_SERVERS = ("raylet", "gcs_server")  # names of Ray's processes that we start


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


class StoppedProcesses:
    """Which of some processes have been stopped for a while, for one who looks again and again."""

    def __init__(self, patience: float) -> None:
        """patience: seconds. Who goes on meanwhile has all of them anew."""
        self._patience = patience
        self._since: dict[psutil.Process, float] = {}

    def look(self, processes: Iterable[psutil.Process], now: float) -> list[psutil.Process]:
        """Those of these that have been for too long."""
        self._since = {process: self._since.get(process, now) for process in processes if is_stopped(process)}
        return [process for process, since in self._since.items() if now - since > self._patience]


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


def children_named(names: Collection[str], *, with_ended: bool = False) -> list[psutil.Process]:
    """Those children of this process that run and have such a name.

    with_ended: and those that have ended, as long as nobody has waited for them.
    """
    children = psutil.Process().children()
    return [child for child in children if (with_ended or runs(child)) and _name(child) in names]


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
