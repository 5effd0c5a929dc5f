"""Large answers: what is told of a prompt is written once, in slices, and no delta is large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.types import ASGIApp, Message

from gateway import generation as generation_module
from gateway import slices
from gateway.answers import ChatAnswer, CompletionAnswer, chunks_of
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.generation import Generation, PromptState
from gateway.logprobs import LogprobRoom
from gateway.metrics import GatewayMetrics
from gateway.output_parts import SLICE_ENTRIES
from gateway.routes.tokenize import detokenize, tokenize
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.slices import PART_BYTES, SlicedResponse, Written
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from gateway.text_jobs import pack_ids
from novainfer.client.output import ChoiceDelta
from novainfer.client.stream import RequestStream
from novainfer.protocol.messages import EngineInfo, Logprobs, PromptLogprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

N = 4
PROMPT = [token % 300 + 3 for token in range(200)]
OUTPUT = [token % 290 + 5 for token in range(500)]
CHAT = ChatRequest.model_validate(
    {"messages": [{}], "n": N, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
)
COMPLETION = CompletionRequest.model_validate(
    {"prompt": "x", "n": N, "logprobs": 20, "echo": True, "prompt_logprobs": 20}
)


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)


def entries(token_ids: list[int]) -> list[Logprobs]:
    top = list(range(3, 23))
    return [Logprobs(token, -0.5, 1, top, [-0.5 - i for i in top]) for token in token_ids]


def generation_of(tokenizer: Tokenizer) -> Generation:
    """One whose choices have all ended while nobody looked."""
    stream = RequestStream(["r"], lambda *_: None)
    params = SamplingParams(n=N, logprobs=20, prompt_logprobs=20, max_tokens=len(OUTPUT))
    stream.push(PromptLogprobs("r", 1, entries(PROMPT[1:])))
    for choice in range(N):
        stream.push(TokenOutput("r", choice, 0, OUTPUT, "length", logprobs=entries(OUTPUT)))
    stream.end("r")
    return Generation(
        [PromptState("r", PROMPT, params, [2], echo=tokenizer.decode(PROMPT))],
        stream,
        tokenizer,
        GatewayMetrics("m", ClientView),
        engine=EngineInfo(1, True),
        info=RequestInfo("r"),
        after_prompt=True,
    )


def record_of(request: ChatRequest | CompletionRequest) -> StreamRecord:
    return StreamRecord.of(request, "id", 1, "m", receipt=False)


def answer_of(generation: Generation, request: ChatRequest | CompletionRequest) -> ChatAnswer | CompletionAnswer:
    if isinstance(request, ChatRequest):
        return ChatAnswer(generation, record_of(request), request, LogprobRoom())
    return CompletionAnswer(generation, record_of(request), request, LogprobRoom())


async def turns_of_others(work: Awaitable[object]) -> int:
    """How often another task has its turn while `work` is done."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    await work
    task.cancel()
    return turns


async def _drop(message: Message) -> None:
    return None


async def _no_message() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("request_", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_given_a_whole_answer_when_it_is_made_and_sent_then_others_have_their_turns_all_the_while(
    tokenizer: Tokenizer, request_: ChatRequest | CompletionRequest
) -> None:
    async def answer() -> list[int]:
        generation = generation_of(tokenizer)
        whole = answer_of(generation, request_)
        turns, done = [], []

        async def timed(work: Awaitable[object]) -> None:
            done.append(await work)

        turns.append(await turns_of_others(timed(generation.collect(whole.describe))))
        turns.append(await turns_of_others(timed(whole.write(done[0], None))))  # type: ignore[arg-type]
        turns.append(await turns_of_others(timed(SlicedResponse.of(done[1], {}))))  # type: ignore[arg-type]
        response = done[2]
        assert isinstance(response, SlicedResponse)
        assert len(response._parts) > N
        assert len(json.loads(b"".join(response._parts))["choices"]) == N
        turns.append(await turns_of_others(response({"type": "http"}, _no_message, _drop)))
        return turns

    collected, written, encoded, sent = asyncio.run(answer())
    assert collected > N * len(OUTPUT) * 21 // SLICE_ENTRIES
    assert written > len(PROMPT)
    assert encoded > N * len(OUTPUT)
    assert sent > N


def test_given_a_pile_of_tokens_when_streamed_then_others_have_their_turns_and_no_event_is_large(
    tokenizer: Tokenizer,
) -> None:
    generation = generation_of(tokenizer)
    chunks = chunks_of(generation, record_of(COMPLETION), None)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    response = SseResponse(generation, chunks, chunks.last, {}, 30.0)
    turns = asyncio.run(turns_of_others(response({"type": "http"}, _no_message, send)))
    assert turns > len(PROMPT) + N * len(OUTPUT) * 21 // SLICE_ENTRIES
    told = [json.loads(line[6:]) for line in b"".join(sent).split(b"\n") if line.startswith(b"data: {")]
    sizes = [len(choice["logprobs"]["tokens"]) for chunk in told for choice in chunk["choices"]]
    assert sum(sizes) == N * (len(PROMPT) + len(OUTPUT))
    assert max(sizes) * 21 <= max(SLICE_ENTRIES, len(PROMPT) * 21)
    assert len(sent) > N


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The token ids of the prompt whose log-probabilities are described from now on."""
    described: list[int] = []
    original: Callable[..., object] = generation_module.describe_logprobs

    def describe(tokenizer: Tokenizer, entry: Logprobs, offset: int) -> object:
        described.append(entry.token_id)
        return original(tokenizer, entry, offset)

    monkeypatch.setattr(generation_module, "describe_logprobs", describe)
    return described


@pytest.mark.parametrize("is_stream", [False, True])
def test_given_many_choices_when_their_prompt_is_told_in_each_then_it_is_described_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    described = count_calls(monkeypatch)
    generation = generation_of(tokenizer)

    async def ask() -> None:
        if is_stream:
            chunks = chunks_of(generation, record_of(COMPLETION), None)
            await SseResponse(generation, chunks, chunks.last, {}, 30.0)({"type": "http"}, _no_message, _drop)
            return
        answer = answer_of(generation, COMPLETION)
        wholes: list[ChoiceDelta] = await generation.collect(answer.describe)
        choices = json.loads("".join(await answer.write(wholes, None)))["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [len(PROMPT)] * N
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(PROMPT) + len(OUTPUT)] * N

    asyncio.run(ask())
    assert described == PROMPT[1:]


MANY = list(range(300)) * 300
TEXT = 'é "\n\u2028' * 100_000


class Call:
    """One of `/tokenize` or `/detokenize`, for which a text process had very much to tell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.info = RequestInfo("r")
        self.bodies: list[bytes] = []
        self.service: Any = SimpleNamespace(
            check_model=str,
            admit=nullcontext,
            tokenizer=tokenizer,
            max_model_len=256,
            num_token_ids=300,
            client=SimpleNamespace(limits=None),
        )

    async def parse(self, kind: type[BaseModel]) -> tuple[BaseModel, dict[str, str]]:
        return kind.model_validate({"prompt": "x", "return_token_strs": True, "tokens": MANY}), {"x-a": "b"}

    async def prepare(self, job: object) -> list[bytes]:
        return [pack_ids(MANY)]

    async def decode(self, job: object) -> list[str]:
        return [TEXT]

    async def answer(self, response: ASGIApp) -> None:
        sent: list[bytes] = []

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))

        await response({"type": "http"}, _no_message, send)
        self.bodies.append(b"".join(sent))


@pytest.mark.parametrize(
    "written",
    [Written(["x" * (3 * PART_BYTES + 1)]), Written(["[", "é" * 2 * PART_BYTES, "]"]), Written(["{}"]), Written([""])],
    ids=["one piece", "a large piece among others", "short", "empty"],
)
def test_given_an_answer_in_large_pieces_when_it_is_sent_then_its_parts_are_small_all_the_same(
    written: Written,
) -> None:
    """A part that is written waits in our memory for its client, and what answers take there is bounded by parts."""
    response = asyncio.run(SlicedResponse.of(written, {}))
    assert b"".join(response._parts) == "".join(written).encode()
    assert max(map(len, response._parts)) <= PART_BYTES


def test_given_a_text_of_very_many_tokens_when_they_are_told_then_others_have_their_turns_all_the_while(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> tuple[int, int]:
        call: Any = Call(tokenizer)
        turns = await turns_of_others(tokenize(call)), await turns_of_others(detokenize(call))
        strings = [tokenizer.token(token_id) for token_id in MANY]
        expected = {"count": len(MANY), "max_model_len": 256, "tokens": MANY, "token_strs": strings}
        assert json.loads(call.bodies[0]) == expected
        assert json.loads(call.bodies[1]) == {"prompt": TEXT}
        return turns

    tokenized, detokenized = asyncio.run(main())
    assert tokenized > 5 * len(MANY) // 2048, "ids and spellings are written, and both encoded, in parts; some are sent"
    assert detokenized > 3 * len(TEXT) // PART_BYTES, "written, encoded and sent"
