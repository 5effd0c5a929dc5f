"""`POST /v1/embeddings`: the vector of each text, in OpenAI's shape. See `novainfer.embedding`."""

from __future__ import annotations

from gateway.embedding import MOST_AT_ONCE, EmbeddingsResponse, check_input, check_numbers, start_embeddings
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
    at_once = min(len(prompts), service.limits.most_at_once(call.info.tenant, MOST_AT_ONCE))
    with service.admit_generation(call.info, request, at_once):
        engine = service.engine_info()
        check_numbers(request, len(prompts), engine)
        inputs = await _encode(call, request, prompts)
        del prompts
        for token_ids in inputs:
            check_input(token_ids, engine)
        request = request.model_copy(update={"input": "", "user": None})  # nothing of it is held while it is answered
        headers[MODE_HEADER] = engine.mode
        num_tokens = sum(map(len, inputs))
        vectors = await _compute(call, request, inputs, num_tokens, at_once)
        del inputs
        call.info.permit.narrow()  # who reads slowly keeps nobody out
        response = EmbeddingsResponse.of(vectors, num_tokens, request, model, normalizes=service.pooling.normalizes)
        response.headers = headers
        await call.answer(response)


async def _compute(
    call: Call, request: EmbeddingRequest, inputs: list[list[int]], num_tokens: int, at_once: int
) -> list[bytes]:
    """The hidden state of each input, so many at a time. num_tokens: of all inputs."""
    info, response_id, vectors = call.info, new_response_id("embd-"), list[bytes]()
    info.permit.correct(num_tokens)
    used = 0
    for first in range(0, len(inputs), at_once):
        some = inputs[first : first + at_once]
        generation = start_embeddings(call.service, request, some, response_id, info, first=first)
        try:
            with call.service.live(generation, response_id, info):
                generation.watch(call.receive)
                await generation.collect(_forget)
                vectors += generation.all_vectors()
        finally:
            used += generation.num_tokens
            info.permit.use(used)
    return vectors


def _forget(delta: ChoiceDelta) -> None:
    """Nothing of its text is told."""


async def _encode(call: Call, request: EmbeddingRequest, prompts: list[Prompt]) -> list[list[int]]:
    """The token ids of each input. All are texts, or all are ids."""
    texts = [prompt.encode() for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    special = request.add_special_tokens is not False
    return await call.encode(EncodeJob("input", texts, special, call.service.max_model_len))
