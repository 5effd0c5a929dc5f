"""What the stages of `bench.gpu` share: device, clock, time that is left, checkpoints, and the table so far."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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

    def check(self, stage: str, what: str, command: Sequence[str], most_seconds: float = float("inf")) -> None:
        """Run a command that says by its status whether all is well. Fails if it is not."""
        began = time.perf_counter()
        try:
            done = subprocess.run(command, check=False, timeout=min(self.seconds_left, most_seconds))
        except subprocess.TimeoutExpired:
            self.add(stage, what, "left out: the time is up")
            return
        if done.returncode:
            raise SystemExit(f"{stage}: {what} failed ({done.returncode})")
        self.add(stage, what, "passed", seconds=time.perf_counter() - began)

    def figures_of(self, command: Sequence[str], most_seconds: float) -> dict[str, Any] | str:
        """What a command prints as its last line, in JSON; else why there is nothing."""
        limit = min(self.seconds_left, most_seconds)
        try:
            done = subprocess.run(command, check=False, timeout=limit, stdout=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return f"left out: not done in {limit:.0f} s"
        if done.returncode:
            return f"left out: failed ({done.returncode})"
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures


def folder_for(num_bytes: int) -> Path | None:
    """In memory, where that leaves as much again for whoever reads them; None: where temporary files lie."""
    if not _MEMORY_FOLDER.is_dir():
        return None
    room = min(disk_usage(_MEMORY_FOLDER).free, psutil.virtual_memory().available // 2)
    return _MEMORY_FOLDER if room > num_bytes else None
