"""Times calls on a GPU: inside CUDA graphs, over as many copies as it is given, in turns; on a CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]

OURS = "novainfer"  # what the names of our own calls begin with
EAGER = "eager: launches are part of it"
_ROUNDS = 3
_REPEATS = 20  # of a call, in one graph
_COLD_BYTES = 256 * 2**20  # read before each round: more than any L2 cache holds


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median of the rounds, and the fastest and slowest."""

    median: float
    fastest: float
    slowest: float
    how: str = ""  # `EAGER` where the calls could not be captured as a graph


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What runs the calls of a name, how many those are, and how, as in `Timing`."""

    run: Call
    number: int
    how: str = ""


class Clock:
    """On one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_toy = device.type != "cuda"
        self._cold = torch.zeros(1 if self.is_toy else _COLD_BYTES // 4, dtype=torch.int32, device=device)

    def compare(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, Timing]:
        """Each name's calls (over different memory, so that none finds its own in the cache) one after another, the
        names in turns, for some rounds. Seconds of a single call. What is not ours and fails is not in the result.
        """
        runs: dict[str, _Prepared] = {}
        for name, variants in calls.items():
            try:
                runs[name] = self._prepare(list(variants))
            except Exception as error:  # no kernel, too little memory: it is missing in the table, if it is not ours
                if name.startswith(OURS):
                    raise
                print(f"{name} is left out: {type(error).__name__}: {error}")
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(1 if self.is_toy else _ROUNDS):
            for name, prepared in runs.items():
                found[name].append(self._seconds(prepared.run) / prepared.number)
        return {
            name: Timing(statistics.median(times), min(times), max(times), runs[name].how)
            for name, times in found.items()
        }

    def seconds(self, call: Call) -> float:
        """Of one call that waits for the device itself, or for which the host's time counts."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until the device has done everything."""
        if not self.is_toy:
            torch.cuda.synchronize(self._device)

    def _prepare(self, variants: list[Call]) -> _Prepared:
        if self.is_toy:
            variants[0]()
            return _Prepared(variants[0], 1)
        for call in variants:  # compiles, and takes its memory
            call()
        self.wait()
        chosen = [variants[i % len(variants)] for i in range(max(_REPEATS, len(variants)))]
        try:
            return _Prepared(self._capture(chosen), len(chosen))
        except RuntimeError as error:  # some calls cannot be captured
            print(f"timed without a graph: {type(error).__name__}: {error}")
            self.wait()
            return _Prepared(lambda: [call() for call in chosen], len(chosen), EAGER)

    def _capture(self, calls: list[Call]) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _seconds(self, run: Call) -> float:
        if self.is_toy:
            return self.seconds(run)
        self._cold.add_(1)
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        self.wait()
        return float(start.elapsed_time(end)) / 1000
