"""Processes of a real server are killed and stopped while streams run: every stream goes on as if nothing had been."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.chaos.blows import KILL, STOP, Disturb, Undisturbed, strike, wait_replaced
from tests.chaos.streams import LENGTH, REQUESTS, Streams, run
from tests.servers import RunningServer, assert_gone

pytestmark = [pytest.mark.stage2, pytest.mark.timeout(900)]


def last_rank(server: RunningServer) -> str:
    return max(title for title in server.processes() if title.startswith("worker"))


def of_ray(server: RunningServer, name: str) -> psutil.Process:
    """The process of the Ray instance that is used now: one that was stopped before may not be gone yet."""
    named = [process for process in server.tree() if process.name() == name]
    (running,) = (process for process in named if process.status() != psutil.STATUS_STOPPED)
    return running


def kill_a_rank(server: RunningServer, streams: Streams) -> None:
    strike(server, last_rank(server), KILL)


def stop_a_rank(server: RunningServer, streams: Streams) -> None:
    strike(server, "worker 0.0", STOP)


def kill_the_scheduler(server: RunningServer, streams: Streams) -> None:
    strike(server, "scheduler 0", KILL)


def stop_the_scheduler(server: RunningServer, streams: Streams) -> None:
    strike(server, "scheduler 0", STOP)


def kill_a_rank_and_its_successor(server: RunningServer, streams: Streams) -> None:
    old = strike(server, "worker 0.0", KILL)
    wait_replaced(server, "worker 0.0", old)
    strike(server, "worker 0.0", KILL)


def stop_the_successor_of_the_scheduler(server: RunningServer, streams: Streams) -> None:
    old = strike(server, "scheduler 0", KILL)
    wait_replaced(server, "scheduler 0", old)
    strike(server, "scheduler 0", STOP)  # it has hardly said a word


def kill_the_scheduler_and_its_successor(server: RunningServer, streams: Streams) -> None:
    old = strike(server, "scheduler 0", KILL)
    wait_replaced(server, "scheduler 0", old)
    strike(server, "scheduler 0", KILL)


def stop_the_successor_of_a_rank(server: RunningServer, streams: Streams) -> None:
    old = strike(server, "worker 0.0", KILL)
    wait_replaced(server, "worker 0.0", old)
    strike(server, "worker 0.0", STOP)  # it has hardly said a word, or none


def kill_all_at_once(server: RunningServer, streams: Streams) -> None:
    strike(server, "worker 0.0", KILL)
    strike(server, "scheduler 0", KILL)


def kill_one_after_the_other(server: RunningServer, streams: Streams) -> None:
    for title in ("worker 0.0", "scheduler 0", last_rank(server)):
        strike(server, title, KILL)
        streams.wait_tokens(40)


def kill_the_zygote_of_a_rank(server: RunningServer, streams: Streams) -> None:
    strike(server, "rank zygote", KILL)


def kill_a_rank_and_stop_its_zygote(server: RunningServer, streams: Streams) -> None:
    strike(server, "rank zygote", STOP)
    strike(server, "worker 0.0", KILL)


def kill_the_host_of_a_rank(server: RunningServer, streams: Streams) -> None:
    server.processes()["rank zygote"].parent().kill()


def kill_rays_raylet(server: RunningServer, streams: Streams) -> None:
    of_ray(server, "raylet").kill()


def kill_rays_control_store(server: RunningServer, streams: Streams) -> None:
    of_ray(server, "gcs_server").kill()


def stop_rays_raylet(server: RunningServer, streams: Streams) -> None:
    _stop_until_ranks_are_replaced(server, "raylet")


def stop_rays_control_store(server: RunningServer, streams: Streams) -> None:
    _stop_until_ranks_are_replaced(server, "gcs_server")


def _stop_until_ranks_are_replaced(server: RunningServer, name: str) -> None:
    """Ranks that run do not need it: their streams may end before anybody sees that it is stopped."""
    title = last_rank(server)
    rank = server.processes()[title]
    of_ray(server, name).suspend()
    wait_replaced(server, title, rank)


def stop_rays_raylet_and_kill_the_host_of_a_rank(server: RunningServer, streams: Streams) -> None:
    of_ray(server, "raylet").suspend()
    kill_the_host_of_a_rank(server, streams)


# Each with the group where it says more; `make chaos` has all of them with both.
ONE_RANK: list[Disturb] = [
    kill_a_rank,
    stop_the_successor_of_a_rank,
    stop_the_successor_of_the_scheduler,
    kill_the_scheduler_and_its_successor,
    kill_all_at_once,
    kill_a_rank_and_stop_its_zygote,
    kill_rays_raylet,
    kill_rays_control_store,
    stop_rays_raylet,
    stop_rays_control_store,
    stop_rays_raylet_and_kill_the_host_of_a_rank,
]
TWO_RANKS: list[Disturb] = [
    kill_a_rank,
    stop_a_rank,
    kill_the_scheduler,
    stop_the_scheduler,
    kill_a_rank_and_its_successor,
    kill_all_at_once,
    kill_one_after_the_other,
    kill_the_zygote_of_a_rank,
    kill_the_host_of_a_rank,
]
ONE, TWO = ("-tp", "1"), ("-tp", "2")
one_rank = pytest.mark.parametrize("undisturbed", [ONE], indirect=True, ids=["tp1"])
two_ranks = pytest.mark.parametrize("undisturbed", [TWO], indirect=True, ids=["tp2"])
both_groups = pytest.mark.parametrize("undisturbed", [ONE, TWO], indirect=True, ids=["tp1", "tp2"])


@one_rank
@pytest.mark.parametrize("disturb", ONE_RANK)
def test_given_streams_of_every_kind_when_processes_die_then_each_is_as_if_nothing_had_been(
    undisturbed: Undisturbed, disturb: Disturb
) -> None:
    assert_exact_under(undisturbed, disturb)


@two_ranks
@pytest.mark.parametrize("disturb", TWO_RANKS)
def test_given_streams_of_every_kind_when_processes_of_two_ranks_die_then_each_is_as_if_nothing_had_been(
    undisturbed: Undisturbed, disturb: Disturb
) -> None:
    assert_exact_under(undisturbed, disturb)


def assert_exact_under(undisturbed: Undisturbed, disturb: Disturb) -> None:
    """Every stream is as if nothing had been, though something was replaced."""
    server = undisturbed.server
    before = server.processes()

    def now(streams: Streams) -> None:
        disturb(server, streams)

    answers = run(server, now)
    server.wait_until_ready()
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert all(answer.is_done for answer in answers)
    assert answers == undisturbed.answers
    after = server.processes()
    assert after.keys() == before.keys()
    assert after != before, "nothing was replaced"
    server.wait_until_nothing_is_held()


@two_ranks
def test_given_streams_of_every_kind_when_the_scheduler_is_told_to_end_then_its_ranks_go_on_with_the_next(
    undisturbed: Undisturbed,
) -> None:
    server = undisturbed.server
    before = server.processes()
    answers = run(server, lambda streams: strike(server, "scheduler 0", signal.SIGTERM))
    server.wait_until_ready()
    assert answers == undisturbed.answers
    after = server.processes()
    assert after["scheduler 0"] != before["scheduler 0"]
    for title in ("worker 0.0", "worker 0.1"):
        assert after[title] == before[title]
    server.wait_until_nothing_is_held()


@both_groups
@pytest.mark.parametrize("number", [KILL, STOP])
def test_given_streams_of_every_kind_when_the_gateway_dies_or_stops_then_another_one_tells_the_rest_of_each(
    undisturbed: Undisturbed, number: signal.Signals
) -> None:
    server = undisturbed.server
    seen: list[Streams] = []

    def disturb(streams: Streams) -> None:
        seen.append(streams)
        old = strike(server, "gateway 0", number)
        wait_replaced(server, "gateway 0", old)

    answers = run(server, disturb)
    server.wait_until_ready()
    for (_, body), answer, expected in zip(REQUESTS, answers, undisturbed.answers, strict=True):
        if body.get("stream", True):
            assert answer == expected
        else:
            assert answer.error is not None
    assert seen[0].num_resumed >= len(REQUESTS) - 1
    server.wait_until_nothing_is_held()


@two_ranks
def test_given_no_disturbance_when_run_again_then_the_answers_say_enough_to_compare(undisturbed: Undisturbed) -> None:
    assert undisturbed.answers == run(undisturbed.server, lambda streams: None)
    assert all(len(ids) <= LENGTH for answer in undisturbed.answers for ids in answer.token_ids.values())
    reasons = [answer.finish_reasons for answer in undisturbed.answers]
    assert [len(ends) for ends in reasons] == [1, 3, 1, 1, 1, 1, 1, 2, 2]
    assert set(reasons[-1].values()) == {"length"}  # the one with a schema, in the midst of it
    assert all(text.startswith("[") for text in undisturbed.answers[-1].text.values())
    assert all(undisturbed.answers[number].logprobs[0] for number in (0, 3, 5))
    assert undisturbed.answers[6].others


def test_given_a_group_that_dies_again_and_again_when_it_was_enough_then_streams_end_with_an_error_and_so_does_it(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("--max-restarts", "2")
    tree = server.tree()

    def kill_each(streams: Streams) -> None:
        killed: set[psutil.Process] = set()
        while server.process.poll() is None:
            try:
                processes = server.processes()
            except psutil.NoSuchProcess:
                continue  # the server itself has just ended
            rank = processes.get("worker 0.0")
            if rank is not None and rank not in killed:
                killed.add(rank)
                tree.append(rank)
                rank.kill()
            tree.extend(processes.values())

    answers = run(server, kill_each)
    assert {answer.error for answer in answers} == {"The engine failed for good."}
    assert not any(answer.finish_reasons for answer in answers)
    assert server.wait() == 1
    assert "given up" in server.errors
    assert_gone(list(set(tree)))
