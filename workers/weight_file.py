"""Packed weights that outlive the process that packed them, in a file that the next one maps.

It costs a start nothing but the look at it: no packing, and no memory that was not there, since its pages stay with the
system. Processes on one host share them. The key of a file says all that its bytes depend on, our own code included;
its checksum is compared before anything is computed with it. It is written while the process idles, or beside its steps
where it never does, and what went wrong with it costs nothing but the next start's time.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import math
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
import torch
from torch import Tensor

from kernels.weights import ALIGNMENT, Kind
from novainfer.errors import EngineError
from workers.weight_ahead import SUFFIX

_log = logging.getLogger(__name__)

_MAGIC = b"novapack"
_LENGTH_BYTES = 8
_PIECE_BYTES = 8 << 20  # written at a time: whole huge pages, so that they are mapped as such
_LEAST_BYTES = 64 << 20  # what is smaller is packed sooner than looked for
_BUSY_SECONDS = 30.0  # so long a process that never idles puts off its file
_SHARE_OF_TIME = 200  # of which writing beside steps may then take one part
_MOST_OF_FREE = 4  # a file may take one part in so many of what is free on its disk
_UNFINISHED = ".part"


class WeightFile:
    """One model's, in one layout; see `kernels.weights.KeptWeights`. Used by one thread."""

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        """limit: bytes that all files of the folder may take together."""
        self._path = folder / f"{key}{SUFFIX}"
        self._limit = limit
        self._added: list[tuple[Kind, Tensor]] = []
        self._num_taken = 0
        self._found = _Mapped.open(self._path)
        self._writer: _Writer | None = None

    @property
    def mapped_bytes(self) -> int:
        """Of memory that the system counts as free, and which is not: the file's."""
        return 0 if self._found is None else self._found.size

    def next(self, kind: Kind) -> Tensor | None:
        """As `KeptWeights`. Raises `EngineError` if another one was kept: the key does not say all that it should."""
        if self._found is None:
            return None
        number = self._num_taken
        tensor = self._found.tensor(number, kind)
        if tensor is None:
            self._path.unlink(missing_ok=True)
            raise EngineError(f"packed weights in '{self._path}' have no tensor {number} that is {kind}")
        self._num_taken += 1
        return tensor

    def add(self, kind: Kind, tensor: Tensor) -> None:
        """As `KeptWeights`."""
        self._added.append((kind, tensor))

    def write_next(self) -> bool:
        """A piece of the file, if there was none, in some hundredths of a second. False: there is nothing to do."""
        if self._writer is None:
            tensors, self._added = self._added, []
            if not tensors or self._found is not None:
                return False
            self._writer = _Writer.begin(self._path, tensors, self._limit)
        if self._writer is None:
            return False
        try:
            if self._writer.write_next():
                return True
        except OSError as error:
            _log.warning("packed weights are not kept: %s", error)
            self._writer.drop()
        self._writer = None
        return False


class BesideSteps:
    """Has a file written where steps follow each other without a pause, so rarely that they do not show it."""

    def __init__(
        self, write_next: Callable[[], bool], num_ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """write_next: as `WeightFile.write_next`.

        num_ranks: who wait for each other, and so for each one's writing. clock: seconds.
        """
        self._write_next = write_next
        self._pause = _SHARE_OF_TIME * num_ranks  # times what the last piece took
        self._clock = clock
        self._due = clock() + _BUSY_SECONDS

    def turn(self) -> None:
        """Between two steps, whenever there is a moment: a piece, if it is time for one."""
        began = self._clock()
        if began < self._due:
            return
        is_going_on = self._write_next()
        ended = self._clock()
        self._due = ended + (ended - began) * self._pause if is_going_on else math.inf


class _Mapped:
    """A finished file in memory."""

    def __init__(self, pages: mmap.mmap, entries: list[list[object]]) -> None:
        self._pages = pages
        self._entries = entries
        self.size = len(pages)

    @classmethod
    def open(cls, path: Path) -> _Mapped | None:
        """None if there is no such file, or something else in its place, which is removed."""
        try:
            with open(path, "rb") as file:
                entries, checksum, data_bytes = _read_index(file)
                pages = mmap.mmap(file.fileno(), data_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):
                    pages.madvise(mmap.MADV_HUGEPAGE)  # also: how much is read from the disk at once
            mapped = cls(pages, entries)
            if _sum_of(mapped._bytes(0, data_bytes)) != checksum:
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("packed weights in '%s' are of no use (%s): packing anew", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # another user's, or on a disk that is only read
            os.utime(path)  # who was used last goes last
        return mapped

    def tensor(self, number: int, kind: Kind) -> Tensor | None:
        """The tensor of that number; None if it is another one."""
        if number >= len(self._entries) or self._entries[number][0] != str(kind):
            return None
        _, shape, start = self._entries[number]
        assert isinstance(shape, list)
        assert isinstance(start, int)
        return self._bytes(start, math.prod(shape) * kind.dtype.itemsize).view(kind.dtype).view(shape)

    def _bytes(self, start: int, size: int) -> Tensor:
        # By address: torch warns of every buffer that is not to be written to.
        address = np.frombuffer(self._pages, np.uint8).ctypes.data
        view = (ctypes.c_char * size).from_address(address + start)
        view.owner = self._pages  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)


class _Writer:
    """Writes beside the final name, and takes that when all is on the disk."""

    def __init__(self, path: Path, file: BinaryIO, tensors: Sequence[tuple[Kind, Tensor]]) -> None:
        self._path = path
        self._file = file
        self._entries: list[list[object]] = []
        self._pieces = _pieces(tensors, self._entries)
        self._checksum = torch.zeros((), dtype=torch.int64)
        self._data_bytes = 0

    @classmethod
    def begin(cls, path: Path, tensors: Sequence[tuple[Kind, Tensor]], limit: int) -> _Writer | None:
        """None where there is too little to write, no room for it, or somebody else who does."""
        size = sum(tensor.nbytes for _, tensor in tensors)
        if size < _LEAST_BYTES or path.exists():  # another replica has been at it
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_dead(path.parent)
            file = open(path.with_suffix(_UNFINISHED), "ab")  # noqa: SIM115 (open until all is written)
            if not _lock(file) or not _is_at(file):
                file.close()
                return None
            try:
                file.truncate(0)
                has_room = not path.exists() and _make_room(path.parent, size, limit)
            except OSError:
                _drop(file)
                raise
            if has_room:
                return cls(path, file, tensors)
            _drop(file)
        except OSError as error:
            _log.warning("packed weights are not kept: %s", error)
        return None

    def write_next(self) -> bool:
        """The next piece; False: that was the last one, and a thread waits for the disk. Raises OSError."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._file.write(piece.numpy().data)
            self._checksum += _sum_of(piece)
            self._data_bytes += piece.nbytes
            return True
        index = {"tensors": self._entries, "checksum": int(self._checksum), "data_bytes": self._data_bytes}
        text = json.dumps(index).encode()
        self._file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little") + _MAGIC)
        threading.Thread(target=self._finish, daemon=True, name="packed weights").start()
        return False

    def drop(self) -> None:
        """Give it up."""
        _drop(self._file)

    def _finish(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._file.name, self._path)
            self._file.close()
            _log.info("packed weights are kept in '%s': the next start maps them", self._path)
        except OSError as error:
            _log.warning("packed weights are not kept: %s", error)
            self.drop()


def _pieces(tensors: Sequence[tuple[Kind, Tensor]], entries: list[list[object]]) -> Iterator[Tensor]:
    """Bytes of all tensors, each from its place on, the last piece filled up with zeros; entries get the places."""
    staged, used, before = torch.zeros(_PIECE_BYTES, dtype=torch.uint8), 0, 0
    for kind, tensor in tensors:
        used = -(-used // ALIGNMENT) * ALIGNMENT
        entries.append([str(kind), list(tensor.shape), before + used])
        data = tensor.flatten().view(torch.uint8)
        while len(data):
            if used == _PIECE_BYTES:
                yield staged
                staged.zero_()
                used, before = 0, before + _PIECE_BYTES
            size = min(_PIECE_BYTES - used, len(data))
            staged[used : used + size] = data[:size]
            used, data = used + size, data[size:]
    yield staged[: -(-used // ALIGNMENT) * ALIGNMENT]


def _read_index(file: BinaryIO) -> tuple[list[list[object]], int, int]:
    """(entries, checksum, bytes of data) of a finished file. Raises ValueError or KeyError for another one."""
    tail = _LENGTH_BYTES + len(_MAGIC)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - tail, 0))
    end = file.read(tail)
    length = int.from_bytes(end[:_LENGTH_BYTES], "little")
    if end[_LENGTH_BYTES:] != _MAGIC or length > size - tail:
        raise ValueError("it is not complete")
    file.seek(size - tail - length)
    index = json.loads(file.read(length))
    if index["data_bytes"] != size - tail - length or index["data_bytes"] % ALIGNMENT:
        raise ValueError("its size is wrong")
    return index["tensors"], index["checksum"], index["data_bytes"]


def _sum_of(data: Tensor) -> Tensor:
    """Of its 64-bit words."""
    return data.view(torch.int64).sum()


def _drop(file: BinaryIO) -> None:
    with suppress(OSError):
        os.unlink(file.name)
    with suppress(OSError):  # it writes what it still holds, and fails once more
        file.close()


def _remove_dead(folder: Path) -> None:
    """Files of writers that died."""
    for part in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError), open(part, "ab") as file:
            if _lock(file):
                part.unlink()


def _make_room(folder: Path, size: int, limit: int) -> bool:
    """Remove what was not used for longest until another file of `size` fits; False if it cannot: then all of it stays.

    Raises OSError.
    """
    if size > limit:
        _log.info("packed weights of %.1f GB are not kept: --weight-cache-gib is less", size / 1e9)
        return False
    files = sorted(((path.stat(), path) for path in folder.glob(f"*{SUFFIX}")), key=lambda entry: entry[0].st_mtime)
    total, freed, old = sum(stat.st_size for stat, _ in files), 0, []
    for stat, path in files:
        if total - freed + size <= limit:
            break
        freed += stat.st_size
        old.append(path)
    if size * _MOST_OF_FREE > shutil.disk_usage(folder).free + freed:
        _log.info("packed weights of %.1f GB are not kept: the disk has too little room", size / 1e9)
        return False
    for path in old:
        path.unlink(missing_ok=True)  # who has mapped it keeps it
    return True


def _is_at(file: IO[bytes]) -> bool:
    """Whether it still has the name that it was opened by."""
    try:
        return os.path.samefile(file.fileno(), file.name)
    except OSError:
        return False


def _lock(file: IO[bytes]) -> bool:
    """The system drops it if this process dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
