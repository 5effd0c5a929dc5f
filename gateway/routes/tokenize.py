"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from starlette.responses import Response

from gateway.routes.chat import chat_job, refuse_tool_choice
from gateway.routes.endpoint import Call, json_response
from gateway.schemas import DetokenizeRequest, TokenizeRequest
from gateway.text_jobs import DecodeJob, EncodeJob, pack_ids
from novainfer.errors import InvalidRequestError


async def tokenize(call: Call) -> Response:
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
            (token_ids,) = await call.encode(chat_job(request, service.max_model_len))
        else:
            special = request.add_special_tokens is not False
            (token_ids,) = await call.encode(EncodeJob("prompt", [prompt.encode()], special))
    limits = service.client.limits
    strings = [service.tokenizer.token(token_id) for token_id in token_ids] if request.return_token_strs else None
    answer = {
        "count": len(token_ids),
        "max_model_len": limits.max_model_len if limits is not None else 0,
        "tokens": token_ids,
        "token_strs": strings,
    }
    return json_response(answer, headers)


async def detokenize(call: Call) -> Response:
    """Text of token ids, special tokens included. Those that the model has beyond its tokenizer have none."""
    service = call.service
    request, headers = await call.parse(DetokenizeRequest)
    service.check_model(request.model)
    if any(token_id >= service.num_token_ids for token_id in request.tokens):
        raise InvalidRequestError("tokens holds an id that neither the model nor its tokenizer has.", param="tokens")
    with service.admit(call.info):
        (text,) = await call.decode(DecodeJob("tokens", [pack_ids(request.tokens)], skip_special_tokens=False))
    return json_response({"prompt": text}, headers)
