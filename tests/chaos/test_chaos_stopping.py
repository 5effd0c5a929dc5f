"""Servers that are told to stop, and one that has to: streams end as they should, and nothing is left."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.blows import KILL, strike
from tests.chaos.kill_loop import make_requests
from tests.chaos.sigterm import Order, end_without_workers, stop_a_server, stop_a_start
from tests.chaos.streams import COMPLETIONS, Streams, read_all
from tests.servers import RunningServer, assert_gone

pytestmark = pytest.mark.stage2

LONG = [
    (
        COMPLETIONS,
        {"prompt": f"One and {number}", "max_tokens": 400, "ignore_eos": True, "temperature": heat, "seed": 7},
    )
    for number, heat in enumerate((0.0, 0.0, 0.9, 0.9))
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name so short that Ray's sockets fit into a run directory in it."""
    with tempfile.TemporaryDirectory(prefix="nova-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "order",
    [
        Order("streaming", "server", signal.SIGTERM, 40),
        Order("streaming", "group", signal.SIGHUP, 150),  # as a terminal does it, or `kill -- -PGID`
        Order("sending", "group", signal.SIGTERM, 0),  # as `timeout` does it
    ],
    ids=lambda order: f"{order.moment}-{order.target}",
)
def test_given_streams_when_the_server_is_told_to_stop_then_they_finish_and_new_requests_get_503(
    order: Order, folder: Path, server: RunningServer
) -> None:
    requests = make_requests(random.Random(0), 8)
    result = stop_a_server(order, folder, requests, read_all(server, requests))
    assert not result.wrong
    if order.moment == "streaming":
        assert result.num_finished == len(requests)
        assert result.num_refused


@pytest.mark.parametrize("title", ["worker 0.0", "scheduler 0"])
def test_given_streams_that_may_finish_when_a_process_is_killed_then_another_one_finishes_them(
    title: str, folder: Path, server: RunningServer
) -> None:
    with RunningServer("--drain-timeout", "300", log=folder / "log") as stopped:
        tree = stopped.tree()
        with Streams(stopped, LONG) as streams, stopped.http() as http:
            streams.wait_all_have_begun()
            stopped.process.terminate()
            while http.get("/readyz").status_code != 503:
                pass
            strike(stopped, title, KILL)
            answers = streams.answers()
        assert stopped.wait() == 0, stopped.errors
        assert_gone(tree)
    assert "serving again after" in stopped.errors, "the streams had ended before"
    assert answers == read_all(server, LONG)


def test_given_a_server_that_starts_when_it_is_told_to_stop_then_it_does_and_leaves_nothing(folder: Path) -> None:
    assert not stop_a_start(Order("starting", "group", signal.SIGTERM, 1.5), folder).wrong


def test_given_workers_that_cannot_come_back_when_one_is_killed_then_streams_are_told_and_the_server_ends(
    folder: Path,
) -> None:
    days = end_without_workers(folder)
    assert {answer.error for answer in days.answers} == {"The engine failed for good."}
    assert not any(answer.finish_reasons for answer in days.answers)
    assert days.status == 1
    assert days.until_unready < days.until_end
