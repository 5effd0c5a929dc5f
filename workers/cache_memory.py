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

from torch import Tensor

from kernels.memory import commit

_PIECE_BYTES = 2 << 20  # asked for at a time: so little that a step hardly waits if it begins meanwhile
_QUIET_SECONDS = 0.05  # without a step, or a busy one, before more is asked for
_PAUSE_SECONDS = 0.02  # between pieces, beside steps that are not busy: a core that gives memory does nothing else
_MOST_SECONDS = 0.2  # that a piece waits for that: others might take the memory meanwhile
_BUSY_TOKENS = 9  # make a step busy; with fewer it waits for the weights, not for the processor
_LOWEST_PRIORITY = 19


class CacheMemory:
    """Takes it in the order of the blocks' numbers, in a thread of its own."""

    def __init__(
        self, tensors: Sequence[Tensor], ahead: int, room: Callable[[], int], *, is_whole: bool = False
    ) -> None:
        """tensors: [num_blocks, ...], of `lazy_zeros`.

        ahead: blocks beyond all that were used that are taken at once, beside steps if need be.
        is_whole: take all others as well, while no busy step runs, or else slowly.
        room: bytes that may still be taken; when there are too few, the rest is left for when it is written to.
        """
        self._tensors = tensors
        self._num_blocks = len(tensors[0])
        self._ahead, self._is_whole = ahead, is_whole
        self._room = room
        self._num_used = 0  # blocks up to here were used
        self._is_in_step = self._is_busy = False
        self._last_step = self._last_busy = time.monotonic()  # when it ended
        self._is_wanted, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="KV cache memory")

    def start(self) -> None:
        """Begin."""
        if sys.platform == "linux":
            self._thread.start()

    def step_begins(self, new_blocks: Iterable[int], num_tokens: int) -> None:
        """`new_blocks`: numbers of those that it is the first to use, and maybe others."""
        self._is_in_step, self._is_busy = True, num_tokens >= _BUSY_TOKENS
        num_used = max(new_blocks, default=-1) + 1
        if num_used > self._num_used:
            self._num_used = num_used
            self._is_wanted.set()

    def step_ends(self) -> None:
        """Of steps there is one at a time."""
        self._last_step = time.monotonic()
        if self._is_busy:
            self._last_busy = self._last_step
        self._is_in_step = self._is_busy = False

    def close(self) -> None:
        """Take no more."""
        self._is_closed.set()
        self._is_wanted.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        block_bytes = [tensor.nbytes // self._num_blocks for tensor in self._tensors]
        num_blocks = max(_PIECE_BYTES // max(block_bytes), 1)
        for first in range(0, self._num_blocks, num_blocks):
            stop = min(first + num_blocks, self._num_blocks)
            while not (self._is_whole or self._is_soon_used(first) or self._is_closed.is_set()):
                self._is_wanted.wait()
                self._is_wanted.clear()
            for tensor, size in zip(self._tensors, block_bytes, strict=True):
                if not self._is_soon_used(first):
                    self._give_way(first)
                if self._is_closed.is_set() or self._room() < (stop - first) * size:
                    return
                if not commit(tensor, first * size, stop * size):
                    return

    def _is_soon_used(self, block: int) -> bool:
        return block < self._num_used + self._ahead

    def _give_way(self, block: int) -> None:
        """Wait while a busy step runs, a little beside others; not if the block is soon used, nor for too long.

        Looks now and then, while there is something to do: an event would cost every step more than that.
        """
        began = now = time.monotonic()
        if self._is_in_step or now - self._last_step < _QUIET_SECONDS:
            self._is_closed.wait(_PAUSE_SECONDS)
        while now - began < _MOST_SECONDS and (self._is_busy or now - self._last_busy < _QUIET_SECONDS):
            if self._is_closed.wait(_QUIET_SECONDS) or self._is_soon_used(block):
                return
            now = time.monotonic()
