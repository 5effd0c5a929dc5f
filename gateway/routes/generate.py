"""What chat and text completions share: a generation is started, and answered with, whole or as a stream."""

from __future__ import annotations

from contextlib import ExitStack

from gateway.answers import ChatAnswer, CompletionAnswer, chunks_of
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.service import new_response_id, unix_now
from gateway.slices import SlicedResponse
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from novainfer.errors import InvalidRequestError
from novainfer.text.parts import Telling


async def generate(
    call: Call,
    request: ChatRequest | CompletionRequest,
    prompts: list[tuple[list[int], str]],
    headers: dict[str, str],
    *,
    model: str,
    wants_receipt: bool,
    telling: Telling | None = None,
) -> None:
    """Answer with what follows the prompts, given as (token ids, text to echo). Raises what `service.start` raises.

    model: the name that the client used. telling: what is taken out of the text.
    """
    service = call.service
    response_id = new_response_id("chatcmpl" if isinstance(request, ChatRequest) else "cmpl")
    record = StreamRecord.of(request, response_id, unix_now(), model, receipt=wants_receipt, telling=telling)
    if wants_receipt and record.prompt_alone:
        raise InvalidRequestError("A receipt is about tokens, and max_tokens is 0.", param="receipt")
    generation = service.start(request, record, prompts, call.info)
    receipts = service.receipts(generation, model) if wants_receipt else None
    headers[MODE_HEADER] = generation.engine.mode
    with ExitStack() as held:
        with service.live(generation, response_id, call.info):
            if request.stream:
                chunks = chunks_of(generation, record, receipts)
                patience = service.config.server.client_stall_timeout
                await call.answer(SseResponse(generation, chunks, chunks.last, headers, patience))
                return
            generation.watch(call.receive)
            answer: ChatAnswer | CompletionAnswer
            if isinstance(request, ChatRequest):
                answer = ChatAnswer(generation, record, request, service.logprob_room)
            else:
                answer = CompletionAnswer(generation, record, request, service.logprob_room)
            held.callback(answer.close)
            wholes = await generation.collect(answer.describe)
            whole = await SlicedResponse.of(await answer.write(wholes, receipts), headers)
            answer.forget()
        await call.answer(whole)
