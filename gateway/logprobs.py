"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts. Plain data, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from novainfer.client.output import TokenLogprob, TokenText

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


def label(token: TokenText) -> str:
    """The token's text; a token that is only part of a character is spelled as bytes, so that labels stay unique."""
    try:
        return token.data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_chat_token(entry.token, entry.logprob), "top_logprobs": [_chat_token(t, p) for t, p in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], prompt: Sequence[tuple[TokenText, int]] = ()
) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion. None is a token of the echoed prompt, whose places are `prompt`."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for number, entry in enumerate(entries):
        if entry is None:
            token, offset = prompt[number]
            tokens.append(label(token))
            logprobs.append(None)
            tops.append(None)
            offsets.append(offset)
            continue
        name = label(entry.token)
        tokens.append(name)
        logprobs.append(_finite(entry.logprob))
        tops.append({**{label(t): _finite(p) for t, p in entry.top}, name: _finite(entry.logprob)})
        offsets.append(entry.text_offset)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token a map of token id to its log-probability."""
    return [None if entry is None else _prompt_token(entry) for entry in entries]


def _prompt_token(entry: TokenLogprob) -> dict[str, Any]:
    described = {
        str(token.token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": label(token)}
        for rank, (token, logprob) in enumerate(entry.top, 1)
    }
    own = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": label(entry.token)}
    return {**described, str(entry.token.token_id): own}


def _chat_token(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": label(token), "logprob": _finite(logprob), "bytes": list(token.data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN compares false too
