"""What a scheduler learns of the time that steps take, and how many rows of a heavy tenant that allows."""

from __future__ import annotations

import math
import random

import pytest

from novainfer.scheduler.pace import MOST_GROWTH, UNDISTURBED_SECONDS, StepPace

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


def learnt(fixed: float, per_row: float, per_context: float, *, noise: float = 0.0) -> StepPace:
    """From 300 steps of 1 to 64 rows with up to 2000 tokens of context each."""
    rng = random.Random(3)
    pace = StepPace()
    for _ in range(300):
        rows, length = rng.randrange(1, 65), rng.randrange(10, 2000)
        seconds = fixed + per_row * rows + per_context * rows * length
        pace.observe(seconds * (1 + noise * rng.uniform(-1, 1)), rows, rows * length)
    return pace


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_given_steps_that_grow_with_context_when_rows_are_asked_for_then_a_step_grows_no_more_than_allowed(
    noise: float,
) -> None:
    pace = learnt(0.01, 0.0001, 2e-6, noise=noise)
    base = [1000] * 8  # 27 ms by themselves
    allowed = pace.rows_allowed(base, [2000] * 56)
    seconds = 0.01 + 0.0001 * (8 + allowed) + 2e-6 * (8000 + 2000 * allowed)
    assert seconds == pytest.approx(MOST_GROWTH * 0.0268, rel=0.15)


def test_given_steps_that_hardly_grow_when_rows_are_asked_for_then_all_may_run() -> None:
    assert learnt(0.025, 0.00001, 1e-9).rows_allowed([100] * 8, [2000] * 56) == 56


def test_given_short_steps_when_rows_are_asked_for_then_up_to_the_time_that_disturbs_nobody() -> None:
    allowed = learnt(0.001, 0.001, 0.0).rows_allowed([], [100] * 56)
    assert 0.001 + 0.001 * allowed == pytest.approx(UNDISTURBED_SECONDS, abs=0.0015)


def test_given_few_steps_when_rows_are_asked_for_then_nothing_is_known_and_all_may_run() -> None:
    pace = StepPace()
    for _ in range(19):
        pace.observe(1.0, 64, 64_000)
    assert pace.rows_allowed([10], [1000] * 60) == 60
    pace.observe(1.0, 64, 64_000)
    assert pace.rows_allowed([10], [1000] * 60) < 60


def test_given_what_was_learnt_when_more_tokens_are_asked_for_then_as_many_as_fill_the_time() -> None:
    pace = learnt(0.01, 0.001, 1e-6)
    more = pace.more_tokens(0.2, 8, 8000)  # which take 26 ms
    assert more == pytest.approx(174, rel=0.05)
    assert pace.more_tokens(0.2, 8, 48_000) == pytest.approx(more - 40, rel=0.1)
    assert pace.more_tokens(0.02, 8, 8000) < 0


def test_given_few_steps_or_none_that_differ_when_more_tokens_are_asked_for_then_there_is_no_bound() -> None:
    pace = StepPace()
    assert pace.more_tokens(0.2, 8, 8000) == math.inf
    for _ in range(100):
        pace.observe(0.05, 8, 8000)
    assert pace.more_tokens(0.2, 8, 8000) == math.inf


def test_given_many_decodes_since_the_last_prompt_when_more_tokens_are_asked_for_then_its_price_is_remembered() -> None:
    pace = learnt(0.04, 0.002, 0.0)
    for number in range(3000):
        pace.observe(0.04 + 0.002 * (4 + number % 2), 4 + number % 2, 4000)
    assert pace.more_tokens(0.2, 4, 4000) == pytest.approx(76, rel=0.05)


def test_given_one_prompt_in_a_long_talk_when_more_tokens_are_asked_for_long_after_then_it_has_told_the_price() -> None:
    pace = StepPace()
    for number in range(2000):
        tokens = 100 if number in (500, 501) else 1
        pace.observe(0.04 + 0.002 * tokens, tokens, 500)
    assert pace.more_tokens(0.2, 1, 500) == pytest.approx(79, rel=0.1)


def test_given_what_was_learnt_when_a_step_takes_longer_than_disturbs_nobody_then_it_is_long() -> None:
    pace = learnt(0.001, 0.001, 0.0)
    assert not pace.is_long(10, 1000)
    assert pace.is_long(25, 1000)
    assert not StepPace().is_long(1000, 1_000_000), "nothing is known"
