"""Which steps have drafts: those in which all of them together pay, and a few to see whether they would."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from novainfer.scheduler.drafting import Drafting
from novainfer.scheduler.drafts import DraftPace
from novainfer.scheduler.pace import StepPace

pytestmark = pytest.mark.unit

STEP, ONE_MORE = 0.01, 0.0001  # seconds: of a step, and of a token more in it
SHORT = 0.0003  # a step in which looks are not for nothing
_COHORT: Any = SimpleNamespace(num_computed=lambda sequence: sequence.num_computed_tokens)


def running(rows: list[Any], num_taken: int = 0) -> Any:
    """num_taken: more than before where the list has a new one."""
    return SimpleNamespace(running=rows, cohort=_COHORT, num_taken=num_taken)


def row(drafts: DraftPace | None = None) -> Any:
    """A decode with much to come."""
    return SimpleNamespace(
        drafts=drafts, joined=0, num_computed_tokens=100, num_tokens=101, num_ahead=0, end_len=1000, age=(0, 0)
    )


def learnt(price: float, step: float = STEP) -> StepPace:
    """From steps of up to 16 rows, every tenth with drafts, which add `price` seconds beside the tokens' own."""
    pace, rng = StepPace(), random.Random(5)
    for number in range(400):
        rows, drafted = rng.randrange(1, 17), rng.randrange(4, 12) * (number % 10 == 0)
        seconds = step * (1.0 + (rows + drafted) * ONE_MORE / STEP) + price * (drafted > 0)
        pace.observe(seconds, rows, rng.randrange(100, 3000), drafted)
    return pace


def told(pace: DraftPace, *, is_true: bool, looks: int = 20) -> DraftPace:
    """After so many looks, each of which found drafts."""
    for _ in range(looks):
        pace.observe(6, 6 if is_true else 0)
    pace.is_tried = True
    return pace


def steps_with_drafts(drafting: Drafting, rows: list[Any], first: int = 1, last: int = 256) -> list[int]:
    return [step for step in range(first, last + 1) if drafting.choose(step, running(rows, id(rows)), room=96)]


def test_given_drafts_when_measured_then_their_price_is_known_apart_from_their_tokens() -> None:
    pace = learnt(0.004)
    seconds = pace.step_seconds(16, 1600)
    assert seconds == pytest.approx(STEP + 16 * ONE_MORE, rel=0.05)
    assert pace.cost_of_drafts(16, 1600) * seconds / 16 == pytest.approx(0.004, rel=0.2)
    assert pace.cost_of_token(16, 1600) * seconds / 16 == pytest.approx(ONE_MORE, rel=0.1)


def test_given_nothing_measured_with_drafts_when_asked_then_they_count_as_dear() -> None:
    pace = StepPace()
    for number in range(400):
        pace.observe(STEP, 1 + number % 16, 100)
    assert pace.cost_of_drafts(16, 100) > 1.0


def test_given_text_that_repeats_itself_when_drafts_come_true_then_each_step_has_them() -> None:
    rows = [row(told(DraftPace(), is_true=True)) for _ in range(4)]
    assert steps_with_drafts(Drafting(learnt(0.004)), rows) == list(range(1, 257))


def test_given_one_row_of_many_when_its_drafts_cannot_pay_for_the_step_then_they_are_tried_now_and_then() -> None:
    rows = [row(told(DraftPace(), is_true=True)), *[row() for _ in range(15)]]
    assert steps_with_drafts(Drafting(learnt(0.02)), rows) == [64, 128, 192, 256]


def test_given_a_new_row_when_it_looks_for_the_first_time_then_it_may_have_drafts_and_the_others_not() -> None:
    drafting, old = Drafting(learnt(0.02)), row(told(DraftPace(), is_true=False))
    others = [old, *[row() for _ in range(14)]]
    assert steps_with_drafts(drafting, others, last=10) == []
    new = row(DraftPace())
    rows, found = running([*others, new], 1), {}
    for step in range(11, 60):
        found[step] = drafting.choose(step, rows, room=96)
        if found[step] and step > 16:
            new.drafts.is_tried = True  # it got them; the first time there was no room after all
    steps = [step for step, chosen in found.items() if chosen]
    assert len(steps) > 1
    assert all(list(found[step]) == [id(new)] for step in steps)
    assert steps[-2] <= 16 < steps[-1] <= 48, "and no more once it had them"


def test_given_drafts_that_come_true_when_told_then_the_next_step_has_them_and_not_only_the_next_look() -> None:
    drafting, one = Drafting(learnt(0.0, SHORT)), row(DraftPace(vain=8, is_tried=True))  # looks in every 16th step
    rows = running([one])
    assert [step for step in range(64, 71) if drafting.choose(step, rows, room=96)] == [64]
    told(one.drafts, is_true=True)
    assert not drafting.choose(71, rows, room=96), "nobody has said so"
    drafting.reconsider()
    assert [step for step in range(72, 80) if drafting.choose(step, rows, room=96)] == list(range(72, 80))


def test_given_drafts_that_would_not_pay_when_asked_then_their_row_looks_ever_more_seldom() -> None:
    one = row(told(DraftPace(), is_true=True))
    drafting, rows, looks = Drafting(learnt(0.003, SHORT)), running([one]), []
    for step in range(65, 128):
        if not drafting.is_quiet(step, rows):
            looks.append(step)
            assert not drafting.choose(step, rows, room=96)
    assert looks[:6] == [65, 66, 68, 70, 72, 76]
    assert len(looks) < 16
    assert drafting.choose(128, rows, room=96), "but is tried now and then"


def test_given_no_room_or_nobody_who_may_when_asked_then_there_are_none() -> None:
    drafting = Drafting(learnt(0.004))
    assert steps_with_drafts(drafting, [row() for _ in range(4)]) == []
    assert drafting.choose(300, running([row(told(DraftPace(), is_true=True))], 1), room=0) == {}
    assert steps_with_drafts(drafting, []) == []


def test_given_little_room_when_drafts_are_chosen_then_they_fit() -> None:
    rows = [row(told(DraftPace(), is_true=True)) for _ in range(4)]
    chosen = Drafting(learnt(0.004)).choose(1, running(rows), room=7)
    assert sum(chosen.values()) == 7


def test_given_a_row_at_its_end_when_drafts_are_chosen_then_it_has_none_behind_it() -> None:
    last = row(told(DraftPace(), is_true=True))
    last.end_len = 103  # two more tokens, the second of which may be a draft
    assert Drafting(learnt(0.0)).choose(64, running([last]), room=96) == {id(last): 1}
    last.end_len = 102
    assert Drafting(learnt(0.0)).choose(64, running([last]), room=96) == {}


def test_given_nobody_ran_for_a_moment_when_a_row_comes_soon_after_drafts_then_it_is_looked_at_as_before() -> None:
    """One request after the other, each as soon as the one before has ended."""
    drafting = Drafting(learnt(0.0))
    first, second = row(told(DraftPace(), is_true=True)), row(told(DraftPace(), is_true=True))
    assert drafting.choose(64, running([first]), 64)
    assert drafting.choose(65, running([], 1), 64) == {}
    steps = [step for step in range(66, 98) if drafting.choose(step, running([second], 2), 64)]
    assert len(steps) == 32
