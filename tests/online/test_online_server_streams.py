"""The whole server on the demo model: many clients at once, and nothing held when they have left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

QUESTIONS = [
    "What is NovaInfer?",
    "What is 23 plus 45?",
    "Spell the word river.",
    "Count from 3 to 9.",
    "Hello!",
    "Which port does the server listen on?",
    "Give me JSON with name Anna and age 31.",
    "Describe how NovaInfer handles a request.",
]
STYLES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "max_completion_tokens": 7},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5, "presence_penalty": 0.4},
    {"temperature": 0, "stop": ["e"]},
    {"temperature": 1.3, "seed": 3, "n": 2, "extra_body": {"top_k": 20, "min_p": 0.01}},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.1}},
]


def job(number: int) -> dict[str, Any]:
    """One of 64 different requests; those of odd rows carry a system prompt."""
    messages = [{"role": "user", "content": QUESTIONS[number % 8]}]
    if number // 8 % 2:
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    return {"model": "demo", "messages": messages, "max_completion_tokens": 40, **STYLES[number // 8]}


async def stream(client: openai.AsyncOpenAI, request: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """Read one stream to its end: text and finish reason by choice."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage = None
    async for chunk in await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        assert usage is None, "something came after the usage"
        usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in ends, "something came after the finish reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert usage is not None
    assert sorted(ends) == list(range(request.get("n", 1)))
    return {index: (texts[index], ends[index]) for index in ends}


def async_client(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=240,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=240),
    )


def test_given_64_streams_with_mixed_parameters_when_read_at_once_then_each_equals_its_solo_run(
    server: RunningServer,
) -> None:
    async def run() -> None:
        async with async_client(server) as client:
            together = await asyncio.gather(*(stream(client, job(i)) for i in range(64)))
            for i in range(64):
                assert await stream(client, job(i)) == together[i], f"request {i}"
        assert {reason for answer in together for _, reason in answer.values()} <= {"stop", "length"}

    asyncio.run(run())


def test_given_sessions_of_several_turns_when_they_run_at_once_then_each_goes_on_with_its_own_history(
    server: RunningServer,
) -> None:
    async def session(client: openai.AsyncOpenAI, turns: list[str]) -> list[dict[str, str]]:
        history: list[dict[str, str]] = []
        for turn in turns:
            history.append({"role": "user", "content": turn})
            request = {"model": "demo", "messages": list(history), "temperature": 0, "max_completion_tokens": 30}
            answer = await stream(client, request)
            history.append({"role": "assistant", "content": answer[0][0]})
        return history

    async def run() -> None:
        sessions = [[QUESTIONS[i], QUESTIONS[(i + 3) % 8], QUESTIONS[(i + 5) % 8]] for i in range(6)]
        async with async_client(server) as client:
            together = await asyncio.gather(*(session(client, turns) for turns in sessions))
            for turns, history in zip(sessions, together, strict=True):
                assert await session(client, turns) == history

    asyncio.run(run())


def test_given_a_loglikelihood_request_when_sent_then_prompt_and_output_are_scored(server: RunningServer) -> None:
    with server.sdk() as client:
        scored = client.completions.create(
            model="demo", prompt="NovaInfer is a server", max_tokens=1, logprobs=1, echo=True, temperature=0
        )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    values = logprobs.token_logprobs
    assert values is not None
    assert values[0] is None
    assert len(values) > 4
    assert all(value is not None and value <= 0 for value in values[1:])
    assert scored.choices[0].text.startswith("NovaInfer is a server")


def test_given_no_token_to_generate_when_a_text_is_scored_then_it_is_as_beside_one(server: RunningServer) -> None:
    text, other = "The gateway sends tokens.", "The scheduler plans steps."
    with server.sdk() as client:
        ask = partial(client.completions.create, model="demo", echo=True, logprobs=2, temperature=0)
        one, alone = (ask(prompt=[text, other], max_tokens=count) for count in (1, 0))
        streamed = list(ask(prompt=[text, other], max_tokens=0, stream=True))
    assert [choice.text for choice in alone.choices] == [text, other]
    for beside, choice in zip(one.choices, alone.choices, strict=True):
        assert beside.logprobs is not None
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == (beside.logprobs.token_logprobs or [])[:-1]
        assert choice.logprobs.tokens == (beside.logprobs.tokens or [])[:-1]
        assert choice.finish_reason == "length"
        parts = [part for chunk in streamed for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.logprobs for part in parts if part.logprobs] == [choice.logprobs]
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_given_prompt_lookup_when_text_repeats_itself_then_streams_are_the_same_and_drafts_came_true(
    server: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    repeats = [
        {"model": "demo", "prompt": text * 4, "max_tokens": 60, "seed": seed, "temperature": temperature, **more}
        for text, more in (("one two three four ", {}), ("a b c d e f g ", {"n": 2}), ("1, 2, 3, ", {"logprobs": 2}))
        for seed, temperature in ((1, 0.0), (2, 0.6))
    ]

    async def answers(asked: RunningServer) -> list[Any]:
        async with async_client(asked) as client:
            texts = [client.completions.create(**request, extra_body={"ignore_eos": True}) for request in repeats]
            return await asyncio.gather(*texts, *(stream(client, job(i)) for i in range(0, 64, 3)))

    def told(found: list[Any]) -> list[Any]:
        return [[c.model_dump() for c in one.choices] if hasattr(one, "choices") else one for one in found]

    drafting = start_server("--speculation", "prompt-lookup")
    assert told(asyncio.run(answers(drafting))) == told(asyncio.run(answers(server)))
    accepted = drafting.metric("novainfer_spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafting.metric("novainfer_spec_decode_num_draft_tokens_total")
