"""What is remembered of requests that ended after a death: enough of them, not all for ever."""

from __future__ import annotations

import pytest

from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams
from novainfer.scheduler import isolation
from novainfer.scheduler.isolation import Isolation
from novainfer.scheduler.request import Sequence, make_request

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

MOST = isolation._REMEMBERED


def sequences(number: int, n: int = 1) -> list[Sequence]:
    """The choices of a request, as new each time that it is sent."""
    return make_request(AddRequest(str(number), [1], SamplingParams(n=n)), number, 0.0).sequences


def suspect(state: Isolation, number: int) -> Sequence:
    """A request that comes, and in whose step the workers die."""
    (sequence,) = sequences(number)
    assert state.come(sequence)
    state.runs_alone(None)
    assert state.after_death([sequence], faulted=True) is None
    return sequence


def is_suspected_again(state: Isolation, number: int) -> bool:
    """Whether the request, sent again, is known; then it is no more remembered here, but lives."""
    (sequence,) = sequences(number)
    assert state.come(sequence)
    return sequence in state


def test_given_as_many_as_are_remembered_when_they_are_sent_again_then_all_are_known() -> None:
    state = Isolation()
    for number in range(MOST):
        state.leave(suspect(state, number))
    assert all(is_suspected_again(state, number) for number in range(MOST))


def test_given_more_than_are_remembered_when_they_are_sent_again_then_those_that_left_first_are_new() -> None:
    state = Isolation()
    gone = [suspect(state, number) for number in range(MOST + 3)]
    for sequence in reversed(gone):
        state.leave(sequence)
    known = [is_suspected_again(state, number) for number in range(MOST + 3)]
    assert known == [True] * MOST + [False] * 3


def test_given_one_that_was_sent_again_when_it_leaves_once_more_then_it_is_the_last_to_be_forgotten() -> None:
    state = Isolation()
    for number in range(MOST):
        state.leave(suspect(state, number))
    (again,) = sequences(0)
    assert state.come(again)
    state.leave(again)
    state.leave(suspect(state, MOST))
    assert [is_suspected_again(state, number) for number in (0, 1, 2)] == [True, False, True]


@pytest.mark.parametrize(
    ("num_others", "may_come"), [(MOST - 2, [False, False]), (MOST - 1, [True, False]), (MOST, [True, True])]
)
def test_given_choices_that_were_given_up_when_many_others_leave_then_they_are_forgotten_one_by_one(
    num_others: int, may_come: list[bool]
) -> None:
    state = Isolation()
    given_up = sequences(0, n=2)
    state.after_death(given_up, faulted=True)
    for sequence in given_up:
        state.runs_alone(sequence)
        assert state.after_death([sequence], faulted=True) is sequence
        state.leave(sequence)
    for number in range(1, num_others + 1):
        state.leave(suspect(state, number))
    assert [state.come(sequence) for sequence in sequences(0, n=2)] == may_come


def test_given_requests_in_no_death_when_they_leave_then_nobody_is_forgotten_for_them() -> None:
    state = Isolation()
    state.leave(suspect(state, 0))
    for number in range(1, MOST + 2):
        (sequence,) = sequences(number)
        assert state.come(sequence)
        state.leave(sequence)
    assert is_suspected_again(state, 0)


def test_given_a_choice_that_was_given_up_when_it_is_sent_again_and_again_then_it_never_runs() -> None:
    state = Isolation()
    (given_up,) = sequences(0)
    state.after_death([given_up], faulted=True)
    state.runs_alone(given_up)
    state.after_death([given_up], faulted=True)
    state.leave(given_up)
    for number in range(1, 2 * MOST):
        state.leave(suspect(state, number))
        assert not any(map(state.come, sequences(0)))
