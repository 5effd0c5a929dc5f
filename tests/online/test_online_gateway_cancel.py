"""A client that leaves or cancels frees everything it held, at whatever moment."""

from __future__ import annotations

import json
import random
import socket
import threading
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import pytest

from gateway.connection import MAX_HEADER_BYTES
from tests.fakes import oracle_tokens
from tests.online.conftest import Pair

pytestmark = pytest.mark.stage2

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def chat_bytes(body: dict[str, Any]) -> bytes:
    """A chat request as it is sent."""
    data = json.dumps({"messages": HELLO, **body}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def raw_request(pair: Pair, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """A chat request on a bare socket, sent and not read."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", pair.gateway.port))
    connection.sendall(chat_bytes(body))
    return connection


def num_chats(pair: Pair, status: int) -> int:
    """Those that ended so, as the metrics have them. 499: the client was gone before there was an answer."""
    name = f'novainfer_http_requests_total{{handler="/v1/chat/completions",method="POST",status="{status}"}} '
    lines = [line for line in pair.http.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(int(float(line.removeprefix(name))) for line in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_given_a_disconnect_when_waiting_or_running_then_the_engine_is_told_and_all_is_freed(
    pair: Pair, stream: bool, tokens: int
) -> None:
    pair.scheduler.tokens_before_pause = tokens
    has_begun = stream and tokens > 0
    status, other = (200, 499) if has_begun else (499, 200)
    before, others = num_chats(pair, status), num_chats(pair, other)
    connection = raw_request(pair, {"stream": stream, "n": 2})
    pair.scheduler.wait_for(lambda: any(live.counts == [tokens, tokens] for live in pair.scheduler.live.values()))
    if has_begun:
        assert connection.recv(1) == b"H"
    connection.close()
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) == 1)
    assert pair.scheduler.cancelled[0].choice == -1
    pair.wait_idle()
    pair.scheduler.wait_for(lambda: num_chats(pair, status) == before + 1)
    assert num_chats(pair, other) == others


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("more", ["a request", "no request"])
def test_given_a_client_that_has_sent_more_when_it_leaves_then_the_engine_is_told(
    pair: Pair, more: str, is_together: bool
) -> None:
    pair.scheduler.tokens_before_pause = 1
    rest = chat_bytes({}) if more == "a request" else b"\x00" * 1000
    with socket.create_connection(("127.0.0.1", pair.gateway.port)) as connection:
        connection.sendall(chat_bytes({"n": 2}) + rest * is_together)
        pair.scheduler.wait_for(lambda: any(live.counts == [1, 1] for live in pair.scheduler.live.values()))
        if not is_together:
            connection.sendall(rest)
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) == 1)
    pair.wait_idle()
    assert len(pair.scheduler.added) == 1


@pytest.mark.parametrize("is_together", [False, True])
def test_given_a_second_request_before_the_answer_when_it_ends_then_so_does_the_connection(
    pair: Pair, is_together: bool
) -> None:
    pair.scheduler.tokens_before_pause = 1
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as connection:
        connection.sendall(chat_bytes({"max_tokens": 2}) + chat_bytes({}) * is_together)
        pair.scheduler.wait_for(lambda: any(live.counts == [1] for live in pair.scheduler.live.values()))
        if not is_together:
            connection.sendall(chat_bytes({}))
        (protocol,) = [p for p in pair.gateway.server.server_state.connections if p.cycle.scope["method"] == "POST"]
        pair.scheduler.wait_for(lambda: protocol._is_last)  # type: ignore[union-attr]
        pair.scheduler.tokens_before_pause = None
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"
    assert len(pair.scheduler.added) == 1


def test_given_a_client_that_sends_without_end_when_its_answer_is_made_then_it_is_cut_off(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 1
    with raw_request(pair, {}) as connection:
        connection.settimeout(20)
        pair.scheduler.wait_for(lambda: bool(pair.scheduler.live))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b"x" * (1000 * MAX_HEADER_BYTES))
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) == 1)
    pair.wait_idle()


def test_given_the_sdk_when_it_leaves_a_stream_then_the_engine_is_told(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    with pair.sdk.chat.completions.create(model="alias", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) == 1)
    pair.wait_idle()


@pytest.mark.parametrize("by", ["response", "request"])
@pytest.mark.parametrize("name", ["mine", "job/17", "/a%2F?b#/cancel"])
def test_given_a_stream_when_cancelled_by_either_id_then_it_ends_properly(pair: Pair, by: str, name: str) -> None:
    pair.scheduler.tokens_before_pause = 2
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    with (
        pair.gateway.http() as other,
        pair.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-request-id": name}) as response,
    ):
        lines = response.iter_lines()
        response_id = json.loads(next(lines).removeprefix("data: "))["id"]
        pair.scheduler.wait_for(lambda: any(live.counts == [2] for live in pair.scheduler.live.values()))
        answer = other.post(f"/v1/requests/{response_id if by == 'response' else quote(name, safe='')}/cancel")
        assert answer.status_code == 200
        assert answer.json()["cancelled"] is True
        rest = [line.removeprefix("data: ") for line in lines if line]
        assert other.post(f"/v1/requests/{response_id}/cancel").status_code == 404
    assert rest[-1] == "[DONE]"
    ends = [json.loads(line)["choices"][0]["finish_reason"] for line in rest[:-2]]
    assert ends[-1] == "cancelled"
    assert json.loads(rest[-2])["usage"]["completion_tokens"] <= 2


def test_given_a_whole_answer_when_cancelled_then_it_holds_what_there_was(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            pair.post("/v1/chat/completions", {"messages": HELLO}, **{"x-request-id": "whole"})
        )
    )
    asking.start()
    pair.scheduler.wait_for(lambda: any(live.counts == [2] for live in pair.scheduler.live.values()))
    with pair.gateway.http() as other:
        assert other.post("/v1/requests/whole/cancel").status_code == 200
    asking.join(20)
    assert answers[0].json()["choices"][0]["finish_reason"] == "cancelled"


def test_given_a_slow_reader_when_it_reads_at_last_then_nothing_is_missing(pair: Pair) -> None:
    """The text is larger than what sockets buffer, so the gateway must wait for its reader and merge meanwhile."""
    ids = pair.tokenizer.encode("x" * 200)
    pair.scheduler.script = lambda request, choice: ids
    body = {"stream": True, "n": 24, "logprobs": True, "top_logprobs": 20}
    with raw_request(pair, body, receive_buffer=65536) as connection:
        connection.settimeout(30)
        pair.scheduler.wait_for(lambda: bool(pair.scheduler.added) and not pair.scheduler.live)
        data = bytearray()
        while b"data: [DONE]" not in data[-64:]:
            part = connection.recv(1 << 20)
            assert part, "closed before the end"
            data += part
    assert data.count(b'"finish_reason":"stop"') == 24
    assert data.count(b'"bytes":[') == 24 * 21 * (len(ids) + 1)


def test_given_random_disconnects_and_cancels_when_all_have_left_then_nothing_is_held(pair: Pair) -> None:
    chance = random.Random(0)
    pair.scheduler.step_seconds = 0.001
    connections: list[socket.socket] = []
    for number in range(200):
        body = {
            "stream": chance.random() < 0.5,
            "n": chance.choice([1, 1, 2]),
            "max_tokens": chance.randint(1, 40),
            "stop": chance.choice([None, "a", ["e", "zq"]]),
            "seed": number,
        }
        connections.append(raw_request(pair, body))
        if chance.random() < 0.7:
            victim = connections.pop(chance.randrange(len(connections)))
            if chance.random() < 0.5:
                victim.settimeout(0.005)
                try:
                    victim.recv(chance.choice([1, 200, 4000]))
                except TimeoutError:
                    pass
            victim.close()
    for connection in connections:
        connection.close()
    pair.scheduler.wait_for(lambda: len(pair.scheduler.added) > 0)
    pair.wait_idle()
    assert not pair.gateway.service._live
    assert pair.http.get("/health").status_code == 200


def wait_for_half_a_prompt(pair: Pair) -> None:
    """Block until the gateway has log-probabilities of the prompt of the request 'half'."""
    live = pair.gateway.service._live
    pair.scheduler.wait_for(lambda: any(generation.prompts[0].logprobs for generation in live.find("half", "")))


@pytest.mark.parametrize("stream", [False, True])
def test_given_an_echoed_prompt_with_logprobs_when_cancelled_while_it_is_computed_then_the_missing_ones_are_null(
    pair: Pair, stream: bool
) -> None:
    pair.scheduler.tokens_before_pause = 0
    prompt = "hello you there"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream}
    answers: list[Any] = []

    def ask() -> None:
        with pair.gateway.http() as http:
            reply = http.post("/v1/completions", json=body, headers={"x-request-id": "half"})
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        answers.extend(map(json.loads, events or [reply.text]))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for_half_a_prompt(pair)
    assert pair.http.post("/v1/requests/half/cancel").json()["cancelled"] is True
    asking.join(30)
    assert answers[-1]["choices"][0]["finish_reason"] == "cancelled"
    told = answers[0]["choices"][0]["logprobs"]
    ids = pair.tokenizer.encode(prompt)
    assert [pair.tokenizer.decode([token]) for token in ids] == told["tokens"]
    known = 1 + (len(ids) - 1) // 2
    assert [value is None for value in told["token_logprobs"]] == [not 0 < i < known for i in range(len(ids))]
    assert told["text_offset"] == sorted(told["text_offset"])


def test_given_prompt_logprobs_when_cancelled_while_the_prompt_is_computed_then_the_missing_ones_are_null(
    pair: Pair,
) -> None:
    pair.scheduler.tokens_before_pause = 0
    answers: list[Any] = []

    def ask() -> None:
        body = {"messages": HELLO, "prompt_logprobs": 0, "return_token_ids": True}
        with pair.gateway.http() as http:
            answers.append(http.post("/v1/chat/completions", json=body, headers={"x-request-id": "half"}).json())

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for_half_a_prompt(pair)
    assert pair.http.post("/v1/requests/half/cancel").json()["cancelled"] is True
    asking.join(30)
    assert answers[0]["choices"][0]["finish_reason"] == "cancelled"
    ids, told = answers[0]["prompt_token_ids"], answers[0]["prompt_logprobs"]
    known = 1 + (len(ids) - 1) // 2
    assert [value is None for value in told] == [not 0 < i < known for i in range(len(ids))]


def test_given_requests_whose_ids_are_equal_or_begin_alike_when_some_end_then_the_others_have_their_own_tokens(
    pair: Pair,
) -> None:
    """An id that a client chose is a label: it names what has this very label, and identifies nothing."""
    pair.scheduler.tokens_before_pause = 1
    names = ["a", "a", "ab", "abc", "abc", "b", "-", "\xe9", "", "A"]
    with ExitStack() as stack, pair.gateway.http() as http:
        streams = []
        for seed, name in enumerate(names):
            body = {"prompt": "hello", "seed": seed, "max_tokens": 6, "stream": True, "return_token_ids": True}
            headers = [(b"x-request-id", name.encode("latin-1"))]
            context = http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}, headers=headers)
            streams.append(stack.enter_context(context))
        assert pair.http.post("/v1/requests/a/cancel").status_code == 200
        assert pair.http.post("/v1/requests/cmpl/cancel").status_code == 404
        streams[names.index("abc")].close()
        pair.scheduler.wait_for(lambda: len(pair.scheduler.live) == len(names) - 3)
        pair.scheduler.tokens_before_pause = None
        told = []
        for stream in streams:
            if stream.is_closed:
                continue
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids") or []]
            told.append((ids, chunks[-1]["choices"][0]["finish_reason"]))
    wanted = {r.params.seed: oracle_tokens(r, 0, 6, pair.scheduler.vocab_size) for r in pair.scheduler.added}
    assert [end for _, end in told] == ["cancelled"] * 2 + ["length"] * (len(names) - 3)
    assert [ids for ids, _ in told[2:]] == [wanted[seed] for seed in range(2, len(names)) if seed != names.index("abc")]
    assert len({request.request_id for request in pair.scheduler.added}) == len(names)
