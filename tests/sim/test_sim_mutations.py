"""Every bug of `mutants` is found by the seed that is named beside it."""

from __future__ import annotations

import pytest

from novainfer.sim.faults import Fault
from novainfer.sim.simulation import LIVENESS, SAFETY, simulate
from tests.sim.mutants import MUTANTS

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

FOUND_BY: dict[str, tuple[str, int]] = {
    "inbox_sees_no_gap": (SAFETY, 53),
    "a_successor_may_go_on_with_the_link": (LIVENESS, 419476),
    "held_outputs_are_lost": (LIVENESS, 0),
    "held_state_of_the_engine_goes_before_held_outputs": (LIVENESS, 35),
    "beats_wait_for_credit": (LIVENESS, 26),
    "credit_never_comes_back": (LIVENESS, 0),
    "unlinked_is_ignored": (LIVENESS, 4),
    "a_new_link_sends_no_journal": (LIVENESS, 4),
    "a_new_link_leaves_the_old_requests_running": (LIVENESS, 26),
    "finished_choices_are_not_cancelled_after_resume": (SAFETY, 754),
    "a_cancel_does_not_reach_the_engine": (SAFETY, 44),
    "the_journal_forgets_the_last_word": (LIVENESS, 3),
    "claim_without_tenant_check": (SAFETY, 77),
    "claimed_requests_are_taken_out_at_once": (SAFETY, 3),
    "a_claim_is_lent_twice": (SAFETY, 11),
    "what_is_given_back_stays_lent": (SAFETY, 3),
    "orphans_never_expire": (SAFETY, 11),
    "orphans_are_cancelled_at_once": (SAFETY, 3),
    "the_last_outputs_die_with_the_gateway": (SAFETY, 23),
    "results_of_other_epochs_count": (LIVENESS, 4),
    "hellos_of_other_groups_count": (LIVENESS, 4),
    "idle_ranks_are_trusted": (LIVENESS, 69),
    "every_adopt_is_answered": (SAFETY, 100818),
    "adopted_ranks_keep_their_rows": (LIVENESS, 4),
    "the_account_of_held_blocks_only_grows": (LIVENESS, 32),
    "an_old_order_counts": (LIVENESS, 1788),
    "release_forgets_the_first_block": (SAFETY, 0),
    "a_table_is_released_twice": (SAFETY, 1),
    "a_fork_takes_no_references": (SAFETY, 1),
    "a_shared_block_is_written_to": (SAFETY, 1),
    "a_block_is_taken_with_its_old_index_entry": (SAFETY, 8),
    "blocks_enter_the_index_before_they_are_computed": (LIVENESS, 14),
    "what_is_not_finite_stays_in_the_index": (SAFETY, 1793),
    "the_prefix_index_outlives_the_workers": (SAFETY, 41),
    "all_tenants_share_prefixes": (SAFETY, 1),
    "freed_rows_are_not_told": (SAFETY, 0),
    "drafts_get_no_slots": (SAFETY, 0),
    "drafts_in_flight_are_forgotten": (SAFETY, 2),
    "drafts_that_came_true_are_not_computed": (SAFETY, 0),
    "preemption_forgets_pending_tokens": (SAFETY, 11),
    "preemption_loses_a_token": (LIVENESS, 11),
    "loss_of_workers_leaves_pending_tokens": (SAFETY, 8),
    "loss_of_workers_leaves_the_prompt_computed": (SAFETY, 246),
    "followers_are_not_released": (LIVENESS, 1),
    "a_sequence_that_ends_stays_in_the_queue": (SAFETY, 2),
    "min_tokens_is_one_too_few": (SAFETY, 2),
    "deadlines_do_not_count": (SAFETY, 82),
    "deadlines_come_too_early": (SAFETY, 4),
    "the_budget_is_not_kept": (SAFETY, 8),
    "isolation_never_clears": (SAFETY, 59),
    "isolation_suspects_nobody": (LIVENESS, 86),
    "isolation_blames_whoever_ran": (SAFETY, 164),
    "suspects_that_are_held_back_are_waited_for": (LIVENESS, 605316),
    "one_death_from_outside_is_enough": (SAFETY, 1259),
    "an_embedding_is_another_rows": (LIVENESS, 25),
    "an_embedding_is_lost_with_the_workers": (SAFETY, 396),
}
# With faults of its own.
FOUND_WITH = {
    "any_plan_may_be_the_first": (SAFETY, 18, [Fault(0.25, "drop", "rank wire", 1, 0.0, 3)]),
    "what_a_request_did_is_forgotten_with_its_link": (
        SAFETY,
        524425,
        [
            Fault(0.473, "poison", "request", 2, 0.0, 5),
            Fault(2.89, "drop", "gateway wire", 0, 0.0, 7),
            Fault(6.257, "reset", "gateway wire", 0, 0.0, 0),
            Fault(7.5, "cut", "gateway wire", 0, 1.5, 6),
        ],
    ),
}
# What nothing shows, because something else stands behind it: why.
HARMLESS = {
    "inbox_takes_packets_twice": "tokens keep their indexes up to the journal, which takes each once",
    "plans_of_a_replaced_scheduler_run": "a connection keeps its order: `Adopt` comes after all older plans",
    "an_overlap_keeps_all_logprobs": "nothing comes twice over a link, so there is no overlap to cut",
}
# Holes of the net: no run has found these yet.
HOLES: tuple[str, ...] = (
    "faults_of_other_groups_count",
    "preemption_leaves_the_generation",
)


@pytest.mark.parametrize("name", FOUND_BY)
def test_given_a_bug_in_the_machines_when_its_seed_runs_then_it_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mode, seed = FOUND_BY[name]
    assert simulate(seed, mode).violation is None
    MUTANTS[name](monkeypatch)
    found = simulate(seed, mode).violation
    assert found is not None
    assert not found.startswith("AttributeError"), "the bug is in the mutant"


@pytest.mark.parametrize("name", FOUND_WITH)
def test_given_a_bug_in_the_machines_when_its_own_faults_strike_then_it_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mode, seed, faults = FOUND_WITH[name]
    assert simulate(seed, mode, faults=faults).violation is None
    MUTANTS[name](monkeypatch)
    assert simulate(seed, mode, faults=faults).violation is not None


def test_given_all_bugs_when_counted_then_each_has_its_seed_or_its_reason() -> None:
    assert sorted(MUTANTS) == sorted([*FOUND_BY, *FOUND_WITH, *HARMLESS, *HOLES])
    assert len(FOUND_BY) >= 40
