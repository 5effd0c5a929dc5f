"""The fault proxy does what it is told; faults are drawn as the seed says."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.net_loop import KINDS, LINKS, draw
from tests.chaos.proxy import BOTH, DOWN, FAIR, UP, Proxy, Weather

pytestmark = pytest.mark.unit

WAIT = 30.0  # seconds; an event ends each wait long before


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT)
        yield listener


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[Proxy]:
    proxy = Proxy(listener.getsockname)
    yield proxy
    proxy.close()


@pytest.fixture
def ends(proxy: Proxy, listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Who has connected, and who listens."""
    with connect(proxy) as front, listener.accept()[0] as back:
        back.settimeout(WAIT)
        front.sendall(b"?")  # both halves are there once it has come
        assert receive(back, 1) == b"?"
        yield front, back


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=WAIT)


def receive(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := end.recv(count - len(data))):
        data += piece
    return data


Ends = tuple[socket.socket, socket.socket]


def test_given_fair_weather_when_both_ends_speak_then_each_hears_the_other_and_its_end(ends: Ends) -> None:
    front, back = ends
    said = random.Random(0).randbytes(1 << 20)
    back.sendall(b"back")
    assert receive(front, 4) == b"back"
    front.settimeout(None)
    front.sendall(said[:100_000])
    front.shutdown(socket.SHUT_WR)
    assert receive(back, len(said)) == said[:100_000]
    back.sendall(b"still open")
    assert receive(front, 10) == b"still open"


@pytest.mark.parametrize("weather", [Weather(delay=0.05), Weather(rate=50_000.0)], ids=["delay", "throttle"])
def test_given_a_slow_network_when_much_is_sent_then_it_comes_whole_and_in_order(
    proxy: Proxy, ends: Ends, weather: Weather
) -> None:
    front, back = ends
    proxy.set(weather)
    said = bytes(range(250)) * 20
    front.sendall(said)
    assert receive(back, len(said)) == said


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_given_silence_in_one_direction_when_it_ends_then_what_was_held_back_comes(
    proxy: Proxy, ends: Ends, direction: str
) -> None:
    front, back = ends
    proxy.set(Weather(silent=frozenset({direction})))
    front.sendall(b"up")
    back.sendall(b"down")
    heard, deaf = ((front, b"down"), (back, b"up"))[:: 1 if direction == UP else -1]
    assert receive(heard[0], len(heard[1])) == heard[1]
    deaf[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        deaf[0].recv(1)
    deaf[0].settimeout(WAIT)
    proxy.set(FAIR)
    assert receive(deaf[0], len(deaf[1])) == deaf[1]


def test_given_silence_when_the_connection_is_cut_then_what_was_held_back_is_lost(proxy: Proxy, ends: Ends) -> None:
    front, back = ends
    proxy.set(Weather(silent=BOTH))
    front.sendall(b"lost")
    proxy.cut()
    proxy.set(FAIR)
    for end in (front, back):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_given_a_connection_when_it_is_cut_orderly_then_both_ends_hear_an_end(proxy: Proxy, ends: Ends) -> None:
    proxy.cut(orderly=True)
    assert [end.recv(1) for end in ends] == [b"", b""]
    with proxy.changed:
        assert proxy.changed.wait_for(lambda: proxy.num_closed == proxy.num_opened == 1, WAIT)


def test_given_one_direction_closed_when_both_speak_then_only_the_other_is_heard(proxy: Proxy, ends: Ends) -> None:
    front, back = ends
    proxy.close_half(UP)
    assert back.recv(1) == b""
    front.sendall(b"dropped")
    back.sendall(b"heard")
    assert receive(front, 5) == b"heard"


def test_given_an_order_to_spoil_when_two_pieces_pass_then_one_bit_of_the_first_is_wrong(
    proxy: Proxy, ends: Ends
) -> None:
    front, back = ends
    proxy.spoil(UP)
    front.sendall(b"abc")
    assert receive(back, 3) == b"abb"
    front.sendall(b"abc")
    assert receive(back, 3) == b"abc"


def test_given_a_proxy_that_refuses_when_asked_again_later_then_it_listens_at_the_same_port(
    proxy: Proxy, ends: Ends, listener: socket.socket
) -> None:
    front, back = ends
    proxy.set(Weather(refuses=True))
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    front.sendall(b"old")  # a connection that there was stays
    assert receive(back, 3) == b"old"
    proxy.set(FAIR)
    with connect(proxy) as again, listener.accept()[0] as answers:
        answers.sendall(b"new")
        assert receive(again, 3) == b"new"


def test_given_nobody_behind_it_when_connected_then_the_connection_is_reset(
    proxy: Proxy, listener: socket.socket
) -> None:
    listener.close()
    proxy._upstream = lambda: ("127.0.0.1", 1)
    with pytest.raises(ConnectionResetError), connect(proxy) as front:  # the reset may come before `connect` returns
        front.recv(1)


def test_given_a_seed_when_faults_are_drawn_then_there_are_all_kinds_and_twice_the_same() -> None:
    plans = [[draw(rng) for _ in range(500)] for rng in (random.Random(1), random.Random(1))]
    assert plans[0] == plans[1]
    assert {fault.kind for fault in plans[0]} == set(KINDS)
    assert {fault.link for fault in plans[0]} == set(LINKS)
    lasting = Counter(fault.seconds > 0 for fault in plans[0] if fault.kind in ("reset", "fin", "half", "spoil"))
    assert set(lasting) == {False}
