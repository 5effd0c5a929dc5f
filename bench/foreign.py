"""What else the machine did while something was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from bench.peers.processes import cpu_seconds


@dataclass(frozen=True, slots=True)
class Foreign:
    """Cores' worth of CPU time, on average."""

    cores: float  # used by processes that are neither the server's nor ours
    stolen_cores: float  # that the hypervisor gave to others


class ForeignCpu:
    """Looks from its making until `end` at the CPU time of everything but a server's process tree and this process."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._before = _look(root)

    def end(self) -> Foreign:
        """What it was."""
        before, after = self._before, _look(self._root)
        seconds = max(after.at - before.at, 1e-9)
        foreign = (after.busy - before.busy) - (after.known - before.known)
        return Foreign(max(foreign, 0.0) / seconds, (after.stolen - before.stolen) / seconds)


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    busy: float  # CPU seconds of the whole machine
    stolen: float
    known: float  # of the server and of us


def _look(root: int) -> _Look:
    own = psutil.Process().cpu_times()
    known = cpu_seconds(root) + own.user + own.system
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return _Look(time.perf_counter(), busy, times.steal, known)
