"""Host memory that the system gives as it is written to, in huge pages where it has them.

With pages of 2 MiB in place of 4 KiB the processor looks up few addresses, and reads ahead beyond a small page's end.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape` (not empty) on the CPU that take no memory before they are touched; `torch.zeros` touches all.

    So a KV cache costs what it holds, and that of a spare rank next to nothing.
    """
    return torch.frombuffer(huge_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


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


def huge_pages(size: int) -> mmap.mmap:
    """So many bytes of zeros, in huge pages where the system has them."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
