"""The scheduler's own door: what it checks before it accepts a request. Pure; does not trust the gateway."""

from __future__ import annotations

from novainfer.errors import InvalidRequestError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams, validate

MAX_ID_LENGTH = 128
FLOAT_BYTES = 4
MOST_STEP_BYTES = 32 * 1024 * 1024  # of embeddings: half of the largest message


def check_request(message: AddRequest, info: ExecutorInfo) -> None:
    """Raise `InvalidRequestError` unless the request can be run to its end by this engine."""
    lengths = [*map(len, (message.request_id, *message.aliases))]
    if min(lengths) == 0 or max(lengths) > MAX_ID_LENGTH:
        raise InvalidRequestError(f"request ids have 1 to {MAX_ID_LENGTH} characters")
    params = message.params
    validate(params, vocab_size=info.vocab_size)
    if not -1 <= message.ref < 2**63 - params.n:  # the numbers of its choices are put into columns
        raise InvalidRequestError(f"the number {message.ref} is no number of a choice")
    if params.seed is None:
        raise InvalidRequestError("the seed must be resolved before a request is sent", param="seed")
    _check_ids("prompt", message.prompt_token_ids, info.vocab_size)
    _check_ids("eos_token_ids", message.eos_token_ids, info.vocab_size)
    if not message.prompt_token_ids:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    if message.embed:
        _check_embedding(message, info)
    num_output = 0 if message.embed else params.max_tokens
    total = len(message.prompt_token_ids) + num_output
    if total > info.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested {total} "
            f"tokens ({len(message.prompt_token_ids)} in the prompt, {num_output} in the completion).",
            param="max_tokens" if len(message.prompt_token_ids) < info.max_model_len else "prompt",
            code="context_length_exceeded",
        )
    if -(-total // info.block_size) > info.num_blocks:
        raise InvalidRequestError(
            f"The request needs KV memory for {total} tokens; this server has room for "
            f"{info.num_blocks * info.block_size}.",
            param="prompt" if message.embed else "max_tokens",
            code="context_length_exceeded",
        )
    if message.emitted:
        _check_emitted(message, info.vocab_size)
    if params.min_tokens > 0:
        _check_early_choice(message, info.vocab_size)


def _check_embedding(message: AddRequest, info: ExecutorInfo) -> None:
    """It has no other parameters, and the vectors of a whole step fit into one message."""
    if message.params != SamplingParams.for_embedding(message.params.seed) or any(message.emitted):
        raise InvalidRequestError("An embedding has no sampling parameters.")
    if info.max_num_seqs * info.hidden_size * FLOAT_BYTES > MOST_STEP_BYTES:
        raise InvalidRequestError("This server runs too many sequences at once (--max-num-seqs) for embeddings.")


def _check_early_choice(message: AddRequest, vocab_size: int) -> None:
    """Before min_tokens no token that would end the choice is sampled: some other must be left."""
    params = message.params
    if params.allowed_token_ids is None:
        eos = () if params.ignore_eos else message.eos_token_ids
        if len({*params.banned_token_ids, *params.stop_token_ids, *eos}) >= vocab_size:
            raise InvalidRequestError("Until min_tokens no token is left to choose.", param="min_tokens")


def _check_emitted(message: AddRequest, vocab_size: int) -> None:
    if len(message.emitted) > message.params.n:
        raise InvalidRequestError("more resumed choices than n", param="n")
    for token_ids in message.emitted:
        _check_ids("emitted", token_ids, vocab_size)
        if len(token_ids) > message.params.max_tokens:
            raise InvalidRequestError("more tokens emitted than max_tokens", param="max_tokens")


def _check_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequestError(f"{name} holds a token id outside 0..{vocab_size - 1}.", param=name)
