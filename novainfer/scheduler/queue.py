"""Sequences that wait for a row, in order of priority, arrival and choice."""

from __future__ import annotations

import heapq
from itertools import count

from novainfer.scheduler.request import Sequence


class WaitingQueue:
    """A heap with lazy removal: push, peek and pop cost O(log n), remove O(1)."""

    def __init__(self) -> None:
        # The running number keeps two entries of one order apart: sequences themselves have no order.
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._numbers = count()
        self._members: dict[tuple[int, int, int], Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._members

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        order = sequence.order
        if order in self._members:
            raise ValueError(f"{sequence.request.request_id}[{sequence.choice}] waits already")
        self._members[order] = sequence
        heapq.heappush(self._heap, (order, next(self._numbers), sequence))

    def peek(self) -> Sequence | None:
        """The first in order, or None."""
        while self._heap:
            order, _, sequence = self._heap[0]
            if self._members.get(order) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take the first in order. Raises IndexError if the queue is empty."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        del self._members[sequence.order]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the middle; unknown ones are fine."""
        if self._members.get(sequence.order) is sequence:
            del self._members[sequence.order]
