"""Where a request begins and ends on its connection, driven read by read: nobody's body becomes anybody's request."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.connection import MAX_DROPPED_BYTES, MAX_HEADER_BYTES
from tests.unit.http_talk import Talk, in_loop, post

pytestmark = pytest.mark.unit

INNER = b"GET /inner HTTP/1.1\r\nHost: h\r\n\r\n"
OFFER = post("/open", INNER, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")


@pytest.mark.parametrize("has_door", [True, False])
@pytest.mark.parametrize("cut", range(0, len(OFFER), 3))
def test_given_an_offer_of_another_protocol_when_its_head_comes_in_two_reads_then_its_body_is_its_body(
    cut: int, has_door: bool
) -> None:
    async def body() -> None:
        talk = Talk(has_door=has_door)
        for _ in range(2):  # on one connection
            talk.read(OFFER[:cut])
            talk.read(OFFER[cut:])
            await talk.answer()
        talk.read(post("/open"))
        await talk.answer()
        assert talk.got == [("/open", INNER), ("/open", INNER), ("/open", b"{}")]
        assert not talk.wire.is_closed

    in_loop(body)


@pytest.mark.parametrize("before", [b"\r\n", b"\r\n\r\n", b"\r\n" * 10])
def test_given_blank_lines_before_an_offer_when_read_then_its_body_is_its_body(before: bytes) -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(before + OFFER)
        await talk.answer()
        assert talk.got == [("/open", INNER)]

    in_loop(body)


@pytest.mark.parametrize("sent", [OFFER, b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n"])
def test_given_an_upgrade_that_reaches_the_parser_when_refused_then_nothing_behind_it_is_a_request(sent: bytes) -> None:
    async def body() -> None:
        talk = Talk()
        talk.protocol._head.take = lambda data: _count(talk, data)  # type: ignore[method-assign]
        assert talk.read(sent).startswith(b"HTTP/1.1 400 ")
        assert talk.read(INNER) == b""
        await asyncio.sleep(0)
        assert not talk.got
        assert talk.wire.has_ended
        talk.protocol.connection_lost(None)

    in_loop(body)


def _count(talk: Talk, data: bytes) -> bytes:
    talk.protocol._head.num_bytes += len(data)
    return data


@pytest.mark.parametrize("hosts", [[], [b"Host: a", b"Host: a"], [b"Host: a", b"hOST: b"]])
def test_given_no_host_or_two_when_read_then_it_is_refused_and_the_connection_ends(hosts: list[bytes]) -> None:
    async def body() -> None:
        talk = Talk()
        sent = post("/full", b"{}", *hosts).replace(b"Host: h\r\n", b"", 1)
        head, text = talk.read(sent).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(text)["error"]["code"] == "invalid_http"
        assert talk.wire.has_ended
        assert talk.protocol._header_timer is not None, "who does not leave is sent away"
        assert talk.read(post("/open")) == b""
        talk.read(b"x" * MAX_DROPPED_BYTES)
        assert talk.wire.is_closed
        assert not talk.got
        talk.protocol.connection_lost(None)

    in_loop(body)


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES, 100 * 1024])
def test_given_a_head_that_is_too_large_when_it_comes_in_one_read_then_it_is_refused_too(size: int) -> None:
    async def body() -> None:
        talk = Talk()
        assert talk.read(post("/open", b"{}", b"X-Large: " + b"x" * size)).startswith(b"HTTP/1.1 431 ")
        await asyncio.sleep(0)
        assert not talk.got
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_a_large_body_when_it_comes_with_its_head_then_only_the_head_is_measured() -> None:
    async def body() -> None:
        talk = Talk()
        talk.wire.pause_reading = lambda: None  # type: ignore[method-assign]
        talk.read(post("/open", b"x" * 2 * MAX_HEADER_BYTES))
        await talk.answer()
        assert [len(data) for _, data in talk.got] == [2 * MAX_HEADER_BYTES]

    in_loop(body)


@pytest.mark.parametrize("stray", [b"G", b"GET /inner HTTP/1.1\r\nHost: h\r\n\r\n", b"\x00"])
def test_given_bytes_behind_a_request_when_its_answer_is_not_there_then_they_are_dropped_and_the_answer_is_the_last(
    stray: bytes,
) -> None:
    async def body() -> None:
        talk = Talk()
        talk.has_leave.clear()
        talk.read(post("/open") + b"\r\n")
        talk.read(b"\r\n")  # which some clients send behind a body
        talk.read(stray)
        assert talk.protocol._header_timer is None
        talk.has_leave.set()
        assert b"connection: close" in await talk.answer()
        assert talk.got == [("/open", b"{}")]

    in_loop(body)


def test_given_an_early_answer_when_the_rest_of_its_request_has_come_then_the_next_request_is_read() -> None:
    async def body() -> None:
        talk = Talk(reads_body=False)
        sent = post("/open", b"x" * 1000)
        talk.read(sent[:-500])
        await talk.answer()
        talk.read(sent[-500:])
        talk.read(OFFER)
        await talk.answer()
        assert [path for path, _ in talk.got] == ["/open", "/open"]
        assert not talk.wire.is_closed

    in_loop(body)


def test_given_an_early_answer_when_the_rest_of_its_request_comes_with_the_next_one_then_the_connection_ends() -> None:
    async def body() -> None:
        talk = Talk(reads_body=False)
        sent = post("/open", b"x" * 1000)
        talk.read(sent[:-500])
        await talk.answer()
        talk.read(sent[-500:] + OFFER)
        await asyncio.sleep(0)
        assert [path for path, _ in talk.got] == ["/open"]
        assert talk.wire.is_closed

    in_loop(body)


@pytest.mark.parametrize(
    "rest", [[b"x"], [b"x" * 500], [b"x" * 499, b"x"], [b"x" * 500, b"P"], [b"x" * 500, b"POST /open HTTP/1.1\r\n"]]
)
def test_given_an_early_answer_when_the_client_says_no_more_then_a_timer_ends_the_connection(rest: list[bytes]) -> None:
    async def body() -> None:
        talk = Talk(reads_body=False)
        talk.read(post("/open", b"x" * 1000)[:-500])
        await talk.answer()
        for part in rest:
            talk.read(part)
        timers = talk.protocol.timeout_keep_alive_task, talk.protocol._header_timer
        is_next = rest[-1].startswith(b"P")
        assert [timer is not None for timer in timers] == [not is_next, is_next]
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_an_early_answer_when_trailers_follow_without_an_end_then_none_is_kept() -> None:
    async def body() -> None:
        talk = Talk(reads_body=False)
        talk.read(b"POST /open HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await talk.answer()
        talk.read(b"0\r\n")
        for number in range(100):
            talk.read(b"X-%d: 1\r\n" % number)
        assert len(talk.protocol.headers) == 2
        talk.protocol.connection_lost(None)

    in_loop(body)


@pytest.mark.parametrize("begins", [b"X: ", b"X"])
@pytest.mark.parametrize("is_answered", [True, False])
def test_given_a_trailer_that_does_not_end_when_it_is_as_long_as_a_head_may_be_then_the_connection_ends(
    begins: bytes, is_answered: bool
) -> None:
    async def body() -> None:
        talk = Talk(reads_body=not is_answered)
        talk.read(b"POST /open HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        if is_answered:
            await talk.answer()
        talk.read(b"0\r\n" + begins)
        for _ in range(MAX_HEADER_BYTES // 4096 - 1):
            talk.read(b"a" * 4096)
        assert not talk.wire.is_closed
        talk.read(b"a" * 4096)
        assert talk.wire.is_closed
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_a_long_body_in_small_chunks_when_read_then_their_sizes_are_no_trailers() -> None:
    async def body() -> None:
        talk = Talk()
        talk.wire.pause_reading = lambda: None  # type: ignore[method-assign]
        talk.read(b"POST /open HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(64):
            talk.read(b"1\r\nx\r\n" * 1024)
        talk.read(b"0\r\n\r\n")
        await talk.answer()
        assert [len(data) for _, data in talk.got] == [64 * 1024]
        assert not talk.wire.is_closed

    in_loop(body)


def test_given_a_first_line_in_two_reads_when_the_first_part_has_come_then_only_the_headers_timer_runs() -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(post("/open"))
        await talk.answer()
        assert talk.protocol.timeout_keep_alive_task is not None
        talk.read(b"PO")
        assert talk.protocol.timeout_keep_alive_task is None
        assert talk.protocol._header_timer is not None
        talk.read(post("/open")[2:])
        await talk.answer()
        assert talk.got == [("/open", b"{}")] * 2

    in_loop(body)


@pytest.mark.parametrize("expects", [(), (b"Expect: 100-continue",)])
def test_given_a_client_of_http_1_0_when_it_gets_a_stream_then_there_are_no_chunks_and_the_connection_ends_it(
    expects: tuple[bytes, ...],
) -> None:
    async def body() -> None:
        talk = Talk(parts=(b"data: 1\r\n\r\n", b"x" * 300, b"data: 2\n\n"))
        talk.read(post("/open", b"{}", *expects).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, text = (await talk.answer()).split(b"\r\n\r\n", 1)
        assert text == b"data: 1\r\n\r\n" + b"x" * 300 + b"data: 2\n\n"
        assert b"chunked" not in head
        assert b"connection: close" in head
        assert talk.wire.is_closed

    in_loop(body)


def test_given_a_client_of_http_1_0_when_the_answers_length_is_known_then_it_is_said() -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(post("/open").replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await talk.answer()
        assert b"content-length: 2\r\n" in answer
        assert answer.endswith(b"\r\n\r\nok")
        assert talk.wire.is_closed

    in_loop(body)
