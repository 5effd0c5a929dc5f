"""The whole server on the demo model: whoever asks is told where a request's time went."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.explained import EXPLAINED_COUNTS, EXPLAINED_TIMES
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CHAT = {"messages": [{"role": "user", "content": "What is NovaInfer?"}], "temperature": 0, "explain": True}
TEXT = {"prompt": "The gateway", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "explain": True}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    with server.http() as http, http.stream("POST", path, json={**body, "stream": True}) as response:
        *chunks, done = events(response.iter_lines())
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def check(told: dict[str, Any], generated: int) -> None:
    """What holds of every explanation of so many tokens."""
    assert set(told) == {"summary", "waited_for", *EXPLAINED_TIMES, *EXPLAINED_COUNTS}
    parts = [told[name] for name in ("gateway_ms", "queue_ms", "prefill_ms", "decode_ms")]
    assert told["total_ms"] == pytest.approx(sum(parts), abs=0.05)
    assert min(*parts, told["longest_gap_ms"]) >= 0
    assert min(told["total_ms"], told["gateway_ms"], told["prefill_ms"]) > 0
    assert told["longest_gap_ms"] <= told["decode_ms"]
    assert told["generation_tokens"] == generated
    assert told["summary"].endswith(".")


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_given_a_whole_answer_when_asked_why_then_it_says_so_and_is_else_the_same(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    told = ask(server, path, body)
    plain = ask(server, path, {**body, "explain": False})
    explain = told.pop("explain")
    check(explain, plain["usage"]["completion_tokens"])
    assert explain["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert (explain["prefill_steps"], explain["restarts"], explain["preemptions"]) == (1, 0, 0)
    assert told["choices"] == plain["choices"]
    assert list(told) == list(plain)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_given_a_stream_when_asked_why_then_its_last_chunk_says_so_beside_the_usage(
    server: RunningServer, path: str, body: dict[str, Any], usage: bool
) -> None:
    body = {**body, "stream_options": {"include_usage": usage}}
    *chunks, last = stream(server, path, body)
    plain = stream(server, path, {**body, "explain": False})
    assert last["choices"] == []
    check(last["explain"], ask(server, path, {**body, "stream_options": None})["usage"]["completion_tokens"])
    assert ("usage" in last) == usage
    assert not any("explain" in chunk for chunk in (*chunks, *plain))
    assert text_of(chunks) == text_of(plain)


def test_given_several_prompts_and_choices_when_asked_why_then_counts_are_sums(server: RunningServer) -> None:
    body = {**TEXT, "prompt": ["The gateway", "The scheduler"], "n": 2, "temperature": 1, "seed": 3}
    explain = ask(server, "/v1/completions", body)["explain"]
    check(explain, 4 * 12)
    assert explain["prefill_steps"] == 2  # one of each prompt, which its choices have in common
    (*_, last) = stream(server, "/v1/completions", body)
    check(last["explain"], 4 * 12)


def test_given_a_stop_string_when_the_gateway_ends_the_choice_then_the_scheduler_s_notes_are_there(
    server: RunningServer,
) -> None:
    body = {**CHAT, "stop": ["server"]}
    answer = ask(server, "/v1/chat/completions", body)
    assert answer["choices"][0]["stop_reason"] == "server"
    check(answer["explain"], answer["usage"]["completion_tokens"])
    assert answer["explain"]["prefill_steps"] == 1


def test_given_no_token_to_generate_when_asked_why_then_all_but_the_prompt_is_0(server: RunningServer) -> None:
    explain = ask(server, "/v1/completions", {**TEXT, "max_tokens": 0, "echo": True})["explain"]
    check(explain, 0)
    assert (explain["decode_ms"], explain["longest_gap_ms"]) == (0, 0)


def test_given_a_response_when_asked_why_then_it_is_refused(server: RunningServer) -> None:
    with server.http() as http:
        refused = http.post("/v1/responses", json={"input": "x", "explain": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "explain")


@pytest.mark.parametrize("title", ["worker 0.0", "scheduler 0"])
def test_given_a_process_that_dies_when_streams_go_on_then_they_say_that_and_who_waited_says_for_what(
    start_server: Callable[..., RunningServer], title: str
) -> None:
    server = start_server("--max-num-seqs", "1")
    long = {**TEXT, "max_tokens": 1500, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=long) as response:
        lines = response.iter_lines()
        next(lines)
        server.processes()[title].kill()
        waiting = ask(server, "/v1/completions", TEXT)["explain"]
        *_, last, _ = events(lines)
    told = json.loads(last)["explain"]
    check(told, 1500)
    assert told["restarts"] >= 1
    assert told["longest_gap_ms"] > 0
    check(waiting, 12)
    assert waiting["waited_for"] == "rows"
    assert waiting["queue_ms"] > 0
