"""The HTTP protocol's door, driven byte by byte: who is let in, who is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway import connection
from gateway.connection import MAX_HELD_BYTES
from tests.unit.http_talk import ANSWER, Talk, in_loop, post

pytestmark = pytest.mark.unit


def test_given_requests_one_after_the_other_when_some_have_no_room_then_the_application_sees_the_others() -> None:
    async def body() -> None:
        talk = Talk()
        assert talk.read(post("/full")) == ANSWER
        assert talk.read(post("/full", b"12345")) == ANSWER
        assert talk.read(post("/free", b"{1}")) == b""
        assert (await talk.answer()).endswith(b"ok")
        assert talk.read(post("/full")) == ANSWER
        assert talk.got == [("/free", b"{1}")]
        assert talk.door.asked == [2, 5, 3, 2]
        assert not talk.wire.is_closed

    in_loop(body)


@pytest.mark.parametrize("cut", [-2, -1])
def test_given_a_body_in_a_second_read_when_it_comes_then_the_request_is_refused_as_a_whole(cut: int) -> None:
    async def body() -> None:
        talk = Talk()
        sent = post("/full")
        assert talk.read(sent[:cut]) == b""
        assert not talk.door.asked
        assert talk.read(sent[cut:]) == ANSWER
        assert talk.door.asked == [2]
        await asyncio.sleep(0)
        assert not talk.got

    in_loop(body)


def test_given_a_body_that_does_not_come_when_it_was_waited_for_then_the_application_waits_for_it() -> None:
    async def body() -> None:
        talk = Talk()
        started = asyncio.Event()
        talk.protocol.app = app = _telling(talk.protocol.app, started)
        assert app is talk.protocol.app
        talk.read(post("/full")[:-1])
        await started.wait()
        talk.read(b"}")
        await talk.answer()
        assert (talk.got, talk.door.asked) == ([("/full", b"{}")], [])

    in_loop(body)


def _telling(app: Any, started: asyncio.Event) -> Any:
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await app(scope, receive, send)

    return tell


@pytest.mark.parametrize(
    "first",
    [
        post("/full", b"{}", b"Connection: close"),
        post("/full").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post("/open"),
        post("/full", b"x" * MAX_HELD_BYTES + b"y")[:-1],
        post("/full", b"{}", b"Expect: 100-continue")[:-2],
    ],
    ids=range(5),
)
def test_given_what_the_door_leaves_alone_when_read_then_the_application_has_it_at_once(first: bytes) -> None:
    async def body() -> None:
        talk = Talk()
        started = asyncio.Event()
        talk.protocol.app = _telling(talk.protocol.app, started)
        assert talk.read(first) == b""
        assert talk.protocol._at_door is None
        await started.wait()
        assert not talk.door.asked
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_more_than_one_request_in_a_read_when_the_first_has_no_room_then_it_is_the_last() -> None:
    async def body() -> None:
        talk = Talk()
        assert talk.read(post("/full") + post("/free") + post("/free")) == b""
        written = await talk.answer()
        assert b"connection: close" in written
        await asyncio.sleep(0)
        assert talk.got == [("/full", b"{}")]
        assert talk.wire.is_closed

    in_loop(body)


def test_given_a_client_that_leaves_while_it_is_held_when_its_time_is_over_then_nothing_has_begun() -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(post("/free")[:-1])
        timer = talk.protocol._door_timer
        assert timer is not None
        talk.protocol.connection_lost(None)
        assert timer.cancelled()
        assert talk.protocol._at_door is None

    in_loop(body)


def test_given_a_refusal_when_it_is_sent_then_neither_its_body_nor_a_timer_but_the_idle_one_stays() -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(post("/full", b"x" * 1000)[:-1])
        talk.read(b"x")
        assert not talk.protocol._held
        assert talk.protocol._door_timer is None
        assert talk.protocol._header_timer is None
        assert talk.protocol.timeout_keep_alive_task is not None
        talk.read(post("/free"))
        assert talk.protocol.timeout_keep_alive_task is None
        await talk.answer()

    in_loop(body)


def chunked(path: str, *parts: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.mark.parametrize(
    "pieces",
    [
        (post("/full")[:9], post("/full")[9:]),
        (post("/full")[:-20], post("/full")[-20:]),
        (chunked("/full", b"{", b"}"),),
        (post("/full", b"{}", b"Connection: Keep-Alive, x"),),
        (b"\r\n" + post("/full"),),
    ],
    ids=range(5),
)
def test_given_what_takes_a_parser_when_read_then_the_door_leaves_it_alone_and_looks_at_the_next(
    pieces: tuple[bytes, ...],
) -> None:
    async def body() -> None:
        talk = Talk()
        for _ in range(2):
            for piece in pieces:
                assert talk.read(piece) == b""
            await talk.answer()
            assert talk.read(post("/full")) == ANSWER
        assert talk.got == [("/full", b"{}")] * 2
        assert talk.door.asked == [2, 2]

    in_loop(body)


def test_given_a_client_that_does_not_read_when_there_is_no_room_then_no_answer_is_piled_up_without_a_task() -> None:
    async def body() -> None:
        talk = Talk()
        talk.protocol.pause_writing()
        assert talk.read(post("/full")) == b""
        assert not talk.door.asked
        talk.protocol.resume_writing()
        assert (await talk.answer()).endswith(b"ok")
        assert talk.read(post("/full")) == ANSWER
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_a_server_that_is_stopped_when_a_request_is_held_then_it_is_answered_and_its_connection_closed() -> None:
    async def body() -> None:
        talk = Talk()
        assert talk.read(post("/full")[:-1]) == b""
        talk.protocol.shutdown()
        assert not talk.wire.is_closed
        assert talk.read(post("/full")[-1:]) == b""  # who is refused at the door keeps the connection
        assert b"connection: close" in await talk.answer()
        await asyncio.sleep(0)
        assert talk.wire.is_closed

    in_loop(body)


def test_given_a_door_that_fails_when_asked_then_it_is_logged_and_the_application_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.fails = True
        with caplog.at_level(logging.ERROR, connection.__name__):
            talk.read(post("/full"))
        assert (await talk.answer()).endswith(b"ok")

    in_loop(body)
    assert "ZeroDivisionError" in caplog.text


def test_given_no_door_when_requests_come_then_all_are_let_in() -> None:
    async def body() -> None:
        talk = Talk(has_door=False)
        talk.read(post("/full"))
        await talk.answer()
        assert talk.got == [("/full", b"{}")]

    in_loop(body)


def _answering_at_once(talk: Talk) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})
        talk.has_answered.set()

    talk.protocol.app = app


def test_given_an_open_door_when_a_short_body_comes_late_then_an_answer_waits_for_it_and_the_connection_goes_on() -> (
    None
):
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        _answering_at_once(talk)
        first, second = post("/a", b"12345"), post("/b", b"12345")
        talk.read(first[:-5])
        await asyncio.sleep(0)
        assert talk.wire.written == b""
        talk.read(first[-5:])
        await talk.answer()
        talk.read(second[:-5])
        talk.read(second[-5:])
        await talk.answer()
        assert talk.wire.written.count(b"401") == 2
        assert not talk.door.asked
        assert not talk.wire.is_closed
        assert talk.protocol._body_timer is None

    in_loop(body)


def test_given_an_open_door_when_a_short_body_does_not_come_then_the_application_waits_for_it() -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        started = asyncio.Event()
        talk.protocol.app = _telling(talk.protocol.app, started)
        talk.read(post("/a")[:-1])
        await started.wait()
        talk.read(b"}")
        await talk.answer()
        assert talk.got == [("/a", b"{}")]

    in_loop(body)


@pytest.mark.parametrize(
    "first",
    [post("/a", b"x" * MAX_HELD_BYTES + b"y")[:-1], post("/a", b"{}", b"Expect: 100-continue")[:-2]],
    ids=["long", "expecting"],
)
def test_given_an_open_door_when_a_body_is_not_to_be_waited_for_then_the_application_begins_at_once(
    first: bytes,
) -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        started = asyncio.Event()
        talk.protocol.app = _telling(talk.protocol.app, started)
        talk.read(first)
        assert talk.protocol._unstarted is None
        await started.wait()
        talk.protocol.connection_lost(None)

    in_loop(body)


def test_given_an_open_door_when_the_client_leaves_before_its_body_then_nothing_begins() -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        talk.read(post("/a")[:-1])
        timer = talk.protocol._body_timer
        assert timer is not None
        talk.protocol.connection_lost(None)
        assert timer.cancelled()
        for _ in range(3):
            await asyncio.sleep(0)
        assert talk.protocol._unstarted is None
        assert not talk.got
        assert not talk.protocol.tasks

    in_loop(body)


def test_given_a_guarded_door_when_a_short_body_does_not_come_then_it_is_waited_for_once() -> None:
    async def body() -> None:
        talk = Talk()
        talk.read(post("/free")[:-1])
        assert talk.protocol._door_timer is not None
        talk.protocol._let_in_without_body()
        assert talk.protocol._body_timer is None
        assert len(talk.protocol.tasks) == 1
        talk.read(b"}")
        await talk.answer()

    in_loop(body)


def test_given_an_announced_length_with_more_zeros_than_digits_are_read_when_it_comes_then_it_is_its_value() -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        talk.read(post("/a").replace(b"Length: 2", b"Length: " + b"0" * 5000 + b"2"))
        assert (await talk.answer()).endswith(b"ok")

    in_loop(body)


def test_given_an_open_door_when_the_server_shuts_down_before_a_body_then_it_is_answered() -> None:
    async def body() -> None:
        talk = Talk()
        talk.door.is_guarded = False
        talk.read(post("/a")[:-1])
        talk.protocol.shutdown()
        talk.read(b"}")
        assert (await talk.answer()).endswith(b"ok")

    in_loop(body)
