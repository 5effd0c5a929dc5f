"""The files of a batch: the input, read as a stream, and the output, to which whole lines are added.

No thread: what is no regular file (a pipe, a terminal) is waited for in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from novainfer.config import MIB
from novainfer.entrypoints.batch_lines import digest_of, kept_id
from novainfer.errors import ConfigError, NovaInferError

STANDARD = "-"
MAX_LINE_BYTES = 64 * MIB
_CHUNK = 1 << 18  # bytes read at once
_PIECE = 4096  # bytes that a pipe takes at once if it takes any (PIPE_BUF of Linux)
_OUR_BEGINNING = b'{"id": "batch_req_'
_NEW = ".resumed"  # what is kept of an output is written beside it, and then takes its place


# -- the input ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_input(name: str) -> Iterator[int]:
    """A descriptor of the file, or of standard input for `-`. Raises `ConfigError`."""
    if name == STANDARD:
        yield 0
        return
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise ConfigError(f"cannot read {name}: it is a directory")
        yield descriptor
    finally:
        os.close(descriptor)


async def read_lines(descriptor: int) -> AsyncIterator[tuple[int, bytes | None]]:
    """Number (from 1) and text of each line that is not blank; None for one of more than `MAX_LINE_BYTES`."""
    number, line, is_long = 1, bytearray(), False
    while chunk := await _read(descriptor):
        first, *others = chunk.split(b"\n")
        for piece, ends in ((first, bool(others)), *((other, True) for other in others[:-1])):
            is_long = is_long or len(line) + len(piece) > MAX_LINE_BYTES
            if not is_long:
                line += piece
            if ends:
                if is_long or line.strip():
                    yield number, None if is_long else bytes(line)
                number += 1
                line.clear()
                is_long = False
        if others:
            line += others[-1]
    if is_long or line.strip():
        yield number, None if is_long else bytes(line)


async def count_lines(descriptor: int) -> int | None:
    """Lines of a regular file, blank ones too, wherever it is being read; None for anything else."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    count, at, last = 0, 0, b"\n"
    while chunk := os.pread(descriptor, _CHUNK, at):
        count, at, last = count + chunk.count(b"\n"), at + len(chunk), chunk[-1:]
        await asyncio.sleep(0)
    return count + (last != b"\n")


async def _read(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    await _wait(descriptor, loop.add_reader, loop.remove_reader)
    try:
        return os.read(descriptor, _CHUNK)
    except OSError as error:
        raise NovaInferError(f"cannot read the input: {error.strerror}") from None


async def _wait(descriptor: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    """Return when the descriptor is readable or writable, as `add` says; files always are, and cannot be waited for."""
    ready = asyncio.Event()
    try:
        add(descriptor, ready.set)
    except PermissionError:
        return
    try:
        await ready.wait()
    finally:
        remove(descriptor)


# -- the output ---------------------------------------------------------------------------------------------------


class ResultFile:
    """The output. `done`: digests of the ids that are answered in it already."""

    def __init__(self, descriptor: int, done: set[bytes] | None = None) -> None:
        self.done = done or set()
        self._descriptor = descriptor
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._lock = asyncio.Lock()
        self._fault: str | None = None

    async def add(self, line: bytes) -> None:
        """Write a whole line. Raises `NovaInferError`; nothing is written after a line that could not be."""
        async with self._lock:
            if self._fault is not None:
                raise NovaInferError(self._fault)
            try:
                await self._write(line)
            except OSError as error:
                self._fault = f"cannot write the output: {error.strerror}"
                raise NovaInferError(self._fault) from None

    def sync(self) -> None:
        """All lines are on the disk, if it is a file there."""
        if self._is_regular:
            os.fsync(self._descriptor)

    async def _write(self, line: bytes) -> None:
        loop = asyncio.get_running_loop()
        left = memoryview(line)
        while left:
            if self._is_regular:
                left = left[os.write(self._descriptor, left) :]
            else:
                await _wait(self._descriptor, loop.add_writer, loop.remove_writer)
                left = left[os.write(self._descriptor, left[:_PIECE]) :]


@contextlib.contextmanager
def opened_output(name: str, input_descriptor: int, *, resume: bool, overwrite: bool) -> Iterator[ResultFile]:
    """The output, ready to be added to. Raises `ConfigError` for a file that may not be written to.

    A file is held: two batches cannot write to the same one. resume: what it has stays, but for lines without a 200,
    whose requests are made again, and for a last line that is not whole.
    """
    if name == STANDARD:
        yield ResultFile(1)
        return
    with contextlib.ExitStack() as stack:
        try:
            results = _opened(name, input_descriptor, stack, resume=resume, overwrite=overwrite)
        except OSError as error:
            raise ConfigError(f"cannot write {name}: {error.strerror}") from None
        yield results
        results.sync()


def _opened(
    name: str, input_descriptor: int, stack: contextlib.ExitStack, *, resume: bool, overwrite: bool
) -> ResultFile:
    path = Path(os.path.realpath(name))
    file = stack.enter_context(_held(path, name))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return ResultFile(file.fileno())
    if os.path.sameopenfile(file.fileno(), input_descriptor):
        raise ConfigError(f"{name} is the input, too")
    if overwrite:
        file.truncate(0)
    if not os.fstat(file.fileno()).st_size:
        return ResultFile(file.fileno())
    if not resume:
        raise ConfigError(f"{name} has results: --resume goes on from them, --overwrite drops them")
    done, file = _resumed(file, path, name, stack)
    return ResultFile(file.fileno(), done)


@contextlib.contextmanager
def _held(path: Path, name: str) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another batch is writing to {name}") from None
        yield file


def _resumed(file: BinaryIO, path: Path, name: str, stack: contextlib.ExitStack) -> tuple[set[bytes], BinaryIO]:
    """What is done in it, and the file that takes its place if lines have to go; the old one stays held, too."""
    done: set[bytes] = set()
    end = 0  # of the whole lines
    drops = False
    for number, line in enumerate(_whole_lines(path, name), 1):
        end += len(line)
        drops = not _keeps(line, done, f"{name}, line {number}") or drops
    if not drops:
        file.truncate(end)
        return done, file
    new = path.with_name(path.name + _NEW)
    new.unlink(missing_ok=True)
    copy = stack.enter_context(_held(new, name))
    done.clear()
    with open(copy.fileno(), "wb", closefd=False) as buffered:
        buffered.writelines(line for line in _whole_lines(path, name) if _keeps(line, done, name))
    os.fsync(copy.fileno())
    shutil.copymode(path, new)
    os.replace(new, path)
    return done, copy


def _whole_lines(path: Path, name: str) -> Iterator[bytes]:
    """All but a last one without its end, which may only be the beginning of one of ours."""
    with open(path, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line
            elif line[: len(_OUR_BEGINNING)] != _OUR_BEGINNING[: len(line)]:
                raise ConfigError(f"{name} is no output of a batch: its last line is none of ours")


def _keeps(line: bytes, done: set[bytes], where: str) -> bool:
    """Whether the line stays; then its id is added to `done`."""
    try:
        custom_id = kept_id(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: this is no line of a batch's output, so nothing is added to it") from None
    digest = None if custom_id is None else digest_of(custom_id)
    if digest is None or digest in done:
        return False
    done.add(digest)
    return True
