"""Who gets a row and blocks, and who has to give them back: starts, growth, preemption. Pure; in the scheduler."""

from __future__ import annotations

from novainfer.scheduler.batch import StepBatch, new_row
from novainfer.scheduler.fairness import FairShares
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Sequence
from novainfer.scheduler.rows import Rows
from novainfer.scheduler.totals import Totals

# A sequence is preempted so often for the sake of another tenant, and then never again.
MAX_FAIR_PREEMPTIONS = 2
# Blocks kept free for each running sequence when another starts: more after each preemption for lack of them, fewer
# again with each start.
_MAX_RESERVE = 8.0
_RESERVE_DECAY = 0.98


class Placement:
    """Gives and takes rows and blocks. One for each worker group."""

    def __init__(self, rows: Rows, waiting: WaitingQueue, shares: FairShares, totals: Totals) -> None:
        self.rows = rows
        self._waiting = waiting
        self._shares = shares
        self._totals = totals
        self._reserve_per_row = 1.0  # blocks

    # -- giving ---------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, batch: StepBatch) -> bool:
        """Give the sequence a row, its prefix and blocks for all its tokens; False if they do not suffice."""
        kv = self.rows.kv
        computed = self._share_prefix(sequence)
        table, num_tokens = sequence.table, len(sequence.token_ids)
        growth = kv.grow(table, computed, num_tokens, spare=self._reserve)
        if growth is None:
            kv.release(table)
            return False
        batch.copies.extend(growth.copies)
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = computed
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, computed)
        if sequence.choice == 0 and not sequence.last_step:
            sequence.num_cached_tokens = min(computed, sequence.prompt_len)
            self._totals.cached_prompt_tokens += sequence.num_cached_tokens
        self.rows.take(sequence)
        batch.add_new_row(new_row(sequence))
        self._reserve_per_row = max(self._reserve_per_row * _RESERVE_DECAY, 1.0)
        return True

    @property
    def _reserve(self) -> int:
        """Free blocks that running sequences will soon want: without them, each start causes a preemption."""
        return int(len(self.rows.running) * self._reserve_per_row)

    def _share_prefix(self, sequence: Sequence) -> int:
        """Tokens whose KV is there already: of choice 0, whose prompt is the same, or in the prefix cache."""
        request, kv = sequence.request, self.rows.kv
        leader = request.sequences[0]
        if request.prompt_computed and leader.is_running and leader is not sequence and sequence.num_output == 0:
            kv.fork(leader.table, sequence.table, request.prompt_len - 1)
            return request.prompt_len - 1
        return kv.attach_prefix(sequence.table, sequence.token_ids)

    def grow(self, sequence: Sequence, batch: StepBatch, order: list[Sequence]) -> bool:
        """A slot for the next token; preempts from the end of `order`. False if that was the sequence itself."""
        kv, blocks = self.rows.kv, sequence.table.blocks
        # As far as drafts in flight may have brought it.
        needed = (self.rows.cohort.num_computed(sequence) + sequence.num_ahead) // kv.block_size + 1
        had = len(blocks)
        while len(blocks) < needed:
            if kv.append_blocks([sequence.table]) is not None:
                continue
            while not (victim := order[-1]).is_running:
                order.pop()
            self._preempt(victim)
            self._reserve_per_row = min(self._reserve_per_row + 1.0, _MAX_RESERVE)
            if victim is sequence:
                return False
        if len(blocks) > had:
            batch.add_blocks([sequence.row] * (len(blocks) - had), blocks[had:])
        return True

    def grow_together(self, sequences: list[Sequence], batch: StepBatch) -> bool:
        """A block for each of these, which lack one for their next token; False, and nothing changed, if there are not
        so many free.
        """
        blocks = self.rows.kv.append_blocks([sequence.table for sequence in sequences])
        if blocks is None:
            return False
        batch.add_blocks([sequence.row for sequence in sequences], blocks)
        return True

    def room_for_drafts(self, sequence: Sequence, wanted: int, batch: StepBatch) -> int:
        """How many of so many drafts find a slot behind the next token's. Nobody is preempted for them."""
        rows, table = self.rows, sequence.table
        have = len(table.blocks) * rows.info.block_size
        end = sequence.num_computed_tokens + sequence.num_ahead + 1 + wanted
        if end > have:
            growth = rows.kv.grow(table, have, end, spare=self._reserve)
            if growth is None:
                return wanted - (end - have)
            batch.add_blocks([sequence.row] * len(growth.new_blocks), growth.new_blocks)
        return wanted

    def decode_order(self) -> list[Sequence]:
        """The running sequences, first who keeps its blocks longest. A list of its own only if it is not `running`.

        That is the oldest of all; then by age those of tenants within their share, then those of the others: the more
        a tenant is above its share, the later.
        """
        running = self.rows.running
        excess = self.rows.excess() if len(running) > 1 and self._shares.num_present > 1 else {}
        if not excess:
            return running
        return [running[0], *sorted(running[1:], key=lambda s: (excess.get(s.tenant, 0.0), s.age))]

    # -- taking ---------------------------------------------------------------------------------------------

    def _preempt(self, victim: Sequence) -> None:
        """Take everything the sequence holds; its tokens are computed again later (the same bits)."""
        self.rows.cohort.leave(victim)
        self.rows.release(victim)
        victim.generation += 1
        victim.num_preemptions += 1
        victim.num_computed_tokens = victim.num_confirmed_tokens = 0
        if victim.choice == 0:
            victim.request.prompt_computed = False
        self._totals.preemptions += 1
        self._waiting.push(victim)

    def restore_shares(self) -> None:
        """Preempt for the first waiting sequence of each tenant far below its share that could not start otherwise.

        Before a step is put together: a row that is in the step already cannot be taken.
        """
        if self._shares.num_present < 2:
            return
        rows = self.rows
        if not any(self._shares.of(name).num_rows > 1 for name in rows.excess()):
            return  # nobody has anything to give
        num_rows, num_blocks = rows.num_free, rows.kv.pool.num_free - self._reserve
        held = rows.blocks_by_tenant()
        for sequence in self._waiting.heads()[: rows.num_rows]:
            needed = rows.kv.blocks_for(len(sequence.token_ids))
            if sequence.num_pending or not self._is_owed(sequence, held[sequence.tenant], needed):
                continue
            victims = self._victims_for(sequence, 1 - num_rows, needed - num_blocks)
            for victim in victims:
                num_blocks += len(victim.table.blocks) + 1
                victim.num_fair_preemptions += 1
                self._preempt(victim)
            num_rows, num_blocks = num_rows + len(victims) - 1, num_blocks - needed - 1

    def _is_owed(self, sequence: Sequence, blocks: int, needed: int) -> bool:
        """Its tenant, which holds so many blocks, has less than half of its share, and not more than all with this one.

        Those between a half and the whole wait until rows end by themselves: to correct small differences would cost
        more than it gives.
        """
        tenant, rows = self._shares.of(sequence.tenant), self.rows
        due = self._shares.rows_due(tenant, rows.num_rows)
        blocks_due = self._shares.share(tenant) * rows.info.num_blocks
        return tenant.num_rows * 2 < due and blocks * 2 < blocks_due and blocks + needed <= blocks_due

    def _victims_for(self, sequence: Sequence, num_rows: int, num_blocks: int) -> list[Sequence]:
        """Rows to preempt so that so many rows and blocks become free; [] if none need be, or not enough can be.

        Only of tenants above their share that got no less service, and of each no row that would leave it with none.
        """
        victims: list[Sequence] = []
        if num_rows <= 0 and num_blocks <= 0:
            return victims
        excess = self.rows.excess()
        served = self._shares.of(sequence.tenant).served
        left = {name: self._shares.of(name).num_rows for name in excess}
        candidates = [
            victim
            for victim in reversed(self.rows.running[1:])
            if victim.tenant in excess
            and victim.num_fair_preemptions < MAX_FAIR_PREEMPTIONS
            and self._shares.of(victim.tenant).served >= served
        ]
        candidates.sort(key=lambda victim: -excess[victim.tenant])  # stable: of one tenant the youngest first
        for victim in candidates:
            if num_rows <= 0 and num_blocks <= 0:
                break
            if left[victim.tenant] > 1:
                left[victim.tenant] -= 1
                victims.append(victim)
                num_rows, num_blocks = num_rows - 1, num_blocks - len(victim.table.blocks) - 1
        return victims if num_rows <= 0 and num_blocks <= 0 else []
