"""What a request took is free as soon as it has ended: a garbage collection may be thousands of long prompts away."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import httpx
import pytest

from gateway.generation import Generation, PromptState
from gateway.sse import SseResponse
from novainfer.client.output import ChoiceOutput
from novainfer.client.stream import RequestStream
from novainfer.protocol.messages import RequestRejected
from tests.online.conftest import Pair

pytestmark = pytest.mark.stage2

BODY = {"model": "alias", "prompt": "some words", "max_tokens": 8}


def num_kept() -> int:
    kinds = {Generation, RequestStream, SseResponse, ChoiceOutput, PromptState}
    return sum(type(one) in kinds for one in gc.get_objects())


def whole(pair: Pair) -> None:
    assert pair.post("/v1/completions", BODY).status_code == 200


def streamed(pair: Pair) -> None:
    assert pair.post("/v1/completions", {**BODY, "stream": True}).text.endswith("data: [DONE]\n\n")


def streamed_chat(pair: Pair) -> None:
    body = {"model": "alias", "messages": [{"role": "user", "content": "words"}], "stream": True, "n": 2}
    assert pair.post("/v1/chat/completions", body).text.endswith("data: [DONE]\n\n")


def refused_by_the_scheduler(pair: Pair) -> None:
    pair.scheduler.reject = lambda request: RequestRejected(request.request_id, 400, "no")
    assert pair.post("/v1/completions", BODY).status_code == 400
    pair.scheduler.reject = lambda request: None


def left_by_its_client(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    with contextlib.suppress(httpx.ReadTimeout), pair.gateway.http() as http:
        http.post("/v1/completions", json={**BODY, "stream": True}, timeout=0.2)
    pair.scheduler.tokens_before_pause = None


def over_its_time(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    assert pair.post("/v1/completions", BODY, **{"x-request-timeout": "0.05"}).status_code == 504
    pair.scheduler.tokens_before_pause = None


def responses(pair: Pair) -> None:
    body = {"input": "words", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    assert pair.post("/v1/responses", body).json()["status"] == "completed"
    assert "response.completed" in pair.post("/v1/responses", {**body, "stream": True}).text


def messages(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": "words"}], "max_tokens": 40}
    assert pair.post("/v1/messages", body).json()["stop_reason"] == "end_turn"
    assert "message_stop" in pair.post("/v1/messages", {**body, "stream": True}).text


REQUESTS = [
    whole,
    streamed,
    streamed_chat,
    responses,
    messages,
    refused_by_the_scheduler,
    left_by_its_client,
    over_its_time,
]


@pytest.mark.parametrize("request_one", REQUESTS)
@pytest.mark.usefixtures("_no_collection")
def test_given_no_garbage_collection_when_requests_have_ended_then_nothing_of_them_is_kept(
    pair: Pair, request_one: Callable[[Pair], None]
) -> None:
    pair.say("one two three four")
    for _ in range(3):
        request_one(pair)
    pair.wait_idle()
    pair.scheduler.wait_for(lambda: num_kept() == 0)


MARK = "said in vain"
JUNK = {"junk": [{MARK: []} for _ in range(100)]}
PROMPTS: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {**BODY, **JUNK, "stream_options": {"include_usage": True, **JUNK}}),
    ("/v1/chat/completions", {**JUNK, "messages": [{"role": "user", "content": "words", **JUNK}]}),
    ("/v1/responses", {**JUNK, "input": [{"role": "user", "content": "words", **JUNK}]}),
    ("/v1/messages", {**JUNK, "messages": [{"role": "user", "content": "words", **JUNK}]}),
]


def num_marked() -> int:
    return sum(type(one) is dict and MARK in one for one in gc.get_objects())


@pytest.mark.parametrize(("path", "body"), PROMPTS)
@pytest.mark.usefixtures("_no_collection")
def test_given_a_stream_that_is_not_at_its_end_when_looked_at_then_what_its_prompt_was_made_of_is_gone(
    pair: Pair, path: str, body: dict[str, object]
) -> None:
    pair.say("one two three four")
    pair.scheduler.tokens_before_pause = 2
    before = num_marked()  # the bodies themselves
    is_response = path == "/v1/responses"
    most = {"max_output_tokens" if is_response else "max_tokens": 8}
    with pair.http.stream("POST", path, json={**body, "stream": True, **most}) as response:
        events = response.iter_lines()
        is_named = path in ("/v1/responses", "/v1/messages")
        assert next(events).startswith("event: " if is_named else "data: ")
        assert num_marked() == before
        pair.scheduler.tokens_before_pause = None
        last = [line for line in events if line][-1]
        ends = {"/v1/responses": '"status":"incomplete"', "/v1/messages": '"type":"message_stop"'}
        assert ends.get(path, "data: [DONE]") in last
