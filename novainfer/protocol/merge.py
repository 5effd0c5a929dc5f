"""Consecutive outputs of one choice as one: for readers that were away, and links that had no credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from novainfer.protocol.messages import PromptLogprobs, TokenOutput


def merge_outputs(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """One or more outputs of one choice, in order and without gaps, as one."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        index=outputs[0].index,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        num_cached_tokens=outputs[0].num_cached_tokens,
    )


def merge_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """The same for the prompt log-probabilities of one request."""
    return replace(parts[0], entries=[entry for part in parts for entry in part.entries])
