"""Which of a tensor's pages have memory: of the whole process's, others come and go."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor


def resident_bytes(tensor: Tensor) -> int:
    """Of the pages that a tensor on a CPU lies in, its first and last one whole. Linux."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
