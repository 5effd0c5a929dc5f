"""Memory that the system gives slowly is asked for while a server's processes start, and cores have little to do.

In a virtual machine whose host gives memory when it is first touched, a GiB can cost seconds, once: what a process has
given back costs next to nothing. So a process of lowest priority touches about as much as weights and KV cache will
take, and ends when the ranks begin to load. Where memory is given at once, it finds that out and ends at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process runs this file by itself, with nothing but the standard library
    from novainfer.config import ServeConfig

_PIECE_BYTES = 2 << 20
_LEAST_BYTES = 256 << 20  # of a model, for which it is worth a process
_CACHE_BYTES = 128 << 20  # of a KV cache whose size nobody gave: what is taken before it is used
_LEFT_FREE = 1 << 30  # for others
_NUM_TRIED = 8  # pieces, after which it is known how slowly memory is given
_SLOW_SECONDS = 0.0008  # for a piece: more than clearing it takes
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MEMORY_FILE = Path("/proc/meminfo")


class MemoryAhead:
    """The process, from the start of a server until `end`. Nothing depends on it: where it cannot run, it does not."""

    def __init__(self, model_folder: Path, config: ServeConfig) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        num_bytes = min(expected_bytes(model_folder, config), free_bytes() - _LEFT_FREE)
        if num_bytes >= _LEAST_BYTES:
            command = (sys.executable, "-S", "-E", __file__, str(num_bytes))
            with suppress(OSError):
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def __enter__(self) -> MemoryAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """What was touched is free (idempotent)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def expected_bytes(model_folder: Path, config: ServeConfig) -> int:
    """What the ranks of this host will take, about; 0 if that is not known, or is not the host's own memory."""
    parallel = config.parallel
    is_ours = parallel.executor == "model" and parallel.ray_address is None and parallel.cluster_host is None
    if not is_ours or parallel.device == "cuda" or (parallel.device == "auto" and Path("/dev/nvidia0").exists()):
        return 0
    weights = sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
    cache_mib = config.cache.kv_cache_memory_mib
    return weights + (_CACHE_BYTES if cache_mib is None else cache_mib << 20) if weights >= _LEAST_BYTES else 0


def free_bytes() -> int:
    """That nobody uses, not even as a cache, under the container's limit where there is one; 0 if it is not known."""
    try:
        lines = _MEMORY_FILE.read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))
    except (OSError, StopIteration):
        return 0
    with suppress(OSError, ValueError):  # no control group, or no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def touch(num_bytes: int) -> None:
    """Touch so much memory, unless it is given at once. Raises `OSError` where the system knows no huge pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_MADV_HUGEPAGE)  # as weights and caches are, so that they find such pages
    began = time.perf_counter()
    for number, start in enumerate(range(0, num_bytes - _PIECE_BYTES + 1, _PIECE_BYTES), 1):
        memory.madvise(_MADV_POPULATE_WRITE, start, _PIECE_BYTES)
        if number == _NUM_TRIED and time.perf_counter() - began < _NUM_TRIED * _SLOW_SECONDS:
            return
    signal.pause()  # the memory is ours until the process is ended


def main() -> None:
    """The process."""
    os.nice(19)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it shall not outlive the server
    with suppress(OSError, ValueError):
        touch(int(sys.argv[1]))


if __name__ == "__main__":
    main()
