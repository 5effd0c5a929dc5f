"""What all generations share: one is started, and answered with, whole or as a stream."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from gateway.answers import ChatAnswer, ChatChunks, CompletionAnswer, CompletionChunks, chunks_of
from gateway.response_echo import Echo
from gateway.response_events import RESPONSE_PREFIX, ResponseAnswer, ResponseChunks
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.service import new_response_id, unix_now
from gateway.slices import SlicedResponse
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from novainfer.errors import InvalidRequestError
from novainfer.text.parts import Telling


@dataclass(frozen=True, slots=True)
class Manner:
    """How an answer is told. model: the name that the client used. telling: what is taken out of the text.

    receipt: whether it has one. echo: what an answer of `/v1/responses` repeats; None: it is none.
    """

    model: str
    receipt: bool
    telling: Telling | None = None
    echo: Echo | None = None


async def generate(
    call: Call,
    request: ChatRequest | CompletionRequest,
    prompts: list[tuple[list[int], str]],
    headers: dict[str, str],
    manner: Manner,
) -> None:
    """Answer with what follows the prompts, given as (token ids, text to echo). Raises what `service.start` raises."""
    service, echo = call.service, manner.echo
    prefix = "cmpl-"
    if isinstance(request, ChatRequest):
        prefix = "chatcmpl-" if echo is None else RESPONSE_PREFIX
    response_id = new_response_id(prefix)
    record = StreamRecord.of(
        request, response_id, unix_now(), manner.model, receipt=manner.receipt, telling=manner.telling
    )
    record.is_response = echo is not None
    if manner.receipt and record.prompt_alone:
        raise InvalidRequestError("A receipt is about tokens, and max_tokens is 0.", param="receipt")
    generation = service.start(request, record, prompts, call.info)
    receipts = service.receipts(generation, manner.model) if manner.receipt else None
    headers[MODE_HEADER] = generation.engine.mode
    with ExitStack() as held:
        with service.live(generation, response_id, call.info):
            if request.stream:
                chunks: ChatChunks | CompletionChunks | ResponseChunks
                if echo is None:
                    chunks = chunks_of(generation, record, receipts)
                else:
                    chunks = ResponseChunks(generation, record, echo, service.logprob_room)
                    held.callback(chunks.close)
                patience = service.config.server.client_stall_timeout
                await call.answer(SseResponse(generation, chunks, chunks.last, headers, patience))
                return
            generation.watch(call.receive)
            answer: ChatAnswer | CompletionAnswer | ResponseAnswer
            if echo is not None:
                answer = ResponseAnswer(generation, record, echo, service.logprob_room)
            elif isinstance(request, ChatRequest):
                answer = ChatAnswer(generation, record, request, service.logprob_room)
            else:
                answer = CompletionAnswer(generation, record, request, service.logprob_room)
            held.callback(answer.close)
            wholes = await generation.collect(answer.describe)
            whole = await SlicedResponse.of(await answer.write(wholes, receipts), headers)
            answer.forget()
        await call.answer(whole)
