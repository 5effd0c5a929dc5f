"""What an answer costs: few writes, its head and its end going with what stands beside them, and few turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.responses import Response

from gateway.answer_transports import HeldHead
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


def held(pipe: Writes, *, expects: bool = False) -> Any:
    """A cycle whose head is held."""
    cycle = cycle_on(pipe)
    cycle.waiting_for_100_continue = expects
    cycle.transport = cast(asyncio.Transport, HeldHead(cycle))
    return cycle


def test_given_a_whole_answer_when_sent_then_head_and_body_are_one_write_and_what_follows_goes_at_once() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await Response(b"first", 200)(cycle.scope, cycle.receive, cycle.send)
        assert len(pipe.parts) == 1
        assert pipe.data.endswith(b"content-length: 5\r\n\r\nfirst")
        assert cycle.transport is pipe

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


def test_given_an_answer_that_ends_behind_its_head_when_closed_then_the_head_has_gone() -> None:
    async def main() -> None:
        pipe = Writes()
        cycle = held(pipe)
        await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
        assert pipe.parts == []
        cycle.transport.close()
        assert pipe.is_closed
        assert pipe.data.startswith(b"HTTP/1.1 200")

    asyncio.run(main())


def test_given_a_stream_when_it_ends_then_its_last_events_are_one_write(tmp_path: Any) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))

    async def main() -> None:
        server = Server(tokenizer)
        server.pipe = server.cycle.transport = pipe = Writes()
        server.cycle.transport = cast(asyncio.Transport, HeldHead(server.cycle))
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
