"""Reference-counted KV blocks and the order in which free ones are taken. Pure; lives in the scheduler.

A free block keeps its content until it is taken again, so a freed block can still be a prefix hit; the least
recently used one is taken first (vLLM's free-queue idea).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice


class BlockPool:
    """Ids 0..num_blocks-1, each free (reference count 0, in LRU order) or owned by one or more sequences.

    Invariant: `num_free + (blocks with a reference) == num_blocks`.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        """How many sequences own the block."""
        return self._refs[block]

    def allocate(self) -> int:
        """Take the least recently used free block, with one reference. Raises IndexError if none is free.

        Its old content is gone: the caller must drop it from the prefix index.
        """
        try:
            block, _ = self._free.popitem(last=False)
        except KeyError:
            raise IndexError("no free KV block") from None
        self._refs[block] = 1
        return block

    def allocate_all(self, count: int) -> list[int] | None:
        """Take so many as `allocate` would; None, and nothing taken, if there are not so many free."""
        free, refs = self._free, self._refs
        if count > len(free):
            return None
        blocks = list(islice(free, count))
        for block in blocks:
            del free[block]
            refs[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference; a free block (a prefix hit) leaves the free list with its content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def reuse_last(self, blocks: Iterable[int]) -> None:
        """Move free blocks to the end of the queue, in the order given."""
        for block in blocks:
            self._free.move_to_end(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. Blocks that become free queue up in the order given.

        A sequence releases its last block first, so that a prefix outlives what follows it.
        """
        refs, free = self._refs, self._free
        for block in blocks:
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"KV block {block} is released more often than it was taken")
            refs[block] = left
            if not left:
                free[block] = None
