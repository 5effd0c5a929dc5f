"""Two gateways, one of which dies: every stream of it goes on at whichever answers, exactly, with the same usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.chaos.blows import KILL, strike, wait_replaced
from tests.chaos.streams import COMPLETIONS, Answer, Streams, read_all, run
from tests.servers import RunningServer

pytestmark = [pytest.mark.stage2, pytest.mark.timeout(900)]

# Each prompt is longer than some blocks of the cache, and is found there whole.
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": f"{name} and the rest of the world. " * 6, "ignore_eos": True, "seed": number, **options})
    for number, (name, options) in enumerate(
        [("Ada", {}), ("Bob", {"n": 3}), ("Cleo", {"logprobs": 2}), ("Dan", {"stop": ["zq", "xj"]})] * 2
    )
]


def busiest_gateway(server: RunningServer) -> str:
    """The one with most connections."""

    def count(process: psutil.Process) -> int:
        return sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))

    gateways = {title: p for title, p in server.processes().items() if title in ("gateway 0", "gateway 1")}
    return max(gateways, key=lambda title: count(gateways[title]))


def test_given_two_gateways_when_one_dies_then_any_of_them_tells_the_rest_of_each_of_its_streams(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("--num-gateways", "2")
    read_all(server, STREAMS)  # now they are cached
    expected = read_all(server, STREAMS)
    assert all(answer.num_cached_tokens for answer in expected)
    seen: list[Streams] = []

    def kill_one(streams: Streams) -> None:
        seen.append(streams)
        title = busiest_gateway(server)
        wait_replaced(server, title, strike(server, title, KILL))

    answers: list[Answer] = run(server, kill_one, STREAMS)
    assert [answer.error for answer in answers] == [None] * len(STREAMS)
    assert answers == expected
    assert [a.num_cached_tokens for a in answers] == [a.num_cached_tokens for a in expected]
    assert seen[0].num_resumed
    server.wait_until_ready()
    server.wait_until_nothing_is_held()
    server.stop()
