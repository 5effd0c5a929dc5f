"""A server with spare workers: ranks and spares die and stop while streams run, and only the log can tell."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from tests.chaos.blows import KILL, STOP, Disturb, Undisturbed, strike, wait_replaced
from tests.chaos.streams import Answer, Streams, run
from tests.servers import RunningServer

pytestmark = [pytest.mark.stage2, pytest.mark.timeout(900)]

RANK, SPARE = "worker 0.0", "worker 0.0 spare"
STANDS_BY, SERVES_AGAIN, SPARE_LOST = "spare workers stand by", "serving again", "the spare workers are lost"
ONE, TWO = ("--spare-workers", "1"), ("--spare-workers", "1", "-tp", "2")
one_rank = pytest.mark.parametrize("undisturbed", [ONE], indirect=True, ids=["tp1"])
two_ranks = pytest.mark.parametrize("undisturbed", [TWO], indirect=True, ids=["tp2"])


def wait_logged(server: RunningServer, words: str, times: int) -> None:
    """Block until the supervisor has said so that often."""
    while server.errors.count(words) < times:
        assert server.process.poll() is None, server.errors
        time.sleep(0.01)  # nothing tells of a line in a log


def assert_exact_under(undisturbed: Undisturbed, disturb: Disturb) -> dict[str, psutil.Process]:
    """Every stream is as if nothing had been, and a spare group stands by again. The processes from before."""
    server = undisturbed.server
    wait_logged(server, STANDS_BY, 1)
    stood, before = server.errors.count(STANDS_BY), server.processes()
    answers: list[Answer] = run(server, lambda streams: disturb(server, streams))
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert answers == undisturbed.answers
    wait_logged(server, STANDS_BY, stood + 1)
    server.wait_until_ready()
    assert server.processes().keys() == before.keys()
    server.wait_until_nothing_is_held()
    return before


@one_rank
@pytest.mark.parametrize("number", [KILL, STOP])
def test_given_a_spare_that_stands_by_when_the_rank_dies_or_stops_then_the_spare_becomes_the_rank(
    undisturbed: Undisturbed, number: int
) -> None:
    server = undisturbed.server
    before = assert_exact_under(undisturbed, lambda server, streams: strike(server, RANK, number))
    assert server.processes()[RANK] == before[SPARE]


@two_ranks
def test_given_spares_of_two_ranks_when_one_rank_dies_then_both_spares_become_the_ranks(
    undisturbed: Undisturbed,
) -> None:
    server = undisturbed.server
    before = assert_exact_under(undisturbed, lambda server, streams: strike(server, "worker 0.1", KILL))
    for title in (RANK, "worker 0.1"):
        assert server.processes()[title] == before[f"{title} spare"]


@one_rank
def test_given_a_spare_that_stands_by_when_it_dies_then_another_one_comes_and_the_rank_serves_on(
    undisturbed: Undisturbed,
) -> None:
    assert_ranks_serve_on(undisturbed, SPARE)


@two_ranks
def test_given_spares_of_two_ranks_when_one_spare_dies_then_others_come_and_the_ranks_serve_on(
    undisturbed: Undisturbed,
) -> None:
    assert_ranks_serve_on(undisturbed, "worker 0.1 spare")


def assert_ranks_serve_on(undisturbed: Undisturbed, title: str) -> None:
    """Kill a spare: the ranks do not notice."""
    server = undisturbed.server
    mended, lost = server.errors.count(SERVES_AGAIN), server.errors.count(SPARE_LOST)
    before = assert_exact_under(undisturbed, lambda server, streams: strike(server, title, KILL))
    after = server.processes()
    assert {name for name in before if before[name] != after[name]} == {name for name in before if "spare" in name}
    assert not {before[name].pid for name in before if "spare" in name} & {process.pid for process in server.tree()}
    assert server.errors.count(SERVES_AGAIN) == mended
    assert server.errors.count(SPARE_LOST) == lost + 1


def stop_the_spare_and_kill_the_rank(server: RunningServer, streams: Streams) -> None:
    strike(server, SPARE, STOP)
    strike(server, RANK, KILL)


def kill_the_rank_and_the_spare_that_became_it(server: RunningServer, streams: Streams) -> None:
    old = strike(server, RANK, KILL)
    wait_replaced(server, RANK, old)
    strike(server, RANK, KILL)


def kill_rays_raylet(server: RunningServer, streams: Streams) -> None:
    next(process for process in server.tree() if process.name() == "raylet").kill()


@one_rank
@pytest.mark.parametrize(
    "disturb",
    [kill_rays_raylet, stop_the_spare_and_kill_the_rank, kill_the_rank_and_the_spare_that_became_it],
)
def test_given_a_spare_when_it_cannot_take_over_or_dies_too_then_a_new_group_is_started(
    undisturbed: Undisturbed, disturb: Disturb
) -> None:
    server = undisturbed.server
    before = assert_exact_under(undisturbed, disturb)
    assert not {before[RANK].pid, before[SPARE].pid} & {process.pid for process in server.tree()}


@pytest.mark.parametrize(("end", "is_loaded"), [(RunningServer.stop, False), (RunningServer.kill, True)])
def test_given_a_spare_when_the_server_stops_or_is_killed_then_nothing_is_left(
    start_server: Callable[..., RunningServer], end: Callable[[RunningServer], None], is_loaded: bool
) -> None:
    server = start_server("--spare-workers", "1")
    if is_loaded:
        wait_logged(server, STANDS_BY, 1)
    while SPARE not in server.processes():
        assert server.process.poll() is None, server.errors
        time.sleep(0.01)
    end(server)  # which looks for all that was there
