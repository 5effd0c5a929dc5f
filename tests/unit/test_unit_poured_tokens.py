"""Tokens that go straight into the connection: the same stream as through the task, whenever which way is taken."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from gateway.answer_cycle import AnswerCycle
from gateway.answers import chunks_of, spelling_of
from gateway.body import ClientGone
from gateway.body_writer import BodyWriter, WatchedFlow
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.generation import Generation, PromptState
from gateway.metrics import GatewayMetrics
from gateway.plain_choice import Spelling
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from novainfer.client.output import ChoiceDelta
from novainfer.client.stream import Backlog, RequestStream
from novainfer.protocol.messages import EngineInfo, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

PROMPT = [5, 6, 7]
REQUEST = CompletionRequest.model_validate({"prompt": "x", "stream": True, "return_token_ids": True})


class Pipe(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It has no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing comes."""

    def resume_reading(self) -> None:
        """Nothing comes."""


def cycle_on(pipe: Pipe) -> AnswerCycle:
    log = logging.getLogger("test")
    scope: Any = {"type": "http", "method": "POST", "http_version": "1.1", "client": None, "path": "/"}
    return AnswerCycle(
        scope=scope,
        transport=pipe,
        flow=WatchedFlow(pipe),
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


class Server:
    """One stream from an engine that the test plays to a pipe."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest | ChatRequest = REQUEST, **params: Any) -> None:
        self.backlog = Backlog()
        self.stream = RequestStream(["r"], lambda *_: self.cancels.append("r"), backlog=self.backlog)
        self.cancels: list[str] = []
        self.pipe = Pipe()
        self.cycle = cycle_on(self.pipe)
        self.generation = Generation(
            [PromptState("r", PROMPT, SamplingParams(max_tokens=100, **params), [2])],
            self.stream,
            tokenizer,
            GatewayMetrics("m", ClientView),
            engine=EngineInfo(1, True),
            info=RequestInfo("r"),
            after_prompt=True,
        )
        record = StreamRecord.of(request, "id", 1, "m", receipt=False)
        self.chunks = chunks_of(self.generation, record, None)
        self.response = SseResponse(self.generation, self.chunks, self.chunks.last, {}, 30.0)
        self.num_sent = 0

    async def send(self, message: Message) -> None:
        """The way through the layers."""
        self.num_sent += 1
        await self.cycle.send(message)  # type: ignore[arg-type]

    def come(self, place: int, token_id: int, choice: int = 0) -> None:
        """A plain token from the engine, as a session hands it on."""
        way = self.generation._plain.get(("r", choice))
        if way is not None and way.is_open:
            way.pour([(way, token_id)])
        else:
            self.stream.push_token("r", choice, place, token_id)

    def start(self) -> asyncio.Task[None]:
        scope: Any = self.cycle.scope
        return asyncio.create_task(self.response(scope, self.cycle.receive, self.send))

    def events(self) -> list[dict[str, Any]]:
        """What the client has got, but `[DONE]`."""
        head, _, rest = self.pipe.data.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            body, rest = body + rest[:length], rest[length + 2 :]
        parts = [part.partition("data: ")[2] for part in body.decode().split("\n\n")]
        return [json.loads(part) for part in parts if part.startswith("{")]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def token_ids(events: list[dict[str, Any]]) -> list[int]:
    return [i for event in events for choice in event["choices"] for i in choice.get("token_ids") or []]


def text(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}
REQUESTS = [
    REQUEST,
    CompletionRequest.model_validate({"prompt": "x", "stream": True}),
    CompletionRequest.model_validate({"prompt": "x", "stream": True, "stream_options": {"include_event_ids": True}}),
    CompletionRequest.model_validate({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}),
    ChatRequest.model_validate(CHAT),
    ChatRequest.model_validate({**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), request=st.sampled_from(REQUESTS))
def test_given_any_pace_and_a_client_that_is_slow_at_times_when_streamed_then_all_comes_once_and_in_order(
    tokenizer: Tokenizer, seed: int, request: CompletionRequest | ChatRequest
) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(3, 300) for _ in range(rng.randrange(2, 60))]

    async def main() -> list[dict[str, Any]]:
        server = Server(tokenizer, request)
        task = server.start()
        place = 0
        while place < len(tokens):
            count = min(rng.choice([1, 1, 1, 2, 5, 80]), len(tokens) - place)
            part = tokens[place : place + count]
            is_last = place + count == len(tokens)
            if count > 1 or is_last or place == 0:
                server.stream.push(TokenOutput("r", 0, place, part, "length" if is_last else None))
            else:
                server.come(place, part[0])
            place += count
            server.backlog.is_behind = rng.random() < 0.1
            if rng.random() < 0.2:
                server.cycle.flow.pause_writing()
            if rng.random() < 0.7:
                await settle()
            if rng.random() < 0.7:
                server.cycle.flow.resume_writing()
        server.stream.end("r")
        server.cycle.flow.resume_writing()
        await asyncio.wait_for(task, 20)
        server.generation.close()
        return server.events()

    events = asyncio.run(main())
    if request.return_token_ids:
        assert token_ids(events) == tokens
    assert text(events) == tokenizer.decode([*PROMPT, *tokens])[len(tokenizer.decode(PROMPT)) :]
    assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == "length"
    usages = [event["usage"] for event in events if event.get("usage")]
    assert [usage["completion_tokens"] for usage in usages][-1:] in ([], [len(tokens)])


def test_given_a_stream_that_has_begun_when_plain_tokens_come_then_no_task_is_needed(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        server = Server(tokenizer)
        task = server.start()
        server.come(0, 5)
        await settle()
        sent = server.num_sent
        for place in range(1, 6):
            server.come(place, 5 + place)
        assert token_ids(server.events()) == [5, 6, 7, 8, 9, 10], "at once"
        assert server.num_sent == sent
        server.cycle.flow.pause_writing()
        server.come(6, 11)
        await settle()
        assert token_ids(server.events()) == [5, 6, 7, 8, 9, 10], "its client is slow"
        server.cycle.flow.resume_writing()
        await settle()
        assert token_ids(server.events()) == [5, 6, 7, 8, 9, 10, 11]
        task.cancel()
        await asyncio.wait([task])
        server.generation.close()

    asyncio.run(main())


def test_given_a_stop_string_when_it_is_met_on_the_way_then_the_choice_ends_and_the_engine_hears(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokens = [5, 6, 7, 8, 9]
    after = tokenizer.decode([*PROMPT, 5, 6])
    stop = tokenizer.decode([*PROMPT, 5, 6, 7])[len(after) :]

    async def main() -> None:
        server = Server(tokenizer, stop=[stop])
        task = server.start()
        for place, token in enumerate(tokens):
            server.come(place, token)
            await settle()
        assert server.cancels == ["r"]
        server.stream.end("r")
        await asyncio.wait_for(task, 20)
        server.generation.close()
        events = server.events()
        assert token_ids(events) == [5, 6, 7]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert text(events) == after[len(tokenizer.decode(PROMPT)) :]

    asyncio.run(main())


def test_given_a_backlog_when_tokens_come_then_they_are_merged_and_the_next_ones_poured_again(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> None:
        server = Server(tokenizer)
        task = server.start()
        server.come(0, 5)
        await settle()
        server.come(1, 6)
        server.backlog.is_behind = True
        for index in range(2, 9):
            server.come(index, index + 5)
        await settle()
        server.backlog.is_behind = False
        server.come(9, 14)
        server.stream.push(TokenOutput("r", 0, 10, [15], "length"))
        server.stream.end("r")
        await asyncio.wait_for(task, 20)
        server.generation.close()
        ids = [choice.get("token_ids") for event in server.events() for choice in event.get("choices", [])]
        told = [part for part in ids if part]
        assert told == [[5], [6], [7, 8, 9, 10, 11, 12, 13], [14], [15]]

    asyncio.run(main())


def test_given_no_httptools_when_a_gateway_is_imported_then_there_is_no_short_way_and_nothing_else_is_missing() -> None:
    words = """
import sys
sys.modules["httptools"] = None
import gateway.process
from gateway.body_writer import BodyWriter
from uvicorn.protocols.http.h11_impl import RequestResponseCycle
assert gateway.process._http_protocol(1.0, None) == "h11"
assert BodyWriter.of(RequestResponseCycle.receive.__get__(object())) is None
"""
    subprocess.run([sys.executable, "-c", words], check=True, timeout=120)


PLAIN = CompletionRequest.model_validate({"prompt": "x", "stream": True})


async def begun(tokenizer: Tokenizer, choices: int = 1) -> tuple[Server, asyncio.Task[None]]:
    """A stream of which nothing but text is told, each choice with two tokens, so that the rest goes the short way."""
    server = Server(tokenizer, PLAIN, n=choices)
    task = server.start()
    for place, token in enumerate((5, 6)):
        for choice in range(choices):
            server.come(place, token, choice)
        await settle()
    assert len(server.generation._plain) == choices
    return server, task


async def cancelled(server: Server, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    server.generation.close()


def test_given_a_plain_stream_when_tokens_come_then_no_task_is_needed_and_a_slow_client_gets_them_later(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> None:
        server, task = await begun(tokenizer)
        sent, tokens = server.num_sent, [5, 6]
        for place in range(2, 6):
            tokens.append(5 + place)
            server.come(place, tokens[-1])
        after = tokenizer.decode(PROMPT)
        assert text(server.events()) == tokenizer.decode([*PROMPT, *tokens])[len(after) :], "at once"
        server.cycle.flow.pause_writing()
        before = server.pipe.data
        for place in range(6, 9):
            tokens.append(5 + place)
            server.come(place, tokens[-1])
            await settle()
        assert server.pipe.data == before
        assert server.num_sent <= sent + 1, "it waits in a send"
        server.cycle.flow.resume_writing()
        await settle()
        assert text(server.events()) == tokenizer.decode([*PROMPT, *tokens])[len(after) :]
        await cancelled(server, task)

    asyncio.run(main())


def test_given_plain_choices_when_their_tokens_come_then_each_goes_to_its_own_and_each_gap_is_measured(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> None:
        server, task = await begun(tokenizer, choices=3)
        gaps = server.generation._metrics.between_tokens
        before, sum_before = sum(gaps._counts), gaps._sum
        began = server.generation._times._last[0]
        for place in range(2, 12):
            for choice in range(3):
                server.come(place, 20 + 3 * place + choice, choice)
        took = time.perf_counter() - began
        assert sum(gaps._counts) - before == 30
        assert 0 < gaps._sum - sum_before < 3 * took + 1e-6, "each since the one before"
        said: dict[int, str] = {}
        for event in server.events():
            for choice in event["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
        for choice in range(3):
            tokens = [5, 6, *(20 + 3 * place + choice for place in range(2, 12))]
            assert said[choice] == tokenizer.decode([*PROMPT, *tokens])[len(tokenizer.decode(PROMPT)) :]
        await cancelled(server, task)

    asyncio.run(main())


def test_given_a_plain_stream_when_its_tokens_come_then_the_client_is_not_told_that_we_are_there(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> None:
        server, task = await begun(tokenizer)
        watch = server.response._watch
        began, watch.waits_since = watch.time(), -1e9
        server.come(2, 7)
        watch._look()
        assert watch.waits_since >= began
        assert server.num_sent == 2, "no word of ours"
        await cancelled(server, task)

    asyncio.run(main())


@pytest.mark.parametrize("request_", [REQUEST, PLAIN])
def test_given_a_fault_on_the_way_when_a_token_comes_then_the_stream_ends_with_an_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, request_: CompletionRequest
) -> None:
    async def main() -> None:
        server = Server(tokenizer, request_)
        task = server.start()
        for place in range(2):
            server.come(place, 5 + place)
            await settle()

        def fail(self: object, *arguments: object) -> bytes:
            raise RuntimeError("a fault")

        if request_ is PLAIN:
            spelling_of(tokenizer).known.clear()  # other tests have taught it
            monkeypatch.setattr(Spelling, "learn", fail)
        else:
            monkeypatch.setattr(BodyWriter, "write", fail)
        server.come(2, 7)  # raises nothing here: other streams are behind it
        await asyncio.wait_for(task, 20)
        server.generation.close()
        assert "error" in server.events()[-1]

    asyncio.run(main())


@pytest.mark.parametrize("request_", [REQUEST, PLAIN])
def test_given_a_client_that_has_gone_when_a_token_comes_then_nothing_is_written(
    tokenizer: Tokenizer, request_: CompletionRequest
) -> None:
    async def main() -> None:
        server = Server(tokenizer, request_)
        task = server.start()
        for place in range(2):
            server.come(place, 5 + place)
            await settle()
        server.cycle.disconnected = True
        server.cycle.flow.on_lost()  # as the connection calls it
        await settle()
        before = server.pipe.data
        server.come(2, 7)
        await asyncio.wait_for(task, 20)
        server.generation.close()
        assert server.pipe.data == before
        with pytest.raises(ClientGone):
            list(server.generation.take())

    asyncio.run(main())


def test_given_a_client_that_becomes_slow_with_a_token_when_it_is_written_then_it_is_told_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        server, task = await begun(tokenizer)
        plain = next(iter(server.generation._plain.values()))
        write = plain.write

        def write_and_pause(data: bytes) -> None:
            write(data)
            server.cycle.flow.pause_writing()

        plain.write = write_and_pause
        server.come(2, 7)
        assert not plain.is_open
        plain.write = write
        server.cycle.flow.resume_writing()
        server.come(3, 8)
        await settle()
        assert text(server.events()) == tokenizer.decode([*PROMPT, 5, 6, 7, 8])[len(tokenizer.decode(PROMPT)) :]
        await cancelled(server, task)

    asyncio.run(main())


def test_given_a_plain_stream_when_it_is_closed_then_nothing_of_it_waits_for_a_collection(tokenizer: Tokenizer) -> None:
    async def main() -> weakref.ref[Generation]:
        server, task = await begun(tokenizer)
        await cancelled(server, task)
        generation = weakref.ref(server.generation)
        server.chunks = server.response = server.generation = None  # type: ignore[assignment]
        return generation

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


def test_given_another_server_when_its_receive_is_asked_then_there_is_no_short_way() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert BodyWriter.of(receive) is None


def test_given_a_delta_without_text_when_written_then_no_empty_part_ends_the_body(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        server = Server(tokenizer)
        task = server.start()
        server.come(0, 5)
        await settle()
        server.chunks = lambda delta: b""  # type: ignore[assignment]
        server.response._chunks = server.chunks
        before = server.pipe.data
        server.response.write(ChoiceDelta(0))
        assert server.pipe.data == before
        task.cancel()
        await asyncio.wait([task])
        server.generation.close()

    asyncio.run(main())
