"""What the stages of `bench.gpu` share: device, clock, time that is left, checkpoints, and the table so far."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import Any

import psutil
import torch

from bench import report
from bench.gpu_clock import Clock, Timing
from bench.make_checkpoint import SHAPES, make_checkpoint

_MEMORY_FOLDER = Path("/dev/shm")


@dataclass
class Run:
    """rows: the table so far; peak: of this device, in bytes and operations per second. Closing it removes files."""

    device: torch.device
    clock: Clock
    is_toy: bool
    shapes: tuple[str, ...]  # of the jobs' models
    stages: list[str] = field(default_factory=list)  # that were asked for
    output: str | None = None  # the file that gets all of this
    rows: list[dict[str, Any]] = field(default_factory=list)
    peak: dict[str, float] = field(default_factory=dict)
    deadline: float = float("inf")  # of time.monotonic()
    num_checked: int = 0  # tests and pairs
    _files: ExitStack = field(default_factory=ExitStack)
    _checkpoints: dict[str, str] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Until nothing new shall begin."""
        return max(self.deadline - time.monotonic(), 0.0)

    def add(self, stage: str, what: str, who: str, **figures: float) -> None:
        """One line of the table, shown at once."""
        self._add(stage, what, who, "", figures)

    def add_timing(self, stage: str, what: str, who: str, timing: Timing, **figures: float) -> None:
        """Of calls that the clock has timed, and how, if not as it should be."""
        self._add(stage, what, who, timing.how, {"us": timing.median * 1e6, **figures})

    def _add(self, stage: str, what: str, who: str, how: str, figures: Mapping[str, float]) -> None:
        figures = {name: value for name, value in figures.items() if not math.isnan(value)}  # what JSON does not have
        self.rows.append({"stage": stage, "what": what, "who": who, **({"how": how} if how else {}), **figures})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        note = f"  ({how})" if how else ""
        print(f"{time.strftime('%H:%M:%S')}  {stage:9}  {what:34}  {who:22}  {shown}{note}", flush=True)

    def save(self) -> None:
        """Write the table so far: what was measured is kept, whatever becomes of the rest."""
        result = {"kind": "gpu", "toy": self.is_toy, "stages": self.stages, "peak": self.peak, "rows": self.rows}
        report.write(result, self.output)

    def share(self, rate: float, peak: str) -> float:
        """Of what the device does at most; NaN where that was not measured."""
        return rate / self.peak[peak] if peak in self.peak else float("nan")

    def checkpoint(self, shape: str) -> str:
        """The folder of a checkpoint with random weights, drawn by the device; it is there until the run is closed."""
        if shape not in self._checkpoints:
            began = time.perf_counter()
            num_bytes = SHAPES[shape].weight_bytes()
            folder = self._files.enter_context(tempfile.TemporaryDirectory(dir=folder_for(num_bytes)))
            make_checkpoint(SHAPES[shape], Path(folder), device=self.device)
            self._checkpoints[shape] = folder
            self.add("files", shape, "checkpoint", seconds=time.perf_counter() - began, GB=num_bytes / 1e9)
        return self._checkpoints[shape]

    def close(self) -> None:
        """Remove the checkpoints."""
        self._checkpoints.clear()
        self._files.close()

    def check(
        self, stage: str, what: str, command: Sequence[str], unit: str, most_seconds: float = float("inf")
    ) -> None:
        """Run a command that says by its status whether all is well, and in its words how many it has checked of what
        `unit` names: "tests" or "pairs". Fails if all is not well, and if nothing was checked when it was stopped.
        """
        began = time.perf_counter()
        limit = min(self.seconds_left, most_seconds)
        status, output = _run(command, limit)
        print(output, end="", flush=True)
        if status:
            raise SystemExit(f"{stage}: {what} failed ({status})")
        number = _COUNTED[unit](output)
        if number == 0:
            raise SystemExit(f"{stage}: {what}: nothing was checked in {time.perf_counter() - began:.0f} s")
        self.num_checked += number
        who = "passed" if status == 0 else f"stopped after {limit:.0f} s"
        self.add(stage, what, who, seconds=time.perf_counter() - began, **{unit: number})

    def figures_of(self, command: Sequence[str], most_seconds: float) -> dict[str, Any] | str:
        """What a command prints as its last line, in JSON; else why there is nothing."""
        limit = min(self.seconds_left, most_seconds)
        status, output = _run(command, limit)
        if status is None:
            return f"left out: not done in {limit:.0f} s"
        if status:
            return f"left out: failed ({status})"
        figures: dict[str, Any] = json.loads(output.splitlines()[-1])
        return figures


def _run(command: Sequence[str], most_seconds: float) -> tuple[int | None, str]:
    """Status, and what was printed. None if it was stopped at its limit, with all processes that it had begun."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, start_new_session=True)
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            try:
                status = process.wait(None if math.isinf(most_seconds) else most_seconds)
            finally:  # also where this process is told to end: its own session would outlive it
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        file.seek(0)
        return status, file.read()


def _tests_of(output: str) -> int:
    """That passed, by pytest's last line, or by its dots if it did not come that far."""
    passed = re.findall(r"(\d+) passed", output)
    if passed:
        return int(passed[-1])
    return sum(line.count(".") for line in re.findall(r"^[.sxX]+(?= *\[|$)", output, re.MULTILINE))


def _pairs_of(output: str) -> int:
    """That the exactness matrix has compared, by its last word on it."""
    return int(([0, *re.findall(r"^(\d+) pairs", output, re.MULTILINE)])[-1])


_COUNTED: dict[str, Callable[[str], int]] = {"tests": _tests_of, "pairs": _pairs_of}


def folder_for(num_bytes: int) -> Path | None:
    """In memory, where that leaves as much again for whoever reads them; None: where temporary files lie."""
    if not _MEMORY_FOLDER.is_dir():
        return None
    room = min(disk_usage(_MEMORY_FOLDER).free, psutil.virtual_memory().available // 2)
    return _MEMORY_FOLDER if room > num_bytes else None
