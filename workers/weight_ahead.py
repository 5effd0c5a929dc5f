"""Packed weights on their way from the disk before anybody maps them: while those who will still import torch.

Loads no torch itself. The name of a file begins with what is known without it: so it is found, if only almost for
certain. One that is of no use after all costs nothing but its reading.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kernels.native.build import cache_dir
from novainfer.config import ModelConfig, ServeConfig

SUFFIX = ".weights"
KEY_BYTES = 16
_CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.py")  # the last with --trust-remote-code
_PIECE_BYTES = 64 << 20  # read at a time: whole huge pages
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python has no name for it


def weight_folder() -> Path:
    """Where all files of packed weights lie."""
    return cache_dir() / "weights"


def weight_label(folder: Path, config: ModelConfig, rank: int, world_size: int) -> str:
    """The first part of a file's name: which part of which checkpoint, of which type."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    options = f"{config.dtype} {config.quantization} {config.model_backend}"
    for part in (options, f"{rank} of {world_size}", *_identities(folder)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _identities(folder: Path) -> Iterator[str]:
    """Of the checkpoint's files: who writes to one, or puts another in its place, changes its times or its number."""
    for path in sorted(path for pattern in _CHECKPOINT_FILES for path in folder.glob(pattern)):
        stat = os.stat(path)
        yield f"{path.name} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def read_ahead(folder: Path, config: ServeConfig, ranks: Iterable[int]) -> threading.Thread | None:
    """Begin to read what these ranks mapped, or wrote, last; None if there is nothing.

    folder: of the checkpoint.
    """
    if config.parallel.executor != "model" or config.parallel.device == "cuda" or not config.model.weight_cache_gib:
        return None
    world_size = config.parallel.tensor_parallel_size
    with suppress(OSError, RuntimeError):  # the latter: there can be no more threads
        labels = [weight_label(folder, config.model, rank, world_size) for rank in ranks]
        paths = [path for label in labels if (path := _last_used(label)) is not None]
        if paths:
            thread = threading.Thread(target=_read_all, args=(paths,), daemon=True, name="read ahead")
            thread.start()
            return thread
    return None


def _last_used(label: str) -> Path | None:
    return max(weight_folder().glob(f"{label}-*{SUFFIX}"), key=lambda path: path.stat().st_mtime, default=None)


def _read_all(paths: list[Path]) -> None:
    with suppress(OSError, ValueError):  # the latter: it is shorter than it was a moment ago
        for path in paths:
            _read(path)


def _read(path: Path) -> None:
    """Into the system's pages, huge ones as whoever maps the file will ask for. Raises OSError.

    `posix_fadvise` would have it read in pages of 4 KiB, which the processor reads slower for as long as they stay.
    By ctypes, since Python's own call has all other threads wait.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if sys.platform != "linux" or madvise is None:
        return
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            # Never written to: but only of memory that may be does ctypes tell the address.
            piece = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
            with suppress(OSError):  # no huge pages here
                piece.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            if madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _POPULATE_READ):
                return  # an older system, or the file is gone or cannot be read: its reader will see
