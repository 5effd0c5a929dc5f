"""A rank's host, whose calls may begin in another order than they were made in; its zygote only notes what is asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from novainfer.config import ServeConfig
from novainfer.errors import EngineError
from novainfer.transport.addresses import Endpoint
from workers import rank_host
from workers.launch import RankLaunch, RankPlace
from workers.rank_zygote import HERE

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


class NotedZygote:
    """Its children stand by at once."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int]] = []
        self.children: list[socket.socket] = []

    def fork(self, slot: int) -> socket.socket:
        self.orders.append(("fork", slot))
        ours, theirs = socket.socketpair()
        theirs.sendall(f"{HERE}\n".encode())
        self.children.append(theirs)
        return ours

    def kill_child(self, slot: int) -> None:
        self.orders.append(("kill", slot))


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotedZygote]:
    noted = NotedZygote()
    monkeypatch.setattr(rank_host, "_zygote", lambda: noted)
    monkeypatch.setattr(rank_host, "session_dir", lambda: "")
    yield noted
    for child in noted.children:
        child.close()


@pytest.fixture
def spare() -> str:
    place = RankPlace(rank=0, world_size=1, epoch=0, meeting_point="")
    launch = RankLaunch(config=ServeConfig(), replica=0, place=place, scheduler=Endpoint("ipc://none"), supervisor=None)
    return launch.to_json()


def test_given_the_end_of_a_spare_when_it_comes_behind_the_next_ones_start_then_that_one_lives(
    zygote: NotedZygote, spare: str
) -> None:
    host = rank_host.RankHost()
    host.stand_by(1, spare)
    host.stand_by(2, spare)
    host.drop_spare(1)
    assert zygote.orders == [("fork", 1), ("fork", 1)]
    host.drop_spare(2)
    assert zygote.orders[2:] == [("kill", 1)]


def test_given_a_spare_that_has_become_the_rank_when_the_end_of_an_older_one_comes_then_nothing_is_killed(
    zygote: NotedZygote, spare: str
) -> None:
    host = rank_host.RankHost()
    host.stand_by(1, spare)
    host.stand_by(2, spare)
    for call in (host.ping, lambda number: host.serve(number, 1)):
        with pytest.raises(EngineError, match="no spare rank of this number"):
            call(1)
    zygote.children[1].shutdown(socket.SHUT_WR)  # its life as a rank is short
    assert host.serve(2, 1)
    host.drop_spare(1)
    assert zygote.orders == [("fork", 1), ("fork", 1)]
    host.stand_by(3, spare)
    assert zygote.orders[2:] == [("fork", 0)]


def test_given_the_end_of_a_spare_when_it_comes_before_its_start_then_it_is_not_started(
    zygote: NotedZygote, spare: str
) -> None:
    host = rank_host.RankHost()
    host.drop_spare(1)
    with pytest.raises(EngineError, match="ended before it began"):
        host.stand_by(1, spare)
    assert zygote.orders == [("kill", 1)]
    host.stand_by(2, spare)
    assert zygote.orders == [("kill", 1), ("fork", 1)]
