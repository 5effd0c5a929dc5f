"""A server's process tree: started in a session of its own, looked at, and ended to the last process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

_TERM_TIMEOUT = 60.0  # seconds from SIGTERM to SIGKILL
_NUM_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Child:
    """A command that runs. Its standard input and output are pipes with `has_pipes`, else in the log."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    began: float  # perf_counter

    @property
    def stdin(self) -> IO[str]:
        """Only with `has_pipes`."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        """Only with `has_pipes`."""
        assert self.process.stdout is not None
        return self.process.stdout

    def is_alive(self) -> bool:
        """Whether its root process runs."""
        return self.process.poll() is None

    def last_lines(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"({self.log})", *lines[-_NUM_LAST_LINES:]])


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str | Path], *, env: dict[str, str], log: Path, has_pipes: bool = False
) -> Iterator[Child]:
    """Run a command and end its whole tree afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            env=env,
            stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_pipes else output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield Child(name, process, log, began)
    finally:
        end_tree(process.pid)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def tree(root: int) -> list[psutil.Process]:
    """The process and all below it, and those of its session whose parent has died."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        found = {one.pid: one for one in (process, *process.children(recursive=True))}
    for other in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(other.pid) == root:
                found.setdefault(other.pid, other)
    return list(found.values())


def end_tree(root: int) -> None:
    """SIGTERM to the root, which knows best how its children end; SIGKILL to what is left after a while."""
    members = tree(root)
    patience = 0.0  # for children without a root: nobody will end them
    for member in members:
        if member.pid == root:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
                patience = _TERM_TIMEOUT
    _, alive = psutil.wait_procs(members, patience)
    left = {*alive, *tree(root)}
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, _TERM_TIMEOUT)


def pss_bytes(root: int) -> int:
    """Proportional set size of the whole tree: pages that several processes share count once."""
    total = 0
    for member in tree(root):
        with contextlib.suppress(psutil.Error):
            total += member.memory_full_info().pss
    return total


def cpu_seconds(root: int) -> float:
    """CPU time that the whole tree has had, that of children it has waited for included."""
    total = 0.0
    for member in tree(root):
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
