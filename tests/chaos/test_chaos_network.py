"""The network between a server and its ranks fails while streams run: every stream goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.chaos.proxied import Proxied, proxied_server
from tests.chaos.proxy import BOTH, DOWN, FAIR, UP, Proxy, Weather
from tests.chaos.streams import Answer, Streams, run
from tests.servers import assert_gone

pytestmark = [pytest.mark.stage2, pytest.mark.timeout(300)]

STARTED, MENDED = "worker 0 is STARTED", "serving again after"  # words of the supervisor's log
Disturb = Callable[[Proxied, Streams], None]


@dataclass(frozen=True)
class Undisturbed:
    """A server, and what it says when nothing happens to it."""

    proxied: Proxied
    answers: list[Answer]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    log = tmp_path_factory.mktemp("network") / "log"
    with proxied_server("--hang-timeout", "2", "--log-level", "debug", log=log) as proxied:
        yield Undisturbed(proxied, run(proxied.server, lambda streams: None))
        proxied.server.stop()


def rank(proxied: Proxied) -> psutil.Process:
    return proxied.server.processes()["worker 0.0"]


def wait_closed(proxy: Proxy, more: int) -> None:
    """Block until so many more connections have ended since they were counted."""
    with proxy.changed:
        proxy.changed.wait_for(lambda: proxy.num_closed >= more)


def reset_everything_thrice(proxied: Proxied, streams: Streams) -> None:
    for _ in range(3):
        proxied.steps.cut()
        proxied.reports.cut()
        streams.wait_tokens(40)


def spoil(proxied: Proxied, streams: Streams) -> None:
    for direction in (UP, DOWN):
        closed = proxied.steps.num_closed
        proxied.steps.spoil(direction)
        wait_closed(proxied.steps, closed + 1)
        streams.wait_tokens(40)


def be_slow(proxied: Proxied, streams: Streams) -> None:
    for weather in (Weather(delay=0.03), Weather(rate=50_000)):
        proxied.steps.set(weather)
        proxied.reports.set(weather)
        streams.wait_tokens(100)
    proxied.steps.set(FAIR)
    proxied.reports.set(FAIR)


def be_silent_towards_the_scheduler(proxied: Proxied, streams: Streams) -> None:
    """Plans arrive, and what ranks answer does not: nobody is told, until the group is given up."""
    old = rank(proxied)
    proxied.steps.set(Weather(silent=frozenset({UP})))
    assert_gone([old])
    proxied.steps.cut()
    proxied.steps.set(FAIR)


DISTURBANCES: list[Disturb] = [reset_everything_thrice, spoil, be_slow, be_silent_towards_the_scheduler]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
def test_given_streams_of_every_kind_when_the_network_fails_then_each_is_as_if_nothing_had_been(
    undisturbed: Undisturbed, disturb: Disturb
) -> None:
    server = undisturbed.proxied.server
    answers = run(server, lambda streams: disturb(undisturbed.proxied, streams))
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert answers == undisturbed.answers
    server.wait_until_ready()
    server.wait_until_nothing_is_held()


def test_given_a_rank_that_loads_when_its_word_that_it_is_ready_is_lost_then_the_supervisor_learns_it_all_the_same(
    undisturbed: Undisturbed,
) -> None:
    proxied, server = undisturbed.proxied, undisturbed.proxied.server

    def wait_said(words: str, times: int) -> None:
        while server.errors.count(words) < times:
            assert server.process.poll() is None, server.errors

    num_started, num_mended = (server.errors.count(words) for words in (STARTED, MENDED))
    rank(proxied).kill()
    wait_said(STARTED, num_started + 1)
    proxied.reports.set(Weather(silent=BOTH))
    server.wait_until_ready()  # as scheduler and gateway see it
    assert server.errors.count(MENDED) == num_mended
    proxied.reports.cut()
    proxied.reports.set(FAIR)
    wait_said(MENDED, num_mended + 1)
