"""The cohort changes nothing: random histories give the same plans, outputs and states with it and without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from novainfer.config import CacheConfig, KeyDigest, SchedulerConfig, ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.errors import InvalidRequestError, OverloadedError
from novainfer.protocol.messages import AddRequest, TokenOutput
from novainfer.scheduler.assembly import members_alone
from novainfer.scheduler.batch import StepRecord
from novainfer.scheduler.cohort import Cohort
from novainfer.scheduler.newest import NewestTokens
from novainfer.scheduler.request import Sequence
from tests.engine.engine_driver import make_message
from tests.oracle import OracleExecutor

pytestmark = pytest.mark.stage1

VOCAB = 50
# The last five: only in these do steps that may have drafts come where the cohort is alone and has none in between.
SEEDS = (*range(60), 67, 125, 165, 176, 229)


class Player:
    """Plays the history of a seed; `log` is everything that can be seen of it."""

    def __init__(self, seed: int, *, has_cohort: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.has_cohort = has_cohort
        self.log: list[object] = []
        self.most_members = 0
        self.num_steps_with_both = 0  # in which some were members and some were not
        self.num_members_who_draft = 0  # over all turns: members that may have drafts in other steps
        self._number = 0
        self._now = 0.0
        self._tenants = rng.choice((("a",), ("a",), ("a", "b"), ("a", "b", "c")))
        drafts = rng.random() < 0.3
        self._size: dict[str, Any] = {
            "num_blocks": rng.choice((20, 60, 200)),
            "block_size": rng.choice((1, 2, 4, 4, 8, 16)),
            "max_num_seqs": rng.choice((1, 3, 8, 8, 8)),
            "can_draft": drafts,
        }
        self._specials = rng.choice((0.0, 0.0, 0.1, 0.5))  # part of the requests that want more than plain tokens
        config = ServeConfig(
            scheduler=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=rng.choice((4, 16, 2048)),
                steps_in_flight=rng.choice((1, 2, 2)),
                max_waiting=64,
                queue_timeout=rng.choice((0.0, 0.5)),
                speculation="prompt-lookup" if drafts else "none",
            ),
            cache=CacheConfig(enable_prefix_caching=rng.random() < 0.8),
            keys=tuple(KeyDigest(name, "", weight) for name, weight in zip("abc", (1.0, 3.0, 0.7), strict=True)),
        )
        self.executor = OracleExecutor(**self._size)
        self.engine = EngineCore(self.executor, config)
        self._use_cohort_or_not()

    @property
    def cohort(self) -> Cohort:
        return self.engine.scheduler._rows.cohort

    def play(self, num_turns: int) -> None:
        actions: list[tuple[Callable[[], None], float]] = [
            (self._add, 0.5),
            (self._cancel, 0.06),
            (self._lose_workers, 0.01),
            (self._spoil_a_row, 0.01),
            (self._dissolve, 0.05),
            (self._collect, 0.7),
        ]
        for turn in range(num_turns):
            if turn < num_turns - 60:
                for action, chance in actions:
                    if self.rng.random() < chance:
                        action()
            else:
                self._collect()
            self._now += 0.01
            self._see(self.engine.scheduler.expire(self._now))
            self.log.append(self.engine.scheduler.give_up_waiting(self._now))
            self.engine.submit()
            self.log.append(self.executor.plans.copy())
            self.executor.plans.clear()
            self._look()

    def _use_cohort_or_not(self) -> None:
        if not self.has_cohort:
            self.cohort.admits = lambda sequence: False  # type: ignore[method-assign]

    def _see(self, outputs: list[TokenOutput]) -> None:
        self.log += outputs

    def _add(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]  # short ones of few tokens are often the same
        is_special = rng.random() < self._specials
        self._number += 1
        message = make_message(
            f"r{self._number}",
            prompt,
            seed=rng.randrange(3),
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.randint(1, 40),
            min_tokens=rng.choice((0, 0, 2)),
            stop_token_ids=rng.choice(((), (), (7,), (3, 11, 12), tuple(range(100, 165)))),
            logprobs=0 if is_special and rng.random() < 0.5 else None,
            prompt_logprobs=0 if is_special and rng.random() < 0.2 else None,
            tenant=rng.choice(self._tenants),
            ref=-1 if is_special and rng.random() < 0.5 else 10 * self._number,
            deadline=rng.choice((0.0, 0.0, 0.3)),
            priority=rng.choice((0, 0, 1)),
        )
        self._send(message)

    def _send(self, message: AddRequest) -> None:
        try:
            self._see(self.engine.add(message, self._now))
        except (InvalidRequestError, OverloadedError) as error:
            self.log.append(str(error))

    def _cancel(self) -> None:
        name = f"r{self.rng.randint(max(self._number - 12, 1), max(self._number, 1))}"
        self._see(self.engine.cancel(name, self.rng.choice((-1, -1, 0, 1)), complete=self.rng.random() < 0.5))

    def _lose_workers(self) -> None:
        self._see(self.engine.lose_workers(faulted=self.rng.random() < 0.5))
        self.executor = OracleExecutor(**self._size)
        self._see(self.engine.attach_workers(self.executor))
        self._use_cohort_or_not()

    def _spoil_a_row(self) -> None:
        self.executor.bad_rows = {self.rng.randrange(8)} if self.rng.random() < 0.5 else set()

    def _dissolve(self) -> None:
        """Nobody may see that all leave; then their own counters are what they would be without the cohort."""
        self.cohort.dissolve()
        for sequence in self._live():
            s = sequence
            counters = (s.num_pending, s.num_confirmed_tokens, s.num_charged_tokens, s.last_step, s.work, s.generation)
            self.log.append((s.request_id, s.choice, list(s.token_ids), s.num_computed_tokens, counters))

    def _collect(self) -> None:
        outputs = self.engine.collect(None)
        if outputs is not None:
            plain = outputs.plain
            assert [s.ref for s in plain.sequences] == plain.refs.tolist()
            indexes = [plain.base + index for index in plain.offsets]
            assert plain.begun == [place for place, index in enumerate(indexes) if index == 0]
            self.log.append((plain.refs.tolist(), indexes, plain.token_ids.tolist()))
            self._see(outputs.outputs)
            self.log.append(outputs.prompt_logprobs)

    def _live(self) -> Iterator[Sequence]:
        return (s for request in self.engine.scheduler.requests.values() for s in request.sequences if not s.finished)

    def _look(self) -> None:
        scheduler, cohort = self.engine.scheduler, self.cohort
        for s in self._live():
            self.log.append((s.request_id, s.choice, s.row, cohort.num_computed(s), s.table.blocks.copy()))
        if self.rng.random() < 0.1:
            for request in scheduler.requests.values():
                scheduler.settle(request)
                self.log.append([(list(s.token_ids), s.num_confirmed_tokens) for s in request.sequences])
        served = [scheduler._shares.of(name).served for name in self._tenants]
        self.log.append((served, str(scheduler.totals), scheduler.queue_seconds, sorted(scheduler.kv.index._by_key)))
        for record in scheduler._in_flight:
            begun = [(s.request_id, s.choice) for s in record.begun]
            self.log.append((record.step, record.counts, record.num_tokens, record.context, begun))
        members = len(scheduler.running) - len(cohort.others)
        self.most_members = max(self.most_members, members)
        self.num_steps_with_both += bool(members and cohort.others)
        self.num_members_who_draft += sum(bool(s.joined) and s.drafts is not None for s in scheduler.running)


def played(seed: int, *, has_cohort: bool) -> Player:
    """Its history to the end."""
    player = Player(seed, has_cohort=has_cohort)
    player.play(400)
    assert has_cohort or player.most_members == 0
    return player


def is_same(seed: int) -> bool:
    """Whether both ways give the same."""
    return played(seed, has_cohort=True).log == played(seed, has_cohort=False).log


class Use(NamedTuple):
    """How a history used the cohort."""

    most_members: int
    num_steps_with_both: int
    num_members_who_draft: int


def use_of(player: Player) -> Use:
    return Use(player.most_members, player.num_steps_with_both, player.num_members_who_draft)


@pytest.fixture(scope="module")
def uses() -> dict[int, Use]:
    """By seed, of the histories that were played."""
    return {}


@pytest.mark.parametrize("seed", SEEDS)
def test_given_a_random_history_when_played_without_it_or_to_every_plans_end_then_all_that_can_be_seen_is_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch, uses: dict[int, Use]
) -> None:
    player = played(seed, has_cohort=True)
    uses[seed] = use_of(player)
    assert player.log == played(seed, has_cohort=False).log
    monkeypatch.setattr(Cohort, "may_go_on", lambda cohort: True)
    monkeypatch.setattr("novainfer.scheduler.scheduler.members_alone", lambda *arguments, **named: None)
    assert player.log == played(seed, has_cohort=True).log
    for sequence in player.engine.scheduler.running:
        player.cohort.leave(sequence)
    assert player.cohort._sum_computed == 0
    assert not any((player.cohort._stop_ids, player.cohort._tenants, player.cohort._last_steps))


def test_given_the_histories_when_played_then_the_cohort_is_used_alone_and_beside_others(uses: dict[int, Use]) -> None:
    found = [uses.get(seed) or use_of(played(seed, has_cohort=True)) for seed in SEEDS[:30]]
    assert sum(use.most_members >= 4 for use in found) > 5
    assert sum(use.num_steps_with_both > 50 for use in found) > 5
    assert sum(use.num_members_who_draft > 20 for use in found) > 4


def lose_a_token(patch: pytest.MonkeyPatch) -> None:
    settle = Cohort.settle

    def settles(self: Cohort, sequence: Sequence) -> None:
        before = len(sequence.token_ids)
        settle(self, sequence)
        if len(sequence.token_ids) > before + 1:
            sequence.token_ids[-1], sequence.token_ids[-2] = sequence.token_ids[-2:]

    patch.setattr(Cohort, "settle", settles)


def turn_round_what_is_settled_together(patch: pytest.MonkeyPatch) -> None:
    of_row = NewestTokens.of_row
    patch.setattr(NewestTokens, "of_row", lambda self, row, step: of_row(self, row, step)[::-1])


def leave_results_in_the_order_of_rows_that_went(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewestTokens, "_sort", lambda self: None)


def index_too_late(patch: pytest.MonkeyPatch) -> None:
    phases_of = Cohort._phases_of

    def phases(self: Cohort, sequence: Sequence) -> Any:
        growth, index = phases_of(self, sequence)
        phases = self._index_phases
        return growth, phases[next(i for i, phase in enumerate(phases) if phase is index) - 1]

    patch.setattr(Cohort, "_phases_of", phases)


def grow_too_late(patch: pytest.MonkeyPatch) -> None:
    starting = Cohort.starting_blocks
    patch.setattr(Cohort, "starting_blocks", lambda self, step: starting(self, step - 1))


def miss_the_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "let_end", lambda self, step: None)


def miss_what_is_odd(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "let_out", lambda self, record, result: None)


def forget_plans_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRecord, "single_out", lambda self, members: None)


def admit_who_computes_again(patch: pytest.MonkeyPatch) -> None:
    admits = Cohort.admits

    def admits_more(sequence: Sequence) -> bool:
        charged, sequence.num_charged_tokens = sequence.num_charged_tokens, 0
        found = admits(sequence)
        sequence.num_charged_tokens = charged
        return found

    patch.setattr(Cohort, "admits", staticmethod(admits_more))


def charge_once(patch: pytest.MonkeyPatch) -> None:
    bring_up_to_date = Cohort._bring_up_to_date

    def brings(self: Cohort, sequences: list[Sequence], *arguments: Any) -> None:
        work = [sequence.work for sequence in sequences]
        bring_up_to_date(self, sequences, *arguments)
        for sequence, before in zip(sequences, work, strict=True):
            sequence.work -= (sequence.work - before) // 2

    patch.setattr(Cohort, "_bring_up_to_date", brings)


def forget_that_some_may_draft(patch: pytest.MonkeyPatch) -> None:
    never = SimpleNamespace(is_quiet=lambda step, rows: True)

    def alone(placement: Any, shares: Any, drafting: Any, budget: int, *, step: int) -> Any:
        return members_alone(placement, shares, never, budget, step=step)  # type: ignore[arg-type]

    patch.setattr("novainfer.scheduler.scheduler.members_alone", alone)


@pytest.mark.parametrize(
    "break_it",
    [
        forget_that_some_may_draft,
        lose_a_token,
        turn_round_what_is_settled_together,
        leave_results_in_the_order_of_rows_that_went,
        index_too_late,
        grow_too_late,
        miss_the_length,
        miss_what_is_odd,
        forget_plans_in_flight,
        admit_who_computes_again,
        charge_once,
    ],
)
def test_given_a_bug_in_the_cohort_when_histories_are_played_then_one_of_them_shows_it(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_it(monkeypatch)
    assert any(shows_a_fault(seed) for seed in reversed(SEEDS))


def shows_a_fault(seed: int) -> bool:
    try:
        return not is_same(seed)
    except Exception:  # the oracle's checks, or an impossible state
        return True
