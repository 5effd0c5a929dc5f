"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from gateway.asked_grammar import asked_grammar, make_grammar
from gateway.routes.endpoint import Call
from gateway.routes.generate import Manner, generate
from gateway.schemas import MAX_PROMPTS, CompletionRequest, too_many_prompts, without_prompt
from gateway.text_jobs import DecodeJob, EncodeJob, pack_ids
from novainfer.errors import InvalidRequestError

Prompt = str | list[int]


async def completions(call: Call) -> None:
    """Continue one or several prompts, whole or as a stream."""
    service = call.service
    call.limit_time()
    request, headers = await call.parse(CompletionRequest)
    wants_receipt = call.wants_receipt(request)
    model = service.check_model(request.model)
    prompts = split_prompts(request.prompt)
    asked = asked_grammar(request)
    with service.admit_generation(call.info, request, len(prompts)):
        encoded = await _encode(call, request, prompts)
        del prompts
        grammar = "" if asked is None else await make_grammar(call, asked)
        request = without_prompt(request, grammar)
        await generate(call, request, encoded, headers, Manner(model, wants_receipt))


def split_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
    most: int = MAX_PROMPTS,
    refusal: Callable[[], InvalidRequestError] = too_many_prompts,
) -> list[Prompt]:
    """One or many prompts, as a list. A list of integers is one prompt. Raises `refusal` for none, or above `most`."""
    if isinstance(prompt, str):
        return [prompt]
    is_one = bool(prompt) and isinstance(prompt[0], int)  # the schema has no lists of both kinds
    prompts = cast(list[Prompt], [prompt] if is_one else prompt)
    if not prompts or len(prompts) > most:
        raise refusal()
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
