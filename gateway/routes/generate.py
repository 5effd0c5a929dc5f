"""What all generations share: one is started, and answered with, whole or as a stream."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from gateway.answers import ChatAnswer, CompletionAnswer, chunks_of
from gateway.generation import Generation
from gateway.logprobs import LogprobRoom
from gateway.receipts import Receipts
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.service import new_response_id, unix_now
from gateway.slices import SlicedResponse, Written
from gateway.sse import Chunks, SseResponse
from gateway.stream_record import StreamRecord
from novainfer.client.output import ChoiceDelta
from novainfer.errors import InvalidRequestError
from novainfer.text.parts import Telling


class StreamWriter(Chunks, Protocol):
    """Writes all events of a stream."""

    async def last(self) -> bytes:
        """Those behind the final delta's."""


class AnswerWriter(Protocol):
    """Writes a whole answer."""

    def describe(self, delta: ChoiceDelta) -> None:
        """Take the next delta."""

    async def write(self, wholes: list[ChoiceDelta], receipts: Receipts | None) -> Written:
        """The answer's JSON, once every choice has ended."""

    def forget(self) -> None:
        """It is written, and will not be again."""


class Form(Protocol):
    """A form in which a chat is told, other than its own. What its writers hold they give back through `held`."""

    @property
    def prefix(self) -> str:
        """Of an answer's id."""

    def chunks(self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack) -> StreamWriter:
        """The writer of a stream."""

    def answer(self, generation: Generation, record: StreamRecord, room: LogprobRoom, held: ExitStack) -> AnswerWriter:
        """The writer of a whole answer."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How an answer is told. model: the name that the client used. telling: what is taken out of the text.

    receipt: whether it has one. form: None of chat and text completions themselves.
    """

    model: str
    receipt: bool
    telling: Telling | None = None
    form: Form | None = None


async def generate(
    call: Call,
    request: ChatRequest | CompletionRequest,
    prompts: list[tuple[list[int], str]],
    headers: dict[str, str],
    manner: Manner,
) -> None:
    """Answer with what follows the prompts, given as (token ids, text to echo). Raises what `service.start` raises."""
    service, form = call.service, manner.form
    prefix = "chatcmpl-" if isinstance(request, ChatRequest) else "cmpl-"
    response_id = new_response_id(prefix if form is None else form.prefix)
    record = StreamRecord.of(
        request, response_id, unix_now(), manner.model, receipt=manner.receipt, telling=manner.telling
    )
    record.is_bound = form is not None
    if manner.receipt and record.prompt_alone:
        raise InvalidRequestError("A receipt is about tokens, and max_tokens is 0.", param="receipt")
    generation = service.start(request, record, prompts, call.info)
    receipts = service.receipts(generation, manner.model) if manner.receipt else None
    headers[MODE_HEADER] = generation.engine.mode
    with ExitStack() as held:
        with service.live(generation, response_id, call.info):
            if request.stream:
                chunks: StreamWriter
                if form is None:
                    chunks = chunks_of(generation, record, receipts)
                else:
                    chunks = form.chunks(generation, record, service.logprob_room, held)
                patience = service.config.server.client_stall_timeout
                await call.answer(SseResponse(generation, chunks, chunks.last, headers, patience))
                return
            generation.watch(call.receive)
            answer: AnswerWriter
            if form is not None:
                answer = form.answer(generation, record, service.logprob_room, held)
            else:
                answer = _answer_of(request, generation, record, service.logprob_room, held)
            wholes = await generation.collect(answer.describe)
            whole = await SlicedResponse.of(await answer.write(wholes, receipts), headers)
            answer.forget()
        await call.answer(whole)


def _answer_of(
    request: ChatRequest | CompletionRequest,
    generation: Generation,
    record: StreamRecord,
    room: LogprobRoom,
    held: ExitStack,
) -> AnswerWriter:
    answer: ChatAnswer | CompletionAnswer
    if isinstance(request, ChatRequest):
        answer = ChatAnswer(generation, record, request, room)
    else:
        answer = CompletionAnswer(generation, record, request, room)
    held.callback(answer.close)
    return answer
