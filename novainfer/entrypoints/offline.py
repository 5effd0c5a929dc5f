"""Offline requests: what they are while they run, and what their callers get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from novainfer.client.output import ChoiceDelta, ChoiceOutput, TokenLogprob, describe_prompt
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import AddRequest, Logprobs
from novainfer.text.tokenizer import Tokenizer

OnToken = Callable[[str, ChoiceDelta], None]


@dataclass(slots=True)
class Live:
    """A request that has not ended: its choices as text, and what was asked."""

    message: AddRequest
    choices: list[ChoiceOutput]
    on_token: OnToken | None
    deltas: list[list[ChoiceDelta]]
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_vector: Callable[[bytes], list[float]] | None = None  # of one that wants its embedding: makes it
    hidden: bytes = b""  # see `TokenOutput.embedding`


def result_of(live: Live, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the caller gets of a request that has ended: see `LLM.generate` and `LLM.embed`."""
    if live.finish_vector is not None:
        return _embedding_result(live, live.finish_vector)
    choices = [_choice_result(choice, deltas) for choice, deltas in zip(live.choices, live.deltas, strict=True)]
    prompt_ids = live.message.prompt_token_ids
    completion = sum(choice.num_tokens for choice in live.choices)
    result = {
        "request_id": live.message.request_id,
        "prompt_token_ids": prompt_ids,
        **{key: value for key, value in choices[0].items() if key != "index"},
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": completion,
            "total_tokens": len(prompt_ids) + completion,
            "prompt_tokens_details": {"cached_tokens": live.num_cached_tokens},
        },
    }
    if live.message.params.prompt_logprobs is not None:
        described = describe_prompt(tokenizer, prompt_ids, live.prompt_logprobs)
        result["prompt_logprobs"] = [None if item is None else _logprob_dict(item) for item in described]
    return result


def _embedding_result(live: Live, finish_vector: Callable[[bytes], list[float]]) -> dict[str, Any]:
    prompt_ids = live.message.prompt_token_ids
    return {
        "request_id": live.message.request_id,
        "prompt_token_ids": prompt_ids,
        "embedding": finish_vector(live.hidden) if live.hidden else None,
        "error": live.deltas[0][-1].error,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "total_tokens": len(prompt_ids),
            "prompt_tokens_details": {"cached_tokens": live.num_cached_tokens},
        },
    }


def _choice_result(choice: ChoiceOutput, deltas: list[ChoiceDelta]) -> dict[str, Any]:
    last = deltas[-1]
    return {
        "index": choice.choice,
        "text": "".join(delta.text for delta in deltas),
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": last.stop_reason,
        "error": last.error,
        "logprobs": [_logprob_dict(entry) for delta in deltas for entry in delta.logprobs] or None,
    }


def _logprob_dict(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token.token_id,
        "token": entry.token.text,
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [{"token_id": t.token_id, "token": t.text, "logprob": value} for t, value in entry.top],
    }


def checked_text(prompt: str) -> str:
    """It, if it is text. Raises `InvalidRequestError`."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "the prompt holds half of a surrogate pair, which is not text", param="prompt"
        ) from None
    return prompt


def checked_ids(prompt: object) -> list[int]:
    """The token ids in it. Raises `InvalidRequestError` for anything else."""
    if not isinstance(prompt, (list, tuple)) or any(
        isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in prompt
    ):
        raise InvalidRequestError("a prompt is text or a list of token ids", param="prompt")
    return list(prompt)
