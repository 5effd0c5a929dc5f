"""Bugs put into the machines one at a time, and seeds that must find each: how we know that the net has no such hole.

`python -m tests.sim.mutants [NAME...]` looks for the seeds anew, after a change of the worlds, and prints the table.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from novainfer.client.journal import JournalEntry
from novainfer.client.session import GatewaySession
from novainfer.engine.gateways import GatewayLink, _Held
from novainfer.engine.orphans import Orphans
from novainfer.engine.replica import Replica
from novainfer.executor.held_blocks import HeldBlocks
from novainfer.executor.rank import RankSession
from novainfer.executor.ranks import RankGroup
from novainfer.kv.block_pool import BlockPool
from novainfer.kv.manager import KVCacheManager
from novainfer.kv.prefix_index import PrefixIndex
from novainfer.protocol.link import Inbox
from novainfer.protocol.step import StepResult
from novainfer.scheduler import isolation, request, scheduler
from novainfer.scheduler.batch import StepBatch
from novainfer.scheduler.drafted import take_drafts
from novainfer.scheduler.isolation import Isolation
from novainfer.scheduler.placement import Placement
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Sequence
from novainfer.scheduler.scheduler import Scheduler
from novainfer.sim.simulation import LIVENESS, MODES, SAFETY, simulate

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    """Enter a bug in the table under its name."""
    MUTANTS[patch.__name__] = patch
    return patch


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, *arguments)`."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return around(original, self, *arguments, **named)

    patch.setattr(owner, name, method)


def nothing(*arguments: Any, **named: Any) -> None:
    return None


# -- links ----------------------------------------------------------------------------------------------------------


@mutant
def inbox_takes_packets_twice(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Inbox, "is_new", lambda original, self, number: original(self, number) or True)


@mutant
def inbox_sees_no_gap(patch: pytest.MonkeyPatch) -> None:
    def is_new(self: Inbox, number: int) -> bool:
        is_new = number >= self.num_taken
        self.num_taken = max(self.num_taken, number + 1)
        return is_new

    patch.setattr(Inbox, "is_new", is_new)


@mutant
def a_successor_may_go_on_with_the_link(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, GatewaySession, "_comes_from_the_other_end", lambda original, self, packet: True)


@mutant
def held_outputs_are_lost(patch: pytest.MonkeyPatch) -> None:
    def messages(original: Any, self: _Held) -> list[object]:
        self._batches.clear()
        return list(original(self))

    wrap(patch, _Held, "messages", messages)


@mutant
def held_state_of_the_engine_goes_before_held_outputs(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, _Held, "messages", lambda original, self: original(self)[::-1])


@mutant
def beats_wait_for_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatewayLink, "beat", GatewayLink.say)


@mutant
def credit_never_comes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatewayLink, "acknowledge", nothing)


@mutant
def unlinked_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: GatewaySession, packet: Any, now: float) -> None:
        if type(packet.message).__name__ != "Unlinked":
            original(self, packet, now)

    wrap(patch, GatewaySession, "take", take)


@mutant
def a_new_link_sends_no_journal(patch: pytest.MonkeyPatch) -> None:
    def handle_info(original: Any, self: GatewaySession, info: Any, now: float) -> None:
        self._is_open = self._is_open or (info.ready and self.num_links > 1)
        original(self, info, now)

    wrap(patch, GatewaySession, "_handle_info", handle_info)


@mutant
def a_new_link_leaves_the_old_requests_running(patch: pytest.MonkeyPatch) -> None:
    def unlink(self: Replica, identity: bytes) -> None:
        for request_id in self._gateways.pop(identity).live:
            del self._owner[request_id]

    patch.setattr(Replica, "_unlink", unlink)


@mutant
def finished_choices_are_not_cancelled_after_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalEntry, "finished_choices", property(lambda self: []))


@mutant
def a_cancel_does_not_reach_the_engine(patch: pytest.MonkeyPatch) -> None:
    def tell(original: Any, self: GatewaySession, message: Any) -> None:
        if type(message).__name__ != "CancelRequest":
            original(self, message)

    wrap(patch, GatewaySession, "_tell", tell)


@mutant
def an_overlap_keeps_all_logprobs(patch: pytest.MonkeyPatch) -> None:
    def accept(original: Any, self: JournalEntry, output: Any, epoch: int) -> Any:
        fresh = original(self, output, epoch)
        return fresh if fresh is None else replace(fresh, logprobs=output.logprobs)

    wrap(patch, JournalEntry, "accept", accept)


@mutant
def the_journal_forgets_the_last_word(patch: pytest.MonkeyPatch) -> None:
    def accept(original: Any, self: JournalEntry, output: Any, epoch: int) -> Any:
        end = output.finish_reason if not output.token_ids else None
        return original(self, output, epoch) if end is None else None

    wrap(patch, JournalEntry, "accept", accept)


# -- orphans --------------------------------------------------------------------------------------------------------


@mutant
def claim_without_tenant_check(patch: pytest.MonkeyPatch) -> None:
    def claim(original: Any, self: Orphans, tenant: str, alias: str, claimant: bytes, now: float) -> Any:
        for entry in self._entries.values():
            if alias in entry.request.message.aliases:
                tenant = entry.request.message.tenant
        return original(self, tenant, alias, claimant, now)

    wrap(patch, Orphans, "claim", claim)


@mutant
def claimed_requests_are_taken_out_at_once(patch: pytest.MonkeyPatch) -> None:
    def claim(original: Any, self: Orphans, tenant: str, alias: str, claimant: bytes, now: float) -> Any:
        found = original(self, tenant, alias, claimant, now)
        for orphan in found:
            entry = self._entries[orphan.request_id]
            entry.until = entry.lent_until = now
        return found

    wrap(patch, Orphans, "claim", claim)


@mutant
def a_claim_is_lent_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orphans, "is_lent", lambda self, tenant, alias: False)


@mutant
def what_is_given_back_stays_lent(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, self: Orphans, claimant: bytes, request_id: str | None = None) -> None:
        if request_id is None:
            original(self, claimant)

    wrap(patch, Orphans, "release", release)


@mutant
def orphans_never_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orphans, "expired", lambda self, now: [])


@mutant
def orphans_are_cancelled_at_once(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Orphans, "__init__", lambda original, self, grace: original(self, 0.0))


@mutant
def the_last_outputs_die_with_the_gateway(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, GatewayLink, "ended", lambda original, self, request_id: self.live.pop(request_id, None))


# -- ranks ----------------------------------------------------------------------------------------------------------


@mutant
def results_of_other_epochs_count(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        RankGroup,
        "_on_result",
        lambda original, self, result: original(self, replace(result, epoch=self.epoch)),
    )


@mutant
def hellos_of_other_groups_count(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        RankGroup,
        "_on_hello",
        lambda original, self, identity, hello: original(
            self, identity, replace(hello, group=self._group, epoch=self.epoch)
        ),
    )


@mutant
def faults_of_other_groups_count(patch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, self: RankGroup, identity: bytes, message: Any) -> None:
        if type(message).__name__ == "WorkerFault":
            message = replace(message, group=self._group)
        original(self, identity, message)

    wrap(patch, RankGroup, "handle", handle)


@mutant
def idle_ranks_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankGroup, "_on_idle", nothing)


@mutant
def any_plan_may_be_the_first(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        RankSession,
        "_launch",
        lambda original, self, plan: original(self, replace(plan, is_first=self._last_step is None)),
    )


@mutant
def every_adopt_is_answered(patch: pytest.MonkeyPatch) -> None:
    def follow(original: Any, self: RankSession, adopt: Any) -> None:
        self._asks = True
        original(self, adopt)

    wrap(patch, RankSession, "_follow", follow)


@mutant
def adopted_ranks_keep_their_rows(patch: pytest.MonkeyPatch) -> None:
    def follow(original: Any, self: RankSession, adopt: Any) -> None:
        steps, self._steps = self._steps, _KeepsRows()  # type: ignore[assignment]
        original(self, adopt)
        self._steps = steps

    wrap(patch, RankSession, "_follow", follow)


class _KeepsRows:
    def drop_rows(self) -> None:
        """Forgets to."""


@mutant
def plans_of_a_replaced_scheduler_run(patch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, self: RankSession, message: Any) -> Any:
        if type(message).__name__ == "StepPlan":
            message = replace(message, epoch=self._epoch)
        return original(self, message)

    wrap(patch, RankSession, "handle", handle)


@mutant
def the_account_of_held_blocks_only_grows(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, HeldBlocks, "apply", lambda original, self, plan: original(self, replace(plan, unindexed=[])))


@mutant
def an_old_order_counts(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Replica, "obey", lambda original, self, order: original(self, replace(order, epoch=self._epoch + 1)))


# -- blocks and rows ------------------------------------------------------------------------------------------------


@mutant
def release_forgets_the_first_block(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, BlockPool, "release", lambda original, self, blocks: original(self, list(blocks)[:-1]))


@mutant
def a_table_is_released_twice(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, self: KVCacheManager, table: Any) -> None:
        blocks = list(table.blocks)
        original(self, table)
        self.pool.release(block for block in blocks if self.pool.references(block))

    wrap(patch, KVCacheManager, "release", release)


@mutant
def a_fork_takes_no_references(patch: pytest.MonkeyPatch) -> None:
    def fork(original: Any, self: KVCacheManager, parent: Any, child: Any, num_tokens: int) -> None:
        original(self, parent, child, num_tokens)
        for block in child.blocks:
            self.pool._refs[block] -= 1

    wrap(patch, KVCacheManager, "fork", fork)


@mutant
def a_shared_block_is_written_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "_shared_from", lambda self, table, first: [])


@mutant
def a_block_is_taken_with_its_old_index_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "_take", lambda self: self.pool.allocate())
    patch.setattr(PrefixIndex, "evict_all", nothing)


@mutant
def blocks_enter_the_index_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        KVCacheManager,
        "index_blocks",
        lambda original, self, table, token_ids, num: original(
            self, table, token_ids, min(len(token_ids), len(table.blocks) * self.block_size)
        ),
    )
    wrap(
        patch,
        KVCacheManager,
        "index_all",
        lambda original, self, computed: [self.index_blocks(*one) for one in computed],
    )


@mutant
def what_is_not_finite_stays_in_the_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "forget", nothing)


@mutant
def the_prefix_index_outlives_the_workers(patch: pytest.MonkeyPatch) -> None:
    def reset(original: Any, self: Scheduler, info: Any) -> None:
        index = self.kv.index if hasattr(self, "_rows") else None
        original(self, info)
        if index is not None:
            self.kv.index = index

    wrap(patch, Scheduler, "_reset", reset)


@mutant
def all_tenants_share_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "root_key", lambda *salts: b"")


@mutant
def freed_rows_are_not_told(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        StepBatch,
        "plan",
        lambda original, self, epoch, step, freed, changes: original(self, epoch, step, freed[1:], changes),
    )


# -- sequences ------------------------------------------------------------------------------------------------------


@mutant
def preemption_leaves_the_generation(patch: pytest.MonkeyPatch) -> None:
    def preempt(original: Any, self: Placement, victim: Sequence) -> None:
        original(self, victim)
        victim.generation -= 1

    wrap(patch, Placement, "_preempt", preempt)


@mutant
def drafts_get_no_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "room_for_drafts", lambda self, sequence, wanted, batch: wanted)


@mutant
def drafts_in_flight_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def add(original: Any, self: StepBatch, sequence: Sequence, num_new_tokens: int, drafts: int = 0) -> bool:
        samples: bool = original(self, sequence, num_new_tokens, drafts)
        sequence.num_ahead = 0
        return samples

    wrap(patch, StepBatch, "add", add)


@mutant
def drafts_that_came_true_are_not_computed(patch: pytest.MonkeyPatch) -> None:
    def take(record: Any, result: Any, shares: Any, totals: Any, block_size: int) -> list[Sequence]:
        computed = [(sequence, sequence.num_computed_tokens) for sequence in record.sequences]
        full = take_drafts(record, result, shares, totals, block_size)
        for sequence, num in computed:
            sequence.num_computed_tokens = num
        return full

    patch.setattr(scheduler, "take_drafts", take)


@mutant
def preemption_forgets_pending_tokens(patch: pytest.MonkeyPatch) -> None:
    def preempt(original: Any, self: Placement, victim: Sequence) -> None:
        original(self, victim)
        victim.num_pending = 0

    wrap(patch, Placement, "_preempt", preempt)


@mutant
def preemption_loses_a_token(patch: pytest.MonkeyPatch) -> None:
    def preempt(original: Any, self: Placement, victim: Sequence) -> None:
        original(self, victim)
        if victim.num_output:
            victim.token_ids.pop()

    wrap(patch, Placement, "_preempt", preempt)


@mutant
def loss_of_workers_leaves_pending_tokens(patch: pytest.MonkeyPatch) -> None:
    def lose(original: Any, self: Sequence) -> None:
        pending = self.num_pending
        original(self)
        self.num_pending = pending

    wrap(patch, Sequence, "lose_workers", lose)


@mutant
def loss_of_workers_leaves_the_prompt_computed(patch: pytest.MonkeyPatch) -> None:
    def lose(original: Any, self: Scheduler, *, faulted: bool) -> Any:
        computed = [r for r in self.requests.values() if r.prompt_computed]
        outputs = original(self, faulted=faulted)
        for each in computed:
            each.prompt_computed = True
        return outputs

    wrap(patch, Scheduler, "lose_workers", lose)


@mutant
def followers_are_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_release_followers", nothing)


@mutant
def a_sequence_that_ends_stays_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "remove", nothing)


@mutant
def min_tokens_is_one_too_few(patch: pytest.MonkeyPatch) -> None:
    def finish_reason(original: Any, self: Sequence) -> Any:
        self.params = replace(self.params, min_tokens=max(0, self.request.message.params.min_tokens - 1))
        return original(self)

    wrap(patch, Sequence, "finish_reason", finish_reason)


@mutant
def deadlines_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "expire", lambda self, now: [])


@mutant
def deadlines_come_too_early(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Scheduler, "expire", lambda original, self, now: original(self, now + 0.5))


@mutant
def the_budget_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    def add(original: Any, self: StepBatch, sequence: Sequence, num_new_tokens: int) -> None:
        budget = self.budget
        original(self, sequence, num_new_tokens)
        self.budget = max(self.budget, min(budget, 1))

    wrap(patch, StepBatch, "add", add)


# -- isolation ------------------------------------------------------------------------------------------------------


@mutant
def isolation_never_clears(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Isolation, "clear", nothing)


@mutant
def isolation_suspects_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Isolation, "after_death", nothing)


@mutant
def isolation_blames_whoever_ran(patch: pytest.MonkeyPatch) -> None:
    def after_death(original: Any, self: Isolation, running: Iterator[Sequence], *, faulted: bool) -> Any:
        sequences = [sequence for sequence in running if not sequence.finished]
        return original(self, sequences, faulted=faulted) or (sequences[0] if sequences and faulted else None)

    wrap(patch, Isolation, "after_death", after_death)


@mutant
def what_a_request_did_is_forgotten_with_its_link(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Isolation, "leave", Isolation.clear)


@mutant
def suspects_that_are_held_back_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    def next_suspect(original: Any, self: Isolation, waiting: object) -> Sequence | None:
        return next(iter(self._suspects), None)

    wrap(patch, Isolation, "next_suspect", next_suspect)


@mutant
def one_death_from_outside_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(isolation, "_OUTSIDE_DEATHS", 1)


@mutant
def an_embedding_is_another_rows(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, StepResult, "embedding_of", lambda original, self, row: next(iter(self.embeddings.values())))


@mutant
def an_embedding_is_lost_with_the_workers(patch: pytest.MonkeyPatch) -> None:
    def lose_workers(original: Any, self: Sequence) -> None:
        num_pending = self.num_pending
        original(self)
        self.num_pending = num_pending * self.embeds

    wrap(patch, Sequence, "lose_workers", lose_workers)


def search(name: str, seeds: range) -> tuple[str, int, str] | None:
    """The first run that finds this mutant, and what it sees."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        for seed in seeds:
            for mode in MODES:
                outcome = simulate(seed, mode)
                if outcome.violation is not None:
                    return mode, seed, outcome.violation
    return None


def is_sound(mode: str, seed: int) -> bool:
    """Whether it is the mutant that the run finds."""
    return simulate(seed, mode).violation is None


def main() -> None:
    """Print the table anew."""
    logging.disable(logging.CRITICAL)
    for name in sys.argv[1:] or MUTANTS:
        found = search(name, range(1500))
        mode = {SAFETY: "SAFETY", LIVENESS: "LIVENESS"}[found[0]] if found else ""
        if found and not is_sound(*found[:2]):
            print(f"# {found[0]} {found[1]} fails without a mutant")
        print(f'    "{name}": ({mode}, {found[1]}),  # {found[2][:70]}' if found else f"# {name} survives", flush=True)


if __name__ == "__main__":
    main()
