"""The waiting queue and the tenants' counters against a model: nobody starves, order within a tenant, true counts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from novainfer.scheduler.fairness import PRESENCE_STEPS, ROW_STEPS, FairShares
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Sequence, make_request
from tests.engine.engine_driver import make_message

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

TENANTS = ("a", "b", "c", "d")
LARGEST = 50  # units that one sequence costs


def sequence_of(arrival: int, tenant: str = "a", **options: object) -> Sequence:
    return make_request(make_message(str(arrival), [1], tenant=tenant, **options), arrival, 0.0).sequences[0]


class Queue(RuleBasedStateMachine):
    """Each sequence costs some units, charged when it starts.

    The bound. Let x wait, m be the smallest counter of those that waited when x came, and h the counter that its
    tenant will have once all that is before x in its own tenant was served. Another tenant with weight w is served only
    while its counter is not above that of x's tenant, which is at most h; and its counter was m or more when it began
    to wait. So it gets at most w * (h - m) units and one sequence more while x waits.
    """

    @initialize(weights=st.tuples(*[st.sampled_from((0.5, 1.0, 3.0))] * len(TENANTS)))
    def begin(self, weights: tuple[float, ...]) -> None:
        self.weights = dict(zip(TENANTS, weights, strict=True))
        self.shares = FairShares(self.weights)
        self.queue = WaitingQueue(self.shares)
        self.cost: dict[Sequence, int] = {}
        self.allowed: dict[Sequence, float] = {}  # units that others may still get while it waits
        self.arrivals = 0

    @rule(tenant=st.sampled_from(TENANTS), cost=st.integers(1, LARGEST), priority=st.sampled_from((0, 0, 1)))
    def push(self, tenant: str, cost: int, priority: int) -> None:
        sequence = sequence_of(self.arrivals, tenant, priority=priority)
        self.arrivals += 1
        self.shares.enter(tenant, 1)
        waiting = {s.tenant for s in self.cost} | {tenant}
        least = min(self.shares.of(name).served for name in waiting)
        if priority == 0:
            before = sum(c for s, c in self.cost.items() if s.tenant == tenant and s.order < sequence.order)
            highest = self.shares.of(tenant).served + before / self.weights[tenant]
            others = [self.weights[name] * (highest - least) + LARGEST for name in TENANTS if name != tenant]
            self.allowed[sequence] = sum(others) + 1e-6
        self.queue.push(sequence)
        self.cost[sequence] = cost

    @precondition(lambda self: self.cost)
    @rule()
    def serve(self) -> None:
        waiting = list(self.cost)
        sequence = self.queue.pop()
        mine = [s for s in waiting if s.tenant == sequence.tenant]
        assert sequence is min(mine, key=lambda s: s.order)
        least = min(self.shares.of(s.tenant).served for s in waiting)
        assert self.shares.of(sequence.tenant).served == least
        cost = self.cost.pop(sequence)
        self.allowed.pop(sequence, None)
        self.shares.charge(sequence.tenant, cost)
        self.shares.leave(sequence.tenant, 0)
        for other in self.allowed:
            if other.tenant != sequence.tenant:
                self.allowed[other] -= cost
                assert self.allowed[other] >= 0, "others were served for longer than the bound"

    @precondition(lambda self: self.cost)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.cost, key=lambda s: s.age)))
        self.queue.remove(sequence)
        self.queue.remove(sequence)  # unknown now, which is fine
        del self.cost[sequence]
        self.allowed.pop(sequence, None)
        self.shares.leave(sequence.tenant, 0)

    @invariant()
    def counts_are_true(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.cost)
        assert all(sequence in self.queue for sequence in self.cost)
        assert self.queue.work == sum(sequence.work_left for sequence in self.cost)
        for name in TENANTS:
            tenant = self.shares.of(name)
            mine = sum(sequence.tenant == name for sequence in self.cost)
            assert tenant.num_waiting == tenant.num_live == mine
            assert tenant.served >= 0
        heads = self.queue.heads()
        assert {head.tenant for head in heads} == {sequence.tenant for sequence in self.cost}


Queue.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestQueue = Queue.TestCase


def test_given_a_sequence_that_waits_when_pushed_again_then_it_is_refused() -> None:
    queue = WaitingQueue(FairShares({}))
    sequence = sequence_of(0)
    queue.push(sequence)
    with pytest.raises(ValueError, match="waits already"):
        queue.push(sequence)
    assert queue.pop() is sequence
    with pytest.raises(IndexError):
        queue.pop()


def test_given_choices_that_are_held_back_when_they_come_or_end_then_their_work_counts_once() -> None:
    queue = WaitingQueue(FairShares({}))
    leader, second, third = make_request(make_message("r", [1, 2], n=3), 0, 0.0).sequences
    queue.hold_back([second, third])
    queue.push(leader)
    assert queue.work == leader.work_left + second.work_left + third.work_left
    queue.take(leader)
    queue.remove(third)
    assert queue.work == second.work_left
    queue.push(second)
    assert queue.work == second.work_left
    queue.remove(second)
    assert queue.work == 0


def test_given_a_sequence_removed_and_pushed_again_when_popped_then_once() -> None:
    queue = WaitingQueue(FairShares({}))
    first, second = sequence_of(0), sequence_of(1)
    for sequence in (first, second):
        queue.push(sequence)
    queue.remove(first)
    queue.push(first)
    assert [queue.pop(), queue.pop()] == [first, second]
    assert queue.peek() is None


def test_given_tenants_when_some_are_long_gone_then_the_others_have_the_whole_again() -> None:
    shares = FairShares({"a": 3.0})
    shares.enter("a", 1)
    assert shares.share(shares.of("a")) == 1.0
    shares.enter("b", 1)
    assert (shares.share(shares.of("a")), shares.share(shares.of("b"))) == (0.75, 0.25)
    assert (shares.rows_due(shares.of("b"), 2), shares.rows_due(shares.of("a"), 8)) == (1, 6)
    shares.leave("b", step=10)
    shares.forget_absent(10 + PRESENCE_STEPS - 1)
    assert shares.num_present == 2
    shares.forget_absent(10 + PRESENCE_STEPS)
    assert (shares.num_present, shares.share(shares.of("a"))) == (1, 1.0)


def test_given_a_tenant_above_its_share_when_others_have_no_row_then_it_leaves_one_to_each() -> None:
    shares = FairShares({})
    for name in ("full", "idle", "idle2"):
        shares.enter(name, 1)
    full = shares.of("full")
    full.num_rows = 5
    assert shares.rows_kept_free(full, 16) == 2 * (full.num_rows >= shares.rows_due(full, 16))
    assert shares.rows_kept_free(full, 15) == 2
    assert shares.rows_kept_free(full, 2) == 1
    assert shares.rows_kept_free(shares.of("idle"), 16) == 0


def test_given_a_tenant_that_has_just_left_when_it_does_not_come_back_then_its_row_is_kept_free_for_a_moment() -> None:
    shares = FairShares({})
    for name in ("full", "gone"):
        shares.enter(name, 1)
    full = shares.of("full")
    full.num_rows = 8
    shares.leave("gone", step=10)
    kept = []
    for step in (10, 10 + ROW_STEPS - 1, 10 + ROW_STEPS):
        shares.forget_absent(step)
        kept.append(shares.rows_kept_free(full, 16))
    assert kept == [1, 1, 0]
    assert shares.num_present == 2


def test_given_sequences_that_leave_from_the_middle_when_many_have_then_the_queue_does_not_keep_them() -> None:
    queue = WaitingQueue(FairShares({}))
    first = sequence_of(0)
    queue.push(first)
    for arrival in range(1, 1000):
        sequence = sequence_of(arrival)
        queue.push(sequence)
        queue.remove(sequence)
    assert sum(len(heap) for heap in queue._heaps.values()) < 100
    assert queue.pop() is first
