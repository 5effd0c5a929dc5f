"""Where packed weights lie, and how they come there: packed now, or as an earlier process has left them."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.memory import huge_pages

_CHUNK_BYTES = 64 << 20
ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor that is made when it is needed: who has what was once made of it goes without.

    Some columns of a weight [N, K] may come with its outputs' peaks, [N] float32: each one's largest finite magnitude,
    those columns counted that lie elsewhere.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    make_peaks: Callable[[], Tensor] | None = None


def made(tensor: Tensor | Deferred) -> Tensor:
    """The tensor itself."""
    return tensor.make() if isinstance(tensor, Deferred) else tensor


def peaks_of(weight: Tensor | Deferred) -> Tensor | None:
    """[N] float32 of a weight [N, K] that comes with peaks; None: there are no columns elsewhere."""
    return weight.make_peaks() if isinstance(weight, Deferred) and weight.make_peaks is not None else None


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kept tensor must be: another one in its place is never taken for it."""

    shape: tuple[int, ...] | None  # None: bytes, as many as there are
    dtype: torch.dtype
    content: str = ""  # where the shape does not tell


class KeptWeights(Protocol):
    """Tensors in the order in which they are asked for, which is the same in every process."""

    def next(self, kind: Kind) -> Tensor | None:
        """The next one, never to be written to; None if it is not kept."""

    def add(self, kind: Kind, tensor: Tensor) -> None:
        """What `next` did not have; from now on it stays as it is."""


class WeightMemory:
    """Memory for packed weights, one behind the other, so that few huge pages are filled in part only.

    A chunk goes back to the system with the last tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._used = 0
        self._kept: KeptWeights | None = None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros of `shape` (not empty)."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            chunk = self._chunk() if self._chunk is not None else None
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if chunk is None or start + size > len(chunk):
                chunk, start = huge_pages(max(size, _CHUNK_BYTES)), 0
                self._chunk = weakref.ref(chunk)
            self._used = start + size
        count = math.prod(shape)
        return torch.frombuffer(chunk, dtype=dtype, offset=start, count=count).view(shape)

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
        """What `fill` makes of `zeros`, now, or earlier where it was kept."""

        def make() -> Tensor:
            tensor = self.zeros(shape, dtype)
            fill(tensor)
            return tensor

        return self._kept_or(Kind(shape, dtype), make)

    def bytes_of(self, content: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of `zeros` [any number] of bytes, now, or earlier where it was kept as the same content."""
        return self._kept_or(Kind(None, torch.uint8, content), make)

    def _kept_or(self, kind: Kind, make: Callable[[], Tensor]) -> Tensor:
        if self._kept is not None and (kept := self._kept.next(kind)) is not None:
            return kept
        tensor = make()
        if self._kept is not None:
            self._kept.add(kind, tensor)
        return tensor

    @contextmanager
    def keeping(self, kept: KeptWeights | None) -> Iterator[None]:
        """Inside, `filled` and `bytes_of` take from there what is there, and add the rest. One thread at a time."""
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before
