"""Host memory that the system gives as it is written to, in huge pages where it has them.

With pages of 2 MiB in place of 4 KiB the processor looks up few addresses, and reads ahead beyond a small page's end.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape` (not empty) on the CPU that take no memory before they are touched; `torch.zeros` touches all.

    So a KV cache costs what it holds, and that of a spare rank next to nothing.
    """
    return torch.frombuffer(_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def commit(tensor: Tensor, start: int, stop: int) -> bool:
    """Have the system give the memory of bytes [start, stop) of `lazy_zeros` now; False where it cannot.

    A system that must first get the memory from elsewhere (a virtual machine's host, say) takes its time for it.
    """
    at = tensor.data_ptr() + start
    at -= at % mmap.PAGESIZE
    # Older systems do not know how, or no memory is left: what is written to will tell.
    return _madvise()(at, tensor.data_ptr() + stop - at, _MADV_POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


class WeightMemory:
    """Where packed weights lie one behind the other, so that few huge pages are filled in part only.

    A chunk goes back to the system with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros of `shape` (not empty)."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            chunk = self._chunk() if self._chunk is not None else None
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if chunk is None or start + size > len(chunk):
                chunk, start = _pages(max(size, _CHUNK_BYTES)), 0
                self._chunk = weakref.ref(chunk)
            self._used = start + size
        count = math.prod(shape)
        return torch.frombuffer(chunk, dtype=dtype, offset=start, count=count).view(shape)


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
