"""What the processes of a server take, over hours, and whether it grows.

Memory is measured at any time; what should not grow at all, when nothing runs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.slopes import Sample, Slope, after_warm_up, theil_sen
from tests.servers import RunningServer

WARM_UP = 0.2  # share of each process's life that does not count, ...
WARM_UP_HOURS = 7 / 60  # ... and at least so much of it: that long KV cache and allocators fill
# Most growth in an hour, of memory as a share of it; and what growth over the whole run is too little to tell.
BOUNDS = {"memory": 0.01, "files": 0.0, "threads": 0.0, "children": 0.0, "series": 0.0}
RAYS_SERVERS = ("raylet", "gcs_server")  # they keep records of what has died; not ours to mend
RAYS_BOUND = 0.25
NOISE = {"memory": 2.0 * 2**20, "files": 1.0, "threads": 1.0, "children": 1.0, "series": 1.0}


@dataclass(frozen=True)
class Measured:
    """One process at one time. `at`: hours since the beginning. Files, threads, children when nothing runs, else -1."""

    name: str
    pid: int
    at: float
    memory: int  # bytes, see `memory_of`
    files: int = -1
    threads: int = -1
    children: int = -1


def memory_of(pid: int) -> int:
    """Bytes that a process has filled itself, and its part of shared memory.

    Pages of files are left out, also those that it shares with nobody: whether somebody else has mapped the same
    libraries is not its matter, and would look like growth. Raises `FileNotFoundError` or `ProcessLookupError`.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * (kilobytes["Anonymous"] + kilobytes["Swap"] + kilobytes.get("Pss_Shmem", 0))


class Scales:
    """Measures all processes of a server."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._began = time.monotonic()
        self.measured: list[Measured] = []
        self._gateway: psutil.Process | None = None
        self.series: list[list[Sample]] = []  # (hours, lines of /metrics), of one gateway after the other

    @property
    def hours(self) -> float:
        """Since the beginning."""
        return (time.monotonic() - self._began) / 3600

    def weigh(self, *, is_quiet: bool) -> None:
        """Now. What dies meanwhile is left out."""
        processes = self._server.processes()
        for process in self._server.tree():
            try:
                if process.name() in RAYS_SERVERS:
                    processes[process.name()] = process
            except psutil.NoSuchProcess:
                continue
        for name, process in processes.items():
            try:
                memory = memory_of(process.pid)
                rest = (process.num_fds(), process.num_threads(), len(process.children())) if is_quiet else ()
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            self.measured.append(Measured(name, process.pid, self.hours, memory, *rest))
        if is_quiet:
            self._count_series(processes.get("gateway 0"))

    def _count_series(self, gateway: psutil.Process | None) -> None:
        if gateway != self._gateway:
            self._gateway = gateway
            self.series.append([])
        with self._server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        self.series[-1].append((self.hours, float(sum(not line.startswith("#") for line in lines))))


@dataclass(frozen=True)
class Growth:
    """How something grows in an hour, and whether that is too much."""

    process: str
    what: str
    typical: float
    slope: Slope
    is_too_much: bool


def judge(name: str, what: str, typical: float, slope: Slope, hours: float) -> bool:
    """Whether it surely grows more than it may, by an amount that means anything."""
    bound = BOUNDS[what]
    if what == "memory":
        bound = typical * (RAYS_BOUND if name in RAYS_SERVERS else bound)
    return slope.low > bound and (slope.low - bound) * hours > NOISE[what]


def growths(scales: Scales) -> list[Growth]:
    """Of every process and figure."""
    runs: dict[tuple[str, str], dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for one in scales.measured:
        for what in ("memory", "files", "threads", "children"):
            value = getattr(one, what)
            if value >= 0:
                runs[one.name, what][one.pid].append((one.at, float(value)))
    for number, run in enumerate(scales.series):
        runs["gateway 0", "series"][number] = run
    found = []
    for (name, what), by_process in sorted(runs.items()):
        kept = [after_warm_up(run, WARM_UP, WARM_UP_HOURS) for run in by_process.values()]
        slope = theil_sen(kept)
        if slope is not None:
            values = sorted(value for run in kept for _, value in run)
            typical = values[len(values) // 2]
            found.append(Growth(name, what, typical, slope, judge(name, what, typical, slope, scales.hours)))
    return found
