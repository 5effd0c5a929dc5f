"""Which drafts count, and how many a sequence may have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from novainfer.protocol.columns import column
from novainfer.protocol.step import StepPlan
from novainfer.scheduler.drafts import MAX_DRAFTS, DraftPace, look_period
from tests.builders import CPU, limits, new_row
from workers.drafts import NOT_FINITE, true_places
from workers.request_states import RequestStates

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


def states_with_drafts(*drafts: list[int]) -> RequestStates:
    """A row for each, with three known tokens and its drafts behind them."""
    states = RequestStates(limits(), CPU)
    rows = [new_row(i, [40, 41, 42], [i]) for i in range(len(drafts))]
    states.apply(StepPlan(epoch=1, step=0, rows=column(), num_new_tokens=column(), new_rows=rows))
    for row, found in enumerate(drafts):
        states.token_ids[row, 3 : 3 + len(found)] = torch.tensor(found, dtype=torch.int32)
    return states


def test_given_drafts_when_some_are_what_was_sampled_then_those_count_and_the_place_behind_them() -> None:
    states = states_with_drafts([5, 6, 7], [], [5], [5, 6])
    rows = np.array([0, 0, 0, 0, 1, 2, 2, 3, 3, 3])
    ahead = np.array([0, 1, 2, 3, 0, 0, 1, 0, 1, 2])
    tokens = np.array([5, 6, 1, 7, 9, 4, 5, 5, 6, 8])
    kept = true_places(tokens, rows, ahead, states)
    assert kept.tolist() == [True, True, True, False, True, True, False, True, True, True]


def test_given_logits_that_are_not_finite_when_behind_drafts_then_the_places_before_them_count() -> None:
    states = states_with_drafts([5, 6], [5, 6])
    rows, ahead = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    tokens = np.array([5, NOT_FINITE, 6, NOT_FINITE, 6, 7])
    assert true_places(tokens, rows, ahead, states).tolist() == [True, False, False, True, False, False]


@given(cost=st.floats(0.0, 2.0), outcomes=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=30))
def test_given_any_outcomes_when_asked_then_there_are_few_enough_drafts(
    cost: float, outcomes: list[tuple[int, int]]
) -> None:
    pace = DraftPace()
    for drafted, true in outcomes:
        assert 0 <= pace.wanted(cost) <= MAX_DRAFTS
        pace.observe(drafted, min(drafted, true))


def test_given_drafts_that_come_true_when_asked_then_there_are_more() -> None:
    pace = DraftPace()
    first = pace.wanted(0.2)
    for _ in range(5):
        pace.observe(4, 4)
    assert pace.wanted(0.2) > first
    assert pace.wanted(0.04) == MAX_DRAFTS
    assert pace.wanted(0.95) == 0  # they cannot pay


def test_given_drafts_that_never_come_true_when_asked_then_they_become_rare() -> None:
    pace, drafted = DraftPace(), 0
    for _ in range(1000):
        wanted = pace.wanted(0.05)
        drafted += wanted
        pace.observe(wanted, 0)
    assert 10 < drafted < 60


def test_given_looks_in_vain_when_a_step_is_short_then_they_become_rare_until_a_run_of_drafts_comes_true() -> None:
    pace = DraftPace()
    looks = []
    for step in range(1, 129):
        if pace.looks(step, longest_period=16):
            looks.append(step)
            pace.observe(0, 0)
    assert looks[:3] == [4, 8, 16]
    assert looks[-2:] == [112, 128]
    pace.observe(3, 1)
    assert not pace.looks(129, longest_period=16)
    pace.observe(3, 2)
    assert [pace.looks(step, longest_period=16) for step in (129, 130)] == [True, True]


def test_given_looks_in_vain_when_a_step_is_long_then_each_looks_again() -> None:
    assert look_period(4, 0.03) == 1
    assert look_period(4, 0.0) == 1  # not known
    assert look_period(1, 0.001) == 8
    assert look_period(16, 0.001) == 16
    assert look_period(16, 1e-6) == 32
    pace = DraftPace()
    for step in range(20):
        assert pace.looks(step, longest_period=1)
        pace.observe(0, 0)
