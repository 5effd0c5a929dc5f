"""`POST /tokenize` and `/detokenize`, in vLLM's shapes and also below `/v1`; `POST /apply-template`, in llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable

from gateway.routes.chat import chat_job, refuse_tool_choice
from gateway.routes.endpoint import Call
from gateway.schemas import DetokenizeRequest, TemplateRequest, TokenizeRequest
from gateway.slices import PART_BYTES, SlicedResponse, Slices, Written, to_json, write_object
from gateway.text_jobs import DecodeJob, EncodeJob, RenderJob, pack_ids
from novainfer.errors import InvalidRequestError

PART_IDS = 2048  # that are written at once


async def tokenize(call: Call) -> None:
    """Token ids of a text or of a rendered chat."""
    service = call.service
    request, headers = await call.parse(TokenizeRequest)
    service.check_model(request.model)
    prompt = request.prompt
    if (prompt is None) == (request.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    refuse_tool_choice(request)
    with service.admit(call.info):
        if prompt is None:
            job: RenderJob | EncodeJob = chat_job(request, service.max_model_len)
        else:
            job = EncodeJob("prompt", [prompt.encode()], request.add_special_tokens is not False)
        (packed,) = await call.prepare(job)
        ids = memoryview(packed).cast("i")
        answer = {
            "count": len(ids),
            "max_model_len": service.max_model_len,
            "tokens": await write_each(ids, int),
            "token_strs": await write_each(ids, service.tokenizer.token) if request.return_token_strs else None,
        }
        response = await SlicedResponse.of(write_object(answer), headers)
        del request, prompt, job, packed, ids, answer  # what a slow reader keeps waiting is the answer's bytes alone
        await call.answer(response)


async def apply_template(call: Call) -> None:
    """The prompt of a chat, as text."""
    service = call.service
    request, headers = await call.parse(TemplateRequest)
    service.check_model(request.model)
    refuse_tool_choice(request)
    with service.admit(call.info):
        (text,) = await call.prepare(chat_job(request, service.max_model_len))
        response = await _text_response(str(text, "utf-8"), headers)
        del request, text
        await call.answer(response)


async def write_each(ids: memoryview, told: Callable[[int], int | str | None]) -> Written:
    """A JSON list of what is `told` of each id, written in slices: a body of digits makes millions of tokens."""
    slices = Slices()
    written = Written(["["])
    for start in range(0, len(ids), PART_IDS):
        part = to_json([*map(told, ids[start : start + PART_IDS])])
        written += ["," if start else "", part[1:-1]]
        await slices.pause()
    written.append("]")
    return written


async def detokenize(call: Call) -> None:
    """Text of token ids, special tokens included. Those that the model has beyond its tokenizer have none."""
    service = call.service
    request, headers = await call.parse(DetokenizeRequest)
    service.check_model(request.model)
    if max(request.tokens, default=0) >= service.num_token_ids:
        raise InvalidRequestError("tokens holds an id that neither the model nor its tokenizer has.", param="tokens")
    with service.admit(call.info):
        (text,) = await call.decode(DecodeJob("tokens", [pack_ids(request.tokens)], skip_special_tokens=False))
        response = await _text_response(text, headers)
        del request, text
        await call.answer(response)


async def _text_response(text: str, headers: dict[str, str]) -> SlicedResponse:
    return await SlicedResponse.of(write_object({"prompt": await _write_text(text)}), headers)


async def _write_text(text: str) -> Written:
    """As a JSON string, in slices."""
    slices = Slices()
    written = Written(['"'])
    for start in range(0, len(text), PART_BYTES):
        written.append(to_json(text[start : start + PART_BYTES])[1:-1])
        await slices.pause()
    written.append('"')
    return written
