"""How the scheduler takes what gateways send: several packets a message, so many a turn, none that is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import zmq

from novainfer.engine import server as server_module
from novainfer.engine.server import SchedulerServer
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import Heartbeat

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Inbox:
    """A socket with messages, and the replica that hears them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.heard: list[tuple[bytes, int]] = []
        self._socket = socket

    def handle(self, identity: bytes, packet: Packet, now: float) -> None:
        self.heard.append((identity, packet.number))

    def hear(self) -> list[tuple[bytes, int]]:
        """What comes of one turn."""
        server: Any = SchedulerServer.__new__(SchedulerServer)
        server._gateway_socket, server._replica = self._socket, self
        server._hear_gateways()
        heard, self.heard = self.heard, []
        return heard

    def receive(self, *ready: str) -> list[str]:
        """Whom the server hears in one turn, in order, when these are ready: "orders", "gateways", "ranks"."""
        heard: list[str] = []
        server: Any = SchedulerServer.__new__(SchedulerServer)
        server._take_order = lambda: heard.append("orders")
        server._hear_gateways = lambda: heard.append("gateways")
        server._orders, server._gateway_socket = "orders", "gateways"
        server._executor = SimpleNamespace(
            socket="ranks", hear=lambda has_any=False: heard.append("ranks" if has_any else "ranks, if any")
        )
        server._sources = [(one, int(zmq.POLLIN)) for one in ready]
        with patch.object(zmq, "zmq_poll", lambda sources, timeout: sources):
            server._receive(0.0)
        return heard

    def num_left(self) -> int:
        """Messages that were not heard; they are gone then."""
        count = 0
        while self._socket.poll(0):
            self._socket.recv_multipart()
            count += 1
        return count


@contextmanager
def inbox_with(*messages: list[bytes]) -> Iterator[Inbox]:
    """An inbox that has these."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PAIR) as taker, context.socket(zmq.PAIR) as sender:
        taker.bind("inproc://door")
        sender.connect("inproc://door")
        for frames in messages:
            sender.send_multipart(frames)
        yield Inbox(taker)


def message(identity: bytes, *numbers: int) -> list[bytes]:
    return [identity, *(frame for number in numbers for frame in Packet(1, number, Heartbeat(0)).frames())]


def test_given_messages_of_several_packets_when_heard_then_each_is_handled_in_order() -> None:
    with inbox_with(message(b"a", 0, 1, 2), message(b"b", 0), message(b"a", 3)) as inbox:
        assert inbox.hear() == [(b"a", 0), (b"a", 1), (b"a", 2), (b"b", 0), (b"a", 3)]


def test_given_what_is_no_packet_when_heard_then_the_messages_behind_it_are_handled() -> None:
    with inbox_with([b"a"], [b"a", b"?", b"?"], [*message(b"a", 0), b"?", b"?"], message(b"b", 0)) as inbox:
        assert inbox.hear() == [(b"a", 0), (b"b", 0)]


def test_given_a_flood_when_heard_then_a_turn_takes_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_PACKETS_PER_TURN", 4)
    packets = [message(b"a", 3 * i, 3 * i + 1, 3 * i + 2) for i in range(3)]
    with inbox_with(*packets, *([[b"a"]] * 6)) as inbox:
        assert [number for _, number in inbox.hear()] == [0, 1, 2, 3, 4, 5], "a message is taken whole"
        assert [number for _, number in inbox.hear()] == [6, 7, 8], "and one that is no packet counts as one"
        assert inbox.hear() == []
        assert inbox.num_left() == 1


@pytest.mark.parametrize(
    ("ready", "heard"),
    [
        ([], []),
        (["ranks"], ["ranks"]),
        (["orders"], ["orders"]),
        # What idle ranks say while gateways are heard is older than the plans to come, too.
        (["gateways"], ["gateways", "ranks, if any"]),
        (["orders", "gateways", "ranks"], ["orders", "gateways", "ranks"]),
    ],
)
def test_given_what_is_ready_when_a_turn_begins_then_orders_come_first_and_ranks_last(
    ready: list[str], heard: list[str]
) -> None:
    with inbox_with() as inbox:
        assert inbox.receive(*ready) == heard
