"""`POST /v1/embeddings`: the vector of each text, in OpenAI's shape. See `novainfer.embedding`."""

from __future__ import annotations

from gateway.embedding import EmbeddingsResponse, check_numbers, start_embeddings
from gateway.routes.completions import Prompt, split_prompts
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.schemas import MAX_INPUTS, EmbeddingRequest, too_many_inputs
from gateway.service import new_response_id
from gateway.text_jobs import EncodeJob
from novainfer.client.output import ChoiceDelta
from novainfer.errors import InvalidRequestError

_NAMES = {"prompt": "input", "n": "input"}  # as the client knows what a prompt is


async def embeddings(call: Call) -> None:
    """The embedding of one or several texts."""
    try:
        await _embed(call)
    except InvalidRequestError as error:
        param = _NAMES.get(error.param or "", error.param)
        raise InvalidRequestError(error.message, param=param, code=error.code) from None


async def _embed(call: Call) -> None:
    service = call.service
    call.limit_time()
    request, headers = await call.parse(EmbeddingRequest)
    model = service.check_model(request.model)
    service.pooling.check()
    prompts = split_prompts(request.input, MAX_INPUTS, too_many_inputs)
    with service.admit_generation(call.info, request, len(prompts)):
        check_numbers(request, len(prompts), service.engine_info())
        inputs = await _encode(call, request, prompts)
        del prompts
        request = request.model_copy(update={"input": "", "user": None})  # nothing of it is held while it is answered
        response_id = new_response_id("embd-")
        generation = start_embeddings(service, request, inputs, response_id, call.info)
        del inputs
        headers[MODE_HEADER] = generation.engine.mode
        with service.live(generation, response_id, call.info):
            generation.watch(call.receive)
            await generation.collect(_forget)
            response = EmbeddingsResponse.of(generation, request, model, normalizes=service.pooling.normalizes)
        response.headers = headers
        await call.answer(response)


def _forget(delta: ChoiceDelta) -> None:
    """Nothing of its text is told."""


async def _encode(call: Call, request: EmbeddingRequest, prompts: list[Prompt]) -> list[list[int]]:
    """The token ids of each input. All are texts, or all are ids."""
    texts = [prompt.encode() for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    special = request.add_special_tokens is not False
    return await call.encode(EncodeJob("input", texts, special, call.service.max_model_len))
