"""Sequences that wait for a row: tenants by the service they got, within a tenant by priority, arrival and choice."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from itertools import count

from novainfer.protocol.messages import WAITED_WORKERS
from novainfer.scheduler.fairness import FairShares, Tenant
from novainfer.scheduler.request import Sequence
from novainfer.scheduler.waits import Waits

_VOID_ENTRIES = 64  # so few are not worth the work

_Entry = tuple[tuple[int, ...], int, Sequence]


class WaitingQueue:
    """A heap per tenant with lazy removal: push and pop cost O(log n), peek O(tenants that wait), remove O(1).

    Void entries are less than half of a heap, or a few.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self.waits = Waits()
        self._heaps: dict[str, list[_Entry]] = {}  # of tenants that wait, in the order in which they began to
        # The running number keeps two entries of one order apart: sequences themselves have no order.
        self._numbers = count()
        # The number of its entry (older ones are void), and the work that it stands for.
        self._members: dict[Sequence, tuple[int, int]] = {}
        self._followers: dict[Sequence, int] = {}  # held back, and the work that they stand for
        self._work = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    @property
    def work(self) -> int:
        """Units of service until all that wait, and those that are held back, have ended; at most."""
        return self._work

    def hold_back(self, followers: Iterable[Sequence]) -> None:
        """These will be pushed, or removed, later: their work counts already."""
        for sequence in followers:
            self._followers[sequence] = sequence.work_left
            self._work += sequence.work_left

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        if sequence in self._members:
            raise ValueError(f"{sequence.request.request_id}[{sequence.choice}] waits already")
        number = next(self._numbers)
        work = sequence.work_left
        self._members[sequence] = (number, work)
        self._work += work - self._followers.pop(sequence, 0)
        heapq.heappush(self._heaps.setdefault(sequence.tenant, []), (sequence.order, number, sequence))
        self._shares.of(sequence.tenant).num_waiting += 1
        if sequence.notes is not None and sequence.notes.queue_seconds < 0:
            self.waits.watch(sequence)

    def lose_workers(self, sequences: Iterable[Sequence]) -> None:
        """These come back, as what ran them is gone."""
        for sequence in sequences:
            self.push(sequence)
        self.waits.stop(WAITED_WORKERS, {})

    def peek(self, passing: Collection[str] = ()) -> Sequence | None:
        """Who is next, tenants in `passing` aside; None if nobody waits."""
        heads = self._heads(passing)
        return min(heads, key=self._rank) if len(heads) > 1 else next(iter(heads), None)

    def heads(self, passing: Collection[str] = ()) -> list[Sequence]:
        """The first of each tenant, the tenant that got least before the others; equal ones by arrival."""
        return sorted(self._heads(passing), key=self._rank)

    def _heads(self, passing: Collection[str]) -> list[Sequence]:
        return [head for name in list(self._heaps) if name not in passing and (head := self._head(name))]

    def _rank(self, head: Sequence) -> tuple[float, tuple[int, int]]:
        return self._shares.of(head.tenant).served, head.age

    def pop(self) -> Sequence:
        """Take the next one. Raises IndexError if the queue is empty."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the waiting queue is empty")
        self.take(sequence)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Take one that starts now out of the queue."""
        self.remove(sequence)
        self._shares.started(self._tenant(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the middle; unknown ones are fine."""
        self._work -= self._followers.pop(sequence, 0)
        if self.waits:
            self.waits.leave(sequence)
        member = self._members.pop(sequence, None)
        if member is not None:
            self._work -= member[1]
            tenant = self._tenant(sequence)
            tenant.num_waiting -= 1
            heap = self._heaps[sequence.tenant]
            if tenant.num_waiting == 0:
                del self._heaps[sequence.tenant]
            elif len(heap) > 2 * tenant.num_waiting + _VOID_ENTRIES:
                heap[:] = [entry for entry in heap if self._is_valid(entry)]
                heapq.heapify(heap)

    def _tenant(self, sequence: Sequence) -> Tenant:
        return self._shares.of(sequence.tenant)

    def _head(self, name: str) -> Sequence | None:
        heap = self._heaps[name]
        while heap:
            if self._is_valid(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def _is_valid(self, entry: _Entry) -> bool:
        member = self._members.get(entry[2])
        return member is not None and member[0] == entry[1]
