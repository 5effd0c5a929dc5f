"""Every parameter at, inside and outside its bounds, over HTTP and past the gateway, also without assertions."""

from __future__ import annotations

from pathlib import Path

import pytest

from novainfer.errors import InvalidRequestError
from novainfer.sampling.params import SamplingParams, validate
from novainfer.transport.addresses import RunDir
from tests.safety.doors import PATHS, Report, serving
from tests.safety.parameters import send_table
from tests.safety.table import CHAT, ENGINE, MESSAGES, RESPONSES, TEXT, TURNS, VOCAB, Outcome, cases
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2


def test_given_the_table_when_cases_are_made_then_every_door_has_over_1200_of_all_outcomes() -> None:
    for door in (CHAT, TEXT, RESPONSES, TURNS, ENGINE):
        every = cases(door)
        assert len(every) >= 1200
        wanted = set(Outcome) if door == ENGINE else {Outcome.ACCEPTED, Outcome.REFUSED}
        assert {case.expected.outcome for case in every} == wanted


def check(reports: dict[str, Report], one_in: int) -> None:
    assert list(reports) == [CHAT, TEXT, RESPONSES, TURNS, ENGINE]
    for report in reports.values():
        assert report.wrong == []
        assert report.deaths == 0
        assert report.cases > 1200 // one_in
        assert report.witnesses


def test_given_hostile_parameters_when_sent_to_either_door_then_each_gets_its_answer_and_nothing_else_changes(
    target: tuple[RunningServer, RunDir],
) -> None:
    check(send_table(*target, one_in=3), 3)


def test_given_no_assertions_when_hostile_parameters_are_sent_then_the_answers_are_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, optimised=True) as (server, run_dir):
        assert server.processes()["worker 0.0"].environ()["PYTHONOPTIMIZE"] == "1"  # as in all above it
        check(send_table(server, run_dir, one_in=9), 9)


@pytest.mark.parametrize(
    ("name", "value", "beside", "bounds"),
    [("top_logprobs", 21, {"logprobs": True}, "0 and 20"), ("max_completion_tokens", 0, {}, "1 and 2147483647")],
)
def test_given_a_field_with_another_name_inside_when_it_is_wrong_then_the_answer_has_the_clients_name(
    target: tuple[RunningServer, RunDir], name: str, value: int, beside: dict[str, object], bounds: str
) -> None:
    with target[0].http() as http:
        error = http.post(PATHS[CHAT], json={"messages": MESSAGES, name: value, **beside}).json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name} must be between {bounds}.")


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["large", "small"])
@pytest.mark.parametrize("name", ["temperature", "n", "seed", "logprobs"])
def test_given_an_integer_beyond_every_float_when_validated_then_the_request_is_refused(name: str, value: int) -> None:
    """Offline there is no JSON and no codec in front of it."""
    with pytest.raises(InvalidRequestError) as caught:
        validate(SamplingParams(**{name: value}), vocab_size=VOCAB)
    assert caught.value.param == name
