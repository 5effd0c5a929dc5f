"""What an answer costs: few writes, its head and its end going with what stands beside them, and few turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import Response

from gateway.slices import SLICE_SECONDS, Slices, Written, write_object
from novainfer.protocol.messages import TokenOutput
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer
from tests.unit.test_unit_poured_tokens import Pipe, Server, cycle_on, settle

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Writes(Pipe):
    """Keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        super().write(data)
        self.parts.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True


def held(pipe: Writes, *, expects: bool = False, **scope: str) -> Any:
    """A cycle whose head is held."""
    cycle = cycle_on(pipe)
    cycle.waiting_for_100_continue = expects
    cycle.scope |= scope  # type: ignore[typeddict-item]
    return cycle


def test_given_a_whole_answer_when_sent_then_head_and_body_are_one_write_and_what_follows_goes_at_once() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await Response(b"first", 200)(cycle.scope, cycle.receive, cycle.send)
        assert len(pipe.parts) == 1
        assert pipe.data.endswith(b"content-length: 5\r\n\r\nfirst")

    asyncio.run(main())


def test_given_an_empty_answer_when_sent_then_its_head_goes() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await Response(None, 204)(cycle.scope, cycle.receive, cycle.send)
        assert [part[:12] for part in pipe.parts] == [b"HTTP/1.1 204"]

    asyncio.run(main())


def test_given_a_client_that_asks_first_when_the_body_is_read_then_it_hears_at_once_that_it_may_go_on() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe, expects=True)
        cycle.body, cycle.more_body = bytearray(b"{}"), False
        cycle.message_event.set()
        assert (await cycle.receive())["body"] == b"{}"
        assert pipe.parts == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        await Response(b"x", 200)(cycle.scope, cycle.receive, cycle.send)
        assert len(pipe.parts) == 2

    asyncio.run(main())


async def begins(scope: Any, receive: Any, send: Any) -> None:
    """An application that fails behind the head of its answer."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("broken")


async def ends_early(scope: Any, receive: Any, send: Any) -> None:
    """One that returns there."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
    """One without an answer."""


async def sends_a_bad_header(scope: Any, receive: Any, send: Any) -> None:
    """One whose header would be two."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nc: d")]})


@pytest.mark.parametrize("app", [begins, ends_early, sends_a_bad_header])
def test_given_an_answer_that_ends_behind_its_head_when_nothing_has_gone_then_the_client_hears_of_it(app: Any) -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await cycle.run_asgi(app)
        assert pipe.is_closed
        assert pipe.data.startswith(b"HTTP/1.1 500")
        assert b"200" not in pipe.data
        assert cycle.response_complete

    asyncio.run(main())


def test_given_an_application_without_an_answer_when_it_returns_then_the_client_gets_one() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await cycle.run_asgi(says_nothing)
        assert pipe.data.startswith(b"HTTP/1.1 500")
        assert cycle.response_complete

    asyncio.run(main())


async def parts(scope: Any, receive: Any, send: Any) -> None:
    """An answer in two parts, of a length that is not announced."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"two", "more_body": False})


@pytest.mark.parametrize(
    ("scope", "head_end", "body"),
    [
        ({}, b"a: b\r\ntransfer-encoding: chunked\r\n", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        ({"http_version": "1.0"}, b"a: b\r\n", b"onetwo"),
        ({"method": "HEAD"}, b"a: b\r\n", b""),
    ],
)
def test_given_a_body_of_unknown_length_when_sent_then_its_end_can_be_seen(
    scope: dict[str, str], head_end: bytes, body: bytes
) -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe, **scope)
        await cycle.run_asgi(parts)
        head, _, rest = pipe.data.partition(b"\r\n\r\n")
        assert head + b"\r\n" == b"HTTP/1.1 200 OK\r\n" + head_end
        assert rest == body
        assert cycle.response_complete

    asyncio.run(main())


@pytest.mark.parametrize(
    "header", [(b"a\r\nb", b"c"), (b"a b", b"c"), (b"a", b"b\r\nc: d"), (b"a", b"b\nc"), (b"a", b"\0")]
)
def test_given_a_header_that_would_be_two_when_sent_then_that_is_an_error(header: tuple[bytes, bytes]) -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        with pytest.raises(RuntimeError, match="header"):
            await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y"), header]})
        assert not pipe.data
        assert not cycle.response_started

    asyncio.run(main())


@pytest.mark.parametrize(("length", "words"), [(2, "longer"), (4, "shorter")])
def test_given_another_length_than_announced_when_sent_then_that_is_an_error(length: int, words: str) -> None:
    async def main() -> None:
        cycle = held(Writes())
        await cycle.send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]}
        )
        with pytest.raises(RuntimeError, match=words):
            await cycle.send({"type": "http.response.body", "body": b"one", "more_body": False})
        assert not cycle.response_complete

    asyncio.run(main())


@pytest.mark.parametrize("keep_alive", [True, False])
def test_given_an_answer_that_closes_when_it_ends_then_it_says_so_once(keep_alive: bool) -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        cycle.keep_alive = keep_alive
        await Response(b"x", 200, {"connection": "close"})(cycle.scope, cycle.receive, cycle.send)
        assert pipe.data.count(b"connection: close\r\n") == 1
        assert pipe.is_closed

    asyncio.run(main())


def test_given_a_connection_that_is_not_kept_when_answered_then_the_answer_says_so() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        cycle.keep_alive = False
        await Response(b"x", 200)(cycle.scope, cycle.receive, cycle.send)
        assert b"\r\nconnection: close\r\n" in pipe.data
        assert pipe.is_closed

    asyncio.run(main())


def test_given_a_stream_when_it_ends_then_its_last_events_are_one_write(tmp_path: Any) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))

    async def main() -> None:
        server = Server(tokenizer)
        server.pipe = server.cycle.transport = pipe = Writes()
        task = server.start()
        server.stream.push_token("r", 0, 0, 5)
        await settle()
        assert len(pipe.parts) == 1
        server.stream.push(TokenOutput("r", 0, 1, [6], "length"))
        server.stream.end("r")
        await asyncio.wait_for(task, 20)
        server.generation.close()
        assert [part.count(b"data: ") for part in pipe.parts] == [2, 2, 0], (
            "the prompt's ids and a token, a token with the end and [DONE], the end of the body"
        )
        assert b'"length"' in pipe.parts[1]
        assert b"[DONE]" in pipe.parts[1]

    asyncio.run(main())


def test_given_a_task_that_waited_when_it_works_on_then_its_waiting_was_not_work() -> None:
    slices = Slices()
    slices._began -= 2 * SLICE_SECONDS
    slices.begin()
    with pytest.raises(StopIteration):
        slices.pause().send(None)
    slices._began -= 2 * SLICE_SECONDS
    assert slices.pause().send(None) is None, "it lets others work"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"a": 1},
        {"w": Written(["[1,", "2]"])},
        {"a": '\u00e4"', "b": None, "w": Written(["[", "]"]), "v": Written(["{}"]), "c": {"d": [1.5, True]}},
        {"w": Written(["0"]), "a": []},
    ],
)
def test_given_an_object_with_written_parts_when_written_then_it_is_the_same_json(fields: dict[str, Any]) -> None:
    expected = {name: json.loads("".join(v)) if isinstance(v, Written) else v for name, v in fields.items()}
    text = "".join(write_object(fields))
    assert text == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))


def test_given_a_whole_body_when_read_then_it_comes_at_once_and_then_only_that_the_client_leaves() -> None:
    async def main() -> None:
        cycle = held(Writes())
        cycle.body, cycle.more_body = bytearray(b"{}"), False
        cycle.message_event.set()
        first = cycle.receive()
        with pytest.raises(StopIteration) as read:
            first.send(None)
        assert read.value.value == {"type": "http.request", "body": b"{}", "more_body": False}
        second = asyncio.ensure_future(cycle.receive())
        await settle()
        assert not second.done()
        cycle.disconnected = True
        cycle.message_event.set()
        assert (await second)["type"] == "http.disconnect"

    asyncio.run(main())


@pytest.mark.parametrize("state", ["disconnected", "response_complete"])
def test_given_a_request_that_is_over_when_its_body_is_read_then_there_is_none(state: str) -> None:
    async def main() -> None:
        cycle = held(Writes())
        cycle.body, cycle.more_body = bytearray(b"{}"), False
        setattr(cycle, state, True)
        cycle.message_event.set()
        assert (await cycle.receive())["type"] == "http.disconnect"

    asyncio.run(main())
