"""Outputs of the engine cut into parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from novainfer.protocol.messages import FINISH_LENGTH, FINISH_STOP, PromptLogprobs, TokenOutput

SLICE_ENTRIES = 1024  # tokens, and log-probabilities at their places, that one delta tells at most


def is_long(item: TokenOutput | PromptLogprobs) -> bool:
    """Whether it may tell more than one delta does."""
    return isinstance(item, TokenOutput) and (bool(item.logprobs) or len(item.token_ids) > SLICE_ENTRIES)


def parts_of(item: TokenOutput | PromptLogprobs) -> Iterator[TokenOutput | PromptLogprobs]:
    """A long output as several."""
    if isinstance(item, TokenOutput):
        width = 2 + len(item.logprobs[-1].top_ids) if item.logprobs else 1
        most = max(SLICE_ENTRIES // width, 1)
        while len(item.token_ids) > most:
            first, item = split(item, item.index + most)
            yield first
    yield item


def split(item: TokenOutput, index: int) -> tuple[TokenOutput, TokenOutput]:
    """The tokens before this output index; the others, and the end."""
    count = index - item.index
    described = max(count - (len(item.token_ids) - len(item.logprobs)), 0)
    told = replace(
        item,
        token_ids=item.token_ids[:count],
        logprobs=item.logprobs[:described],
        finish_reason=None,
        stop_token_id=None,
    )
    return told, replace(item, index=index, token_ids=item.token_ids[count:], logprobs=item.logprobs[described:])


def without_tokens(item: TokenOutput) -> TokenOutput:
    """What is left of an output where no token was asked for: its end, which came with the first one."""
    is_end = item.finish_reason in (FINISH_STOP, FINISH_LENGTH)
    reason = FINISH_LENGTH if is_end else item.finish_reason
    return replace(item, index=0, token_ids=[], logprobs=[], finish_reason=reason, stop_token_id=None)
