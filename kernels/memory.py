"""Host memory that the system gives page by page, as it is written to."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape` (not empty) on the CPU that take no memory before they are touched; `torch.zeros` touches all.

    So a KV cache costs what it holds, and that of a spare rank next to nothing.
    """
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
