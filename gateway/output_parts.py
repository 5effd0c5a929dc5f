"""Outputs of the engine cut into parts, and what came of them joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from novainfer.client.output import ChoiceDelta
from novainfer.protocol.messages import FINISH_LENGTH, FINISH_STOP, PromptLogprobs, TokenOutput
from novainfer.text.call_object import CallDelta, join_calls

SLICE_ENTRIES = 1024  # tokens, and log-probabilities at their places, that one delta tells at most


class WholeChoice:
    """All deltas of one choice as one, without their log-probabilities."""

    def __init__(self, choice: int) -> None:
        self._whole = ChoiceDelta(choice)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallDelta] = []

    def add(self, delta: ChoiceDelta) -> None:
        """The next one."""
        whole = self._whole
        self._texts.append(delta.text)
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)
        if delta.calls:
            self._calls += delta.calls
        whole.token_ids += delta.token_ids
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason

    def join(self) -> ChoiceDelta:
        """After the last one."""
        whole = self._whole
        whole.text, whole.reasoning = "".join(self._texts), "".join(self._thoughts)
        whole.calls = join_calls(self._calls)
        return whole


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
