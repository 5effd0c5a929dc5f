"""When a KV cache on a CPU gets its memory from the system: before it is written to.

In a virtual machine, memory that nobody had before can cost seconds per GiB. A prompt that is the first to write to it
takes longer by that; steps beside which a thread asks for it do too, but less: what is used soon is worth that.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kernels.memory import commit

_PIECE_BYTES = 2 << 20  # asked for at a time: so little that a step hardly waits if it begins meanwhile
_QUIET_SECONDS = 0.05  # without a step before more is asked for
_WAITS = 20  # times what the last piece took, that the next one waits for that: others might take memory meanwhile
_LOWEST_PRIORITY = 19


class CacheMemory:
    """Takes it in the order of the blocks' numbers, in a thread of its own."""

    def __init__(
        self, tensors: Sequence[Tensor], ahead: int, room: Callable[[], int], *, is_whole: bool = False
    ) -> None:
        """tensors: [num_blocks, ...], of `lazy_zeros`.

        ahead: blocks beyond all that were used that are taken at once, beside steps if need be.
        is_whole: take all others as well, while no step runs, or else slowly.
        room: bytes that may still be taken; when there are too few, the rest is left for when it is written to.
        """
        self._tensors = tensors
        self._num_blocks = len(tensors[0])
        self._ahead, self._is_whole = ahead, is_whole
        self._room = room
        self._piece_blocks = max(_PIECE_BYTES // max(tensor.nbytes // self._num_blocks for tensor in tensors), 1)
        self._num_pieces = 0  # that were taken, or are being taken
        self._lock = threading.Lock()  # for that
        self._num_used = 0  # blocks up to here were used
        self._is_busy = False  # with a step
        self._last_busy = time.monotonic()  # when the last step ended
        self._is_wanted, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="KV cache memory")

    def take_first(self, seconds: float, num_threads: int) -> None:
        """Take what so many threads get in that time, while nothing runs yet: all in order, or what is soon used."""
        if sys.platform != "linux":
            return
        deadline = time.monotonic() + seconds

        def take(_: int) -> None:
            while time.monotonic() < deadline and (self._is_whole or self._is_soon_used(self._next_block())):
                if not self._take_next():
                    return

        with ThreadPoolExecutor(num_threads, thread_name_prefix="KV cache memory") as pool:
            list(pool.map(take, range(num_threads)))  # raises what they raise

    def start(self) -> None:
        """Begin to take the rest."""
        if sys.platform == "linux":
            self._thread.start()

    def step_begins(self, new_blocks: Iterable[int]) -> None:
        """`new_blocks`: numbers of those that it is the first to use, and maybe others."""
        self._is_busy = True
        num_used = max(new_blocks, default=-1) + 1
        if num_used > self._num_used:
            self._num_used = num_used
            self._is_wanted.set()

    def step_ends(self) -> None:
        """Of steps there is one at a time."""
        self._last_busy = time.monotonic()
        self._is_busy = False

    def close(self) -> None:
        """Take no more."""
        self._is_closed.set()
        self._is_wanted.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        most = 0.0  # seconds
        while (block := self._next_block()) < self._num_blocks:
            while not (self._is_whole or self._is_soon_used(block) or self._is_closed.is_set()):
                self._is_wanted.wait()
                self._is_wanted.clear()
            if not self._is_soon_used(block):
                self._give_way(block, most)
            began = time.thread_time()  # of the processor: beside a load it waits for its turn, too
            if self._is_closed.is_set() or not self._take_next():
                return
            most = _WAITS * (time.thread_time() - began)

    def _next_block(self) -> int:
        return self._num_pieces // len(self._tensors) * self._piece_blocks

    def _take_next(self) -> bool:
        """The next piece: some blocks of one tensor. False if there is none, or no memory for it."""
        with self._lock:
            number = self._num_pieces
            self._num_pieces += 1
        first = number // len(self._tensors) * self._piece_blocks
        tensor = self._tensors[number % len(self._tensors)]
        stop, size = min(first + self._piece_blocks, self._num_blocks), tensor.nbytes // self._num_blocks
        if first >= self._num_blocks or self._room() < (stop - first) * size:
            return False
        return commit(tensor, first * size, stop * size)

    def _is_soon_used(self, block: int) -> bool:
        return block < self._num_used + self._ahead

    def _give_way(self, block: int, most: float) -> None:
        """Wait while a step runs; not if the block is soon used, nor for more than so many seconds.

        Looks now and then, while there is something to do: an event would cost every step more than that.
        """
        began = now = time.monotonic()
        while now - began < most and (self._is_busy or now - self._last_busy < _QUIET_SECONDS):
            if self._is_closed.wait(min(_QUIET_SECONDS, began + most - now)) or self._is_soon_used(block):
                return
            now = time.monotonic()
