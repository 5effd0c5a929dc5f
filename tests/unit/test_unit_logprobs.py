"""What is written of log-probabilities: tokens that share a text, and no more alternatives than were asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from novainfer.client.output import TokenLogprob, TokenText

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

A, SAME_AS_A, B, C = (TokenText(number, text, text.encode()) for number, text in enumerate("aabc"))


def written(logprobs: ChatLogprobs | CompletionLogprobs | PromptLogprobs) -> Any:
    return json.loads("".join(logprobs.write()))


@pytest.mark.parametrize(
    ("sampled", "logprob", "shown"),
    [(A, -1.0, -1.0), (SAME_AS_A, -3.0, -1.0), (B, -2.0, -1.0), (SAME_AS_A, -0.5, -0.5)],
)
def test_given_tokens_of_the_same_text_when_written_by_text_then_the_likeliest_is_shown(
    sampled: TokenText, logprob: float, shown: float
) -> None:
    logprobs = CompletionLogprobs()
    logprobs.add(TokenLogprob(sampled, logprob, 1, 0, [(A, -1.0), (B, -2.0), (SAME_AS_A, -3.0)]))
    told = written(logprobs)
    assert told["top_logprobs"] == [{"a": shown, "b": -2.0}]
    assert told["token_logprobs"] == [logprob]


def test_given_tokens_that_are_to_be_named_by_their_ids_when_written_then_those_of_one_text_are_apart() -> None:
    entry = TokenLogprob(SAME_AS_A, -3.0, 3, 5, [(A, -1.0), (B, -2.0)])
    names = [f"token_id:{token.token_id}" for token in (A, B, SAME_AS_A)]
    of_text = CompletionLogprobs(as_ids=True)
    of_text.add_prompt(A, 0, None)
    of_text.add(entry)
    told = written(of_text)
    assert (told["tokens"], told["token_logprobs"]) == ([names[0], names[2]], [None, -3.0])
    assert told["top_logprobs"] == [None, dict(zip(names, (-1.0, -2.0, -3.0), strict=True))]
    of_chat = ChatLogprobs(as_ids=True)
    of_chat.add(entry)
    (chat,) = written(of_chat)["content"]
    assert (chat["token"], chat["bytes"]) == (names[2], [*SAME_AS_A.data])
    assert [top["token"] for top in chat["top_logprobs"]] == names[:2]


def test_given_more_alternatives_than_asked_for_when_written_then_only_those_and_the_token_are_shown() -> None:
    entry = TokenLogprob(C, -3.0, 3, 0, [(A, -1.0), (B, -2.0), (C, -3.0)])
    by_text, by_id = CompletionLogprobs(num_top=1), PromptLogprobs(1)
    for logprobs in (by_text, by_id):
        logprobs.add_prompt(C, 0, entry)
    assert written(by_text)["top_logprobs"] == [{"a": -1.0, "c": -3.0}]
    assert [list(one) for one in written(by_id)] == [["0", "3"]]
