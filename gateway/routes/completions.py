"""`POST /v1/completions`."""

from __future__ import annotations

from starlette.responses import Response

from gateway.answers import Envelope, chunks_of, completion_answer
from gateway.routes.endpoint import MODE_HEADER, Call, json_response
from gateway.schemas import MAX_PROMPTS, CompletionRequest
from gateway.service import new_response_id, unix_now
from gateway.sse import SseResponse
from gateway.stream_record import StreamRecord
from gateway.text_jobs import DecodeJob, EncodeJob, pack_ids
from novainfer.errors import InvalidRequestError

Prompt = str | list[int]


async def completions(call: Call) -> Response | None:
    """Continue one or several prompts, whole or as a stream."""
    service = call.service
    call.limit_time()
    request, headers = await call.parse(CompletionRequest)
    wants_receipt = call.wants_receipt(request)
    model = service.check_model(request.model)
    prompts = split_prompts(request.prompt)
    with service.admit_generation(call.info, request, len(prompts)):
        encoded = await _encode(call, request, prompts)
        response_id = new_response_id("cmpl")
        record = StreamRecord.of(request, response_id, unix_now(), model, receipt=wants_receipt)
        generation = service.start(request, record, encoded, call.info)
        receipts = service.receipts(generation, model) if wants_receipt else None
        headers[MODE_HEADER] = generation.engine.mode
        with service.live(generation, response_id, call.info):
            if request.stream:
                chunks = chunks_of(generation, record, receipts)
                stall_seconds = service.config.server.client_stall_timeout
                response = SseResponse(generation, chunks, chunks.last, headers, stall_seconds)
                await response(call.scope, call.receive, call.send)
                return None
            generation.watch(call.receive)
            wholes = await generation.collect()
            envelope = Envelope(response_id, "text_completion", record.created, model)
            answer = completion_answer(generation, envelope, request, wholes)
            return json_response(answer | (await receipts.fields() if receipts else {}), headers)


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """One or many prompts, as a list. A list of integers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    many: list[Prompt] = []
    single: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            single.append(item)
        else:
            many.append(item)
    prompts: list[Prompt] = [single] if single else many
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts.", param="prompt")
    return prompts


async def _encode(call: Call, request: CompletionRequest, prompts: list[Prompt]) -> list[tuple[list[int], str]]:
    """(token ids, the text to echo) of each prompt. All are texts, or all are ids."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        special = request.add_special_tokens is not False
        encoded = [text.encode() for text in texts]
        ids = await call.encode(EncodeJob("prompt", encoded, special, call.service.max_model_len))
    elif request.echo:
        packed = [pack_ids(prompt) for prompt in ids]
        texts = await call.decode(DecodeJob("prompt", packed, skip_special_tokens=True))
    return list(zip(ids, texts if request.echo else [""] * len(ids), strict=True))
