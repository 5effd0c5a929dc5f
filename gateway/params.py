"""From a request's fields to resolved `SamplingParams`: the model's defaults, the server's limits, a seed."""

from __future__ import annotations

import os
from typing import Any

from gateway.limits import Cost
from gateway.schemas import ChatRequest, ChoicesRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import EngineInfo
from novainfer.sampling.grammars import LARK
from novainfer.sampling.params import MAX_SEED, MIN_TEMPERATURE, SamplingParams, validate
from novainfer.text.tokenizer import Tokenizer

RANDOM_SEED = -1  # what other servers take for none
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; a chat may fill the context

MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128
# What an answer may tell of its prompts, over and over for n choices. An entry has 30 to 110 bytes of JSON.
MAX_PROMPT_LOGPROBS = 2**18
MAX_REPEATED_CHARS = 2**25
_ID_CHARS = 8  # of a token id in JSON
_STANDARD: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def resolve_params(
    request: ChatRequest | CompletionRequest, num_prompt_tokens: int, tokenizer: Tokenizer, info: EngineInfo
) -> SamplingParams:
    """Every default filled in and everything checked. Raises `InvalidRequestError`.

    Checked against the width of the logits, and the length of prompt and output against the model's context.
    """
    try:
        params = _sampling_params(request, num_prompt_tokens, tokenizer, info)
        validate(params, vocab_size=info.vocab_size)
        _check_length(num_prompt_tokens, params.max_tokens, info.max_model_len)
    except InvalidRequestError as error:
        raise _in_words_of(request, error) from None
    return params


def check_repeated(
    request: ChatRequest | CompletionRequest, params: SamplingParams, prompts: list[tuple[list[int], str]]
) -> None:
    """Raise `InvalidRequestError` if too much of the prompts, given as (token ids, text to echo), would be told."""
    if params.prompt_logprobs is None and not (request.return_token_ids or any(echo for _, echo in prompts)):
        return
    num_tokens = sum(len(token_ids) for token_ids, _ in prompts)
    is_chat = isinstance(request, ChatRequest)
    tops = request.prompt_logprobs, params.logprobs if _echoes_logprobs(request) else None  # as each field tells them
    name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    # A whole chat tells its prompt's beside the choices.
    entries = (1 if is_chat else params.n) * num_tokens * sum(top + 1 for top in tops if top is not None)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{name}: the answer would tell {entries} log-probabilities of prompts: n x prompt tokens x ({name} + 1). "
            f"At most {MAX_PROMPT_LOGPROBS} are allowed.",
            param=name,
        )
    chars = sum(len(echo) for _, echo in prompts) + _ID_CHARS * num_tokens * request.return_token_ids
    if params.n * chars > MAX_REPEATED_CHARS:
        words = f"n: the answer would repeat more than {MAX_REPEATED_CHARS} characters of its prompts."
        raise InvalidRequestError(words, param="n")


def _echoes_logprobs(request: ChatRequest | CompletionRequest) -> bool:
    return isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None


def asks_for_prompt_alone(request: ChatRequest | CompletionRequest) -> bool:
    """An echo, with its log-probabilities most likely, and no token behind it: so are given texts scored."""
    return isinstance(request, CompletionRequest) and request.echo and request.max_tokens == 0


def chosen_seed(request: GenerationRequest) -> int | None:
    """None where it is left to us."""
    return None if request.seed == RANDOM_SEED else request.seed


def default_length(num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens of a text completion that says nothing of its length."""
    return max(min(COMPLETION_MAX_TOKENS, max_model_len - num_prompt_tokens), 1)


def draw_seed() -> int:
    """A seed for a request that came without one."""
    return int.from_bytes(os.urandom(8)) & MAX_SEED


def _sampling_params(
    request: ChatRequest | CompletionRequest, num_prompt_tokens: int, tokenizer: Tokenizer, info: EngineInfo
) -> SamplingParams:
    _refuse_contradictions(request)
    if isinstance(request, ChatRequest):
        logprobs, prompt_logprobs = _chat_logprobs(request)
    else:
        logprobs, prompt_logprobs = _completion_logprobs(request)
    return SamplingParams(
        n=request.n,
        max_tokens=_max_tokens(request, num_prompt_tokens, info.max_model_len),
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=draw_seed() if (seed := chosen_seed(request)) is None else seed,
        logit_bias=_logit_bias(request.logit_bias) if request.logit_bias else {},
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        banned_token_ids=_banned_token_ids(request, tokenizer, info.vocab_size),
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=(request.structured_outputs or {}).get(LARK, ""),  # see `without_prompt`
        **_with_model_defaults(request, tokenizer),
    )


def _in_words_of(request: ChatRequest | CompletionRequest, error: InvalidRequestError) -> InvalidRequestError:
    """The error with the field's name as the client wrote it: a chat has other names for some."""
    if not isinstance(request, ChatRequest):
        return error
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    ours = error.param or ""
    name = names.get(ours, ours)
    rest = error.message.removeprefix(ours)
    message = name + rest if ours and rest != error.message else error.message
    return InvalidRequestError(message, param=name or None, code=error.code)


def estimate_cost(
    request: ChatRequest | CompletionRequest | EmbeddingRequest, num_prompts: int, body_bytes: int, context: int
) -> Cost:
    """What a request will need, before its prompts are tokenised: two bytes of the body are taken for a token.

    No sequence needs more tokens than the model's `context`. Wrong values are for `resolve_params` to refuse.
    """
    asked: int | None
    if isinstance(request, EmbeddingRequest):
        asked, num_choices = 0, 1
    elif isinstance(request, ChatRequest):
        asked, num_choices = request.max_completion_tokens, request.n
        asked = request.max_tokens if asked is None else asked
    else:
        num_choices = request.n
        asked = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    sequences = num_prompts * max(num_choices, 1)
    return Cost(
        prompts=num_prompts,
        sequences=sequences,
        prompt_tokens=min(body_bytes // 2, num_prompts * context),
        output_tokens=sequences * min(max(asked or 0, 0), context),
    )


def _with_model_defaults(request: GenerationRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The request's value, else generation_config.json's, else OpenAI's."""
    numbers = tokenizer.generation_defaults.numbers
    values = dict(_STANDARD)
    for name in _STANDARD:
        asked = getattr(request, name)
        if asked is not None:
            values[name] = asked
        elif name in numbers:
            values[name] = numbers[name]
    if values["top_k"] == -1:  # another way to say "off"
        values["top_k"] = 0
    if 0.0 < values["temperature"] < MIN_TEMPERATURE:  # another way to say "greedy"
        values["temperature"] = 0.0
    return values


def _max_tokens(request: ChatRequest | CompletionRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    if isinstance(request, ChatRequest):
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        rest = max_model_len - num_prompt_tokens
        _check_length(num_prompt_tokens, 1, max_model_len)
        return rest if asked is None else asked
    if asks_for_prompt_alone(request):
        return 1  # see `PromptState.is_alone`
    return default_length(num_prompt_tokens, max_model_len) if request.max_tokens is None else request.max_tokens


def _check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {total} tokens "
            f"({num_prompt_tokens} in the prompt, {max_tokens} in the completion).",
            param="max_tokens" if num_prompt_tokens < max_model_len else "prompt",
            code="context_length_exceeded",
        )


def _chat_logprobs(request: ChatRequest) -> tuple[int | None, int | None]:
    """Of the output, and of the prompt."""
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None, request.prompt_logprobs


def _completion_logprobs(request: CompletionRequest) -> tuple[int | None, int | None]:
    """The same."""
    logprobs, prompt = request.logprobs, request.prompt_logprobs
    if logprobs is not None and request.echo and (prompt is None or 0 <= prompt < logprobs):
        prompt = logprobs
    return logprobs, prompt


def _refuse_contradictions(request: ChoicesRequest) -> None:
    """Fields that are right in themselves, and wrong for a stream or for what is none."""
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    options = request.stream_options
    if options is not None and not request.stream and any(dict(options).values()):  # some send it, asking for nothing
        words = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise InvalidRequestError(words, param="stream_options")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0:
        if not request.echo:
            raise InvalidRequestError("max_tokens must be at least 1, but for an echo alone.", param="max_tokens")
        if request.min_tokens > 0:
            raise InvalidRequestError("min_tokens must not be above max_tokens.", param="min_tokens")


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    """Keys are token ids as strings, as JSON objects have no other keys."""
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in biases):
        raise InvalidRequestError("logit_bias keys must be token ids.", param="logit_bias")
    return {int(key): float(bias) for key, bias in biases.items()}


def _banned_token_ids(request: GenerationRequest, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The request's, its bad words', and those that the model's generation_config.json suppresses."""
    known = tokenizer.generation_defaults.banned_token_ids
    if not (known or request.banned_token_ids or request.bad_words):
        return ()
    always = [token_id for token_id in known if token_id < vocab_size]
    words = _bad_word_ids(request.bad_words, tokenizer) if request.bad_words else ()
    own = set(request.banned_token_ids)
    return (*request.banned_token_ids, *(token_id for token_id in (*words, *always) if token_id not in own))


def _bad_word_ids(words: list[str], tokenizer: Tokenizer) -> list[int]:
    """The ids of words that are one token, with or without a space before them; longer ones cannot be banned yet."""
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_LENGTH for word in words):
        text = f"bad_words: at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_LENGTH} characters."
        raise InvalidRequestError(text, param="bad_words")
    banned: list[int] = []
    for word in words:
        spellings = [tokenizer.encode(text, add_special_tokens=False) for text in dict.fromkeys((word, f" {word}"))]
        single = [ids[0] for ids in spellings if len(ids) == 1]
        if not word or not single:
            raise InvalidRequestError("bad_words: each word must be a single token.", param="bad_words")
        banned += single
    return banned
