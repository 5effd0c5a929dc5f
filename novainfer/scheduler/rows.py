"""The rows and KV blocks of one worker group, and the running sequences that hold them. Pure; in the scheduler."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque

from novainfer.config import CacheConfig, SchedulerConfig
from novainfer.executor.base import ExecutorInfo
from novainfer.kv.manager import KVCacheManager
from novainfer.scheduler.batch import StepRecord
from novainfer.scheduler.cohort import Cohort
from novainfer.scheduler.fairness import FairShares
from novainfer.scheduler.indexing import IndexPace
from novainfer.scheduler.request import NO_ROW, Sequence, by_age

# So many times its share is too much. Less is left to who starts next: to preempt for it would cost more than it gives.
_EXCESS = 1.5


class Rows:
    """Of workers that hold nothing yet. `running` is in order of `Sequence.age`, oldest first.

    num_taken: how many there were so far.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        cache: CacheConfig,
        shares: FairShares,
        in_flight: deque[StepRecord],
    ) -> None:
        """in_flight: the scheduler's, see `Cohort`."""
        self.info = info
        self.kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=cache.enable_prefix_caching)
        self.num_rows = min(info.max_num_seqs, config.max_num_seqs)
        self.running: list[Sequence] = []
        self.num_taken = 0
        self.pace = IndexPace(info.block_size)
        self.cohort = Cohort(self.num_rows, self.pace, in_flight)
        self._shares = shares
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._freed: list[int] = []  # since the last plan

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """The sequence gets a row and runs from now on. A row must be free."""
        sequence.row = self._free.pop()
        insort(self.running, sequence, key=by_age)
        self.num_taken += 1
        self.cohort.got_row(sequence)
        self._shares.of(sequence.tenant).num_rows += 1

    def release(self, sequence: Sequence) -> None:
        """Row and blocks go back; who has the same prefix finds those that are full. Steps in flight may still write
        there: later steps run after them.
        """
        self.cohort.loses_row(sequence)
        # It may have ended before the last of its drafts that came true.
        num_known = min(sequence.num_confirmed_tokens, len(sequence.token_ids))
        self.kv.index_blocks(sequence.table, sequence.token_ids, num_known)
        self.kv.release(sequence.table)
        del self.running[bisect_left(self.running, sequence.age, key=by_age)]
        self._shares.of(sequence.tenant).num_rows -= 1
        self._freed.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = NO_ROW

    def index(self, full: list[Sequence]) -> None:
        """Offer the blocks that these have filled to the prefix index; not of those that run no more."""
        if full:
            self.kv.index_all([(s.table, s.token_ids, s.num_confirmed_tokens) for s in full if s.row != NO_ROW])

    def drop_all(self) -> list[Sequence]:
        """The workers are gone: the sequences that ran; they must forget what they held."""
        self.cohort.dissolve()
        dropped, self.running = self.running, []
        for sequence in dropped:
            self._shares.of(sequence.tenant).num_rows -= 1
        return dropped

    def take_freed(self) -> list[int]:
        """Rows that were released since the last call, for the plan."""
        freed, self._freed = self._freed, []
        return freed

    def blocks_by_tenant(self) -> Counter[str]:
        """Blocks that each tenant's running sequences hold; one that is shared counts for each."""
        held: Counter[str] = Counter()
        for sequence in self.running:
            held[sequence.tenant] += len(sequence.table.blocks)
        return held

    def excess(self) -> dict[str, float]:
        """Of each tenant that holds far more than its share of rows or blocks: how many times its share it holds."""
        blocks = self.blocks_by_tenant()
        found: dict[str, float] = {}
        for name in blocks:
            tenant = self._shares.of(name)
            times = max(
                tenant.num_rows / self._shares.rows_due(tenant, self.num_rows),
                blocks[name] / self.info.num_blocks / self._shares.share(tenant),
            )
            if times > _EXCESS:
                found[name] = times
        return found
