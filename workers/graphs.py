"""Steps that are recorded as CUDA graphs: what makes them, and which of them there are.

Recording takes a moment, so a server starts without graphs: one is recorded when nothing runs, of each kind the largest
first, whose memory the others share, or once it would have been used often. With several ranks only the latter, since
all ranks have to do the same in the same step.
"""

from __future__ import annotations

import bisect
import gc
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kernels.backend import KernelBackend
from workers.kv_cache import KVCache
from workers.models.base import CausalLM
from workers.request_states import RequestStates
from workers.tensor_parallel import TensorParallel

Call = Callable[[], None]
Record = Callable[[Call], Call]  # what it is given has been called once; what it returns does the same again
G = TypeVar("G")

# Of one layer's kernels and copies in one graph. An estimate: about ten nodes with their arguments.
_DRIVER_BYTES = 64 << 10
_NO_MEMORY = re.compile(r"out of memory|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED")
_MODE = "thread_local"
_OFTEN = 32  # steps that a graph would have served: then it is recorded even while requests wait
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """What a step works with."""

    model: CausalLM
    kernels: KernelBackend
    tp: TensorParallel
    states: RequestStates
    cache: KVCache


class GraphSet(Generic[G]):
    """Graphs of one kind, by their size."""

    def __init__(self, what: str, sizes: Sequence[int], make: Callable[[int], G], tp: TensorParallel) -> None:
        """what: of how many they are, in words; sizes: ascending; make: records the one of a size."""
        self.sizes = sizes
        self._what, self._make, self._tp = what, make, tp
        self._graphs: dict[int, G] = {}
        self._missed: Counter[int] = Counter()
        self._is_full = False

    def find(self, number: int, most: int | None = None) -> G | None:
        """The smallest for so many, or more, at most `most`; None: there is none, or none yet.

        One that was missed often is recorded now.
        """
        place = bisect.bisect_left(self.sizes, number)
        if place == len(self.sizes):
            return None
        wanted = self.sizes[place]
        if wanted not in self._graphs:
            self._missed[wanted] += 1
            if self._missed[wanted] >= _OFTEN and not self._is_full:
                self._add(wanted)
        found = min((size for size in self._graphs if size >= number), default=None)
        return None if found is None or (most is not None and found > most) else self._graphs[found]

    def record_next(self) -> bool:
        """Record one that is missing; False if there is none, or if it has to wait for its turn."""
        missing = [size for size in self.sizes if size not in self._graphs]
        if not missing or self._is_full or self._tp.world_size > 1:
            return False
        self._add(missing[-1])
        return True

    def _add(self, size: int) -> None:
        """Without memory for it there will be no more graphs. With several ranks that raises: the others have it."""
        try:
            self._graphs[size] = self._make(size)
        except RuntimeError as error:
            if self._tp.world_size > 1 or not is_out_of_memory(error):
                raise
            self._is_full = True
            _log.warning(
                "no memory for CUDA graphs of %s beyond %s: %s", self._what, sorted(self._graphs) or "none", error
            )
            return
        _log.info("steps of up to %d %s are a CUDA graph now", size, self._what)


def driver_bytes(num_graphs: int, num_layers: int) -> int:
    """About what the driver keeps of so many graphs, beside the memory that they share."""
    return num_graphs * num_layers * _DRIVER_BYTES


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that was the reason, or the reason of what came after it.

    torch's allocator raises `OutOfMemoryError`. Where the driver finds none, for a graph's nodes or a kernel's code, it
    is another `RuntimeError`, `AcceleratorError` in newer versions, and a capture that is left early adds its own.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def cuda_recorder(device: torch.device) -> Record:
    """Records CUDA graphs, which share their memory: no two of them run at the same time."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(call: Call) -> Call:
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            call()  # compiles, and allocates what libraries keep
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with _nothing_collected(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_MODE):
                call()
        except BaseException:
            torch.cuda.set_stream(before)  # a capture that fails at its end stays on its own
            raise
        return graph.replay

    return record


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """An older engine's graph that was collected in the middle of a capture would end it: its memory is given back."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
