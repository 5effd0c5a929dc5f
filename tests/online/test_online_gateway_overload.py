"""A gateway with more work than room: what it refuses and when, time limits, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bench.tenants import Job, Tenant, run_job, tokens_per_second
from gateway.slices import SlicedResponse
from novainfer.protocol.messages import AddRequest, RequestRejected
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import ScriptedScheduler
from tests.online.gateways import GatewayThread, start_pair

pytestmark = pytest.mark.stage2

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
Crowded = tuple[ScriptedScheduler, GatewayThread]


@pytest.fixture(scope="module")
def crowded_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    folder = tmp_path_factory.mktemp("crowded")
    (folder / "keys").write_text(
        "limited:key-l max-requests=2 tokens-per-minute=6000\nqueued:key-q max-queued=1\nfree:key-f\n"
    )
    scheduler, gateway = start_pair(
        tiny_model,
        folder / "run",
        Tokenizer.load(tiny_model).vocab_size,
        api_key_file=str(folder / "keys"),
        max_queued_tokens=2000,
        request_timeout=100.0,
        client_stall_timeout=0.3,
    )
    yield scheduler, gateway
    gateway.close()
    scheduler.close()


@pytest.fixture
def crowded(crowded_pair: Crowded) -> Iterator[Crowded]:
    """Afterwards nothing may be held anywhere, and no tokens be counted as waiting."""
    scheduler, gateway = crowded_pair
    scheduler.added.clear()
    scheduler.cancelled.clear()
    yield crowded_pair
    scheduler.paused.clear()
    scheduler.tokens_before_pause = None
    scheduler.step_seconds = 0.0
    limits = gateway.service.limits
    scheduler.wait_for(lambda: not scheduler.live and gateway.client.num_live == 0 and limits.num_live == 0)
    assert (limits.num_sequences, limits.queued_tokens) == (0, 0)


def key(name: str = "key-f") -> dict[str, str]:
    return {"x-api-key": name}


def test_given_a_burst_when_too_many_tokens_wait_then_refusals_come_before_tokenising(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, gateway = crowded
    scheduler.paused.set()
    tokenised = []
    submit = gateway.service.text.submit
    monkeypatch.setattr(gateway.service.text, "submit", lambda *a, **k: (tokenised.append(1), submit(*a, **k))[1])

    async def burst() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=gateway.url, trust_env=False, verify=False, timeout=60.0, limits=limits
        ) as http:
            bodies = [{"prompt": f"hello {i}", "max_tokens": 80} for i in range(200)]
            tasks = [asyncio.ensure_future(http.post(TEXT, json=body, headers=key())) for body in bodies]
            while sum(task.done() for task in tasks) + len(scheduler.added) < 200:
                await asyncio.wait([task for task in tasks if not task.done()], timeout=0.05)
            refused = [task.result() for task in tasks if task.done()]
            assert all(response.status_code == 503 for response in refused)
            scheduler.paused.clear()
            return list(await asyncio.gather(*tasks))

    responses = asyncio.run(burst())
    refused = [response for response in responses if response.status_code != 200]
    accepted = len(responses) - len(refused)
    assert 15 <= accepted <= 40
    assert len(tokenised) == len(scheduler.added) == accepted
    for response in refused:
        assert response.json()["error"]["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1


def test_given_a_key_with_quotas_when_it_asks_then_every_answer_says_what_is_left(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    scheduler.tokens_before_pause = 1
    with gateway.http(**key("key-l")) as http:
        body = {"prompt": "hello", "max_tokens": 100, "stream": True}
        with http.stream("POST", TEXT, json=body) as first, http.stream("POST", TEXT, json=body) as second:
            left = [int(r.headers["x-ratelimit-remaining-requests"]) for r in (first, second)]
            assert left == [1, 0]
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-limit-tokens"] == "6000"
            assert int(second.headers["x-ratelimit-remaining-tokens"]) < 5900
            refused = http.post(TEXT, json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"]
        scheduler.wait_for(lambda: gateway.service.limits.num_live == 0)
        scheduler.tokens_before_pause = None
        answer = http.post(TEXT, json={"prompt": "hello", "max_tokens": 4})
        assert answer.status_code == 200
    with gateway.http(**key()) as http:
        answer = http.post(TEXT, json={"prompt": "hello", "max_tokens": 4})
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)


def test_given_a_key_without_room_when_it_asks_then_the_refusal_comes_before_the_body_is_parsed(
    crowded: Crowded,
) -> None:
    scheduler, gateway = crowded
    scheduler.tokens_before_pause = 1
    with gateway.http(**key("key-l")) as http:
        body = {"prompt": "hello", "max_tokens": 100, "stream": True}
        no_json = {"content": b"{", "headers": {"content-type": "application/json"}}
        assert http.post(TEXT, **no_json).status_code == 400
        with http.stream("POST", TEXT, json=body), http.stream("POST", TEXT, json=body):
            for path in (TEXT, CHAT):
                refused = http.post(path, **no_json)
                assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
                assert int(refused.headers["retry-after"]) >= 1
            scheduler.tokens_before_pause = None
        assert http.post("/tokenize", **no_json).status_code == 400


def test_given_a_key_that_may_have_one_waiting_when_it_has_then_429_until_that_one_has_begun(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    scheduler.tokens_before_pause = 0
    body = {"prompt": "hello", "max_tokens": 5, "stream": True}
    answers: list[int] = []

    def ask() -> None:
        with gateway.http(**key("key-q")) as http:
            answers.append(http.post(TEXT, json=body).status_code)

    waiting = threading.Thread(target=ask)
    waiting.start()
    scheduler.wait_for(lambda: len(scheduler.added) == 1)
    with gateway.http(**key("key-q")) as http:
        assert http.post(TEXT, json=body).status_code == 429
        scheduler.tokens_before_pause = 1
        scheduler.wait_for(lambda: gateway.service.limits.queued_tokens == 0)
        assert gateway.service.limits.num_live == 1
        with http.stream("POST", TEXT, json=body) as response:
            assert response.status_code == 200
            scheduler.tokens_before_pause = None
            response.read()
    waiting.join()
    assert answers == [200]


def test_given_a_time_limit_when_no_token_came_then_504_and_the_engine_is_told(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    scheduler.tokens_before_pause = 0
    with gateway.http(**key()) as http:
        for stream in (False, True):
            response = http.post(CHAT, json={"messages": HELLO, "stream": stream}, headers={"x-request-timeout": "0.2"})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (504, "request_timeout", "server_error")
            assert "waited for its first token" in error["message"]
            assert response.headers["x-should-retry"] == "false"
    scheduler.wait_for(lambda: len(scheduler.cancelled) == 2 and not scheduler.live)
    assert all(1.0 < request.deadline <= 1.2 for request in scheduler.added)


def test_given_a_time_limit_when_a_stream_has_begun_then_one_error_event_ends_it(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    scheduler.tokens_before_pause = 3
    with gateway.http(**key()) as http:
        body = {"messages": HELLO, "stream": True}
        with http.stream("POST", CHAT, json=body, headers={"x-request-timeout": "0.5"}) as response:
            assert response.status_code == 200
            events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert [event["error"]["code"] for event in events if "error" in event] == ["request_timeout"]
    assert "error" in events[-1]
    assert "(3 so far)" in events[-1]["error"]["message"]


def test_given_a_time_limit_when_the_prompt_takes_too_long_then_504_names_that(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    with gateway.http(**key()) as http:
        assert http.post(TEXT, json={"prompt": "hello", "max_tokens": 1}).status_code == 200
        scheduler.added.clear()
        gateway.text_processes()["0"].suspend()
        response = http.post(TEXT, json={"prompt": "hello"}, headers={"x-request-timeout": "0.1"})
    assert response.status_code == 504
    assert "prompt was prepared" in response.json()["error"]["message"]
    assert not scheduler.added


def test_given_limits_of_server_and_client_when_both_are_there_then_the_shorter_holds(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    body = {"prompt": "hello", "max_tokens": 2}
    with gateway.http(**key()) as http:
        for given, expected in (("5", 6.0), ("1000", 101.0), ("", 101.0)):
            scheduler.added.clear()
            headers = {"x-request-timeout": given} if given else {}
            assert http.post(TEXT, json=body, headers=headers).status_code == 200
            assert expected - 1 < scheduler.added[0].deadline <= expected
        for wrong in ("0", "-1", "nan", "inf", "1e9", "soon", "1s"):
            response = http.post(TEXT, json=body, headers={"x-request-timeout": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


def test_given_a_request_that_waited_too_long_when_the_engine_refuses_it_then_503_with_retry_after(
    crowded: Crowded,
) -> None:
    scheduler, gateway = crowded
    scheduler.paused.set()

    def refuse() -> None:
        scheduler.wait_for(lambda: bool(scheduler.added))

        def send() -> None:
            (request_id,) = scheduler.live
            scheduler.live.clear()
            scheduler.send_all(RequestRejected(request_id, 503, "It waited in the queue.", retry_after=7.0))

        scheduler.run_in_thread(send)

    thread = threading.Thread(target=refuse)
    thread.start()
    with gateway.http(**key()) as http:
        response = http.post(TEXT, json={"prompt": "hello", "stream": True})
    thread.join()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert 7 <= int(response.headers["retry-after"]) <= 9


@pytest.mark.parametrize("stream", [True, False])
def test_given_a_client_that_reads_nothing_when_its_answer_is_long_then_it_is_cut_and_cancelled(
    crowded: Crowded, stream: bool
) -> None:
    """What it may hold: its connection's buffers, and its own tokens until then."""
    scheduler, gateway = crowded
    scheduler.step_seconds = 0.005 if stream else 0.0
    with long_answer(gateway, 12, stream=stream) as connection:
        scheduler.wait_for(lambda: bool(scheduler.cancelled if stream else scheduler.added))
        scheduler.wait_for(lambda: gateway.service.limits.num_live == 0)
        scheduler.wait_for(lambda: not gateway.server.server_state.connections)
        data = read_to_the_end(connection)
    if stream:
        assert b"[DONE]" not in data
    else:
        length = re.search(rb"content-length: (\d+)", data)
        assert length is not None
        assert len(data) < int(length[1])


def test_given_a_client_that_reads_slowly_but_steadily_when_its_stream_is_long_then_it_gets_all_of_it(
    crowded: Crowded,
) -> None:
    """For one part of it that is sent, it needs longer than one that reads nothing has."""
    _, gateway = crowded
    data = b""
    with long_answer(gateway, 4, stream=True) as connection:
        while part := connection.recv(4096):
            data += part
            if b"[DONE]" in data[-100:]:
                break
            time.sleep(0.02)  # its pace
    assert b"[DONE]" in data[-100:]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "hello", "max_tokens": 2}),
        (CHAT, {"messages": HELLO, "max_tokens": 2}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/apply-template", {"messages": HELLO}),
    ],
    ids=["text", "chat", "tokenize", "detokenize", "template"],
)
def test_given_a_whole_answer_when_it_is_sent_then_it_counts_until_its_client_has_it(
    crowded: Crowded, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Else a client that takes its time could have as many as it likes in our memory."""
    _, gateway = crowded
    send, live = SlicedResponse.__call__, list[int]()

    async def watched(self: SlicedResponse, scope: Scope, receive: Receive, emit: Send) -> None:
        live.append(gateway.service.limits.num_live)
        await send(self, scope, receive, emit)
        live.append(gateway.service.limits.num_live)

    monkeypatch.setattr(SlicedResponse, "__call__", watched)
    with gateway.http(**key()) as http:
        assert [http.post(path, json=body).status_code for _ in range(3)] == [200] * 3
    assert live == [1] * 6, "and no longer"


@contextmanager
def long_answer(gateway: GatewayThread, n: int, *, stream: bool) -> Iterator[socket.socket]:
    """A connection with small buffers on which a long answer comes, with `n` choices."""
    gateway.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)  # of the connections it accepts
    body = {"prompt": "hello", "max_tokens": 200, "n": n, "logprobs": 20, "stream": stream, "ignore_eos": True}
    payload = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", gateway.port))
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nX-API-Key: key-f\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 20):
        data += part
    return data


def requests_of(scheduler: ScriptedScheduler, tenant: str) -> list[AddRequest]:
    return [request for request in scheduler.added if request.tenant == tenant]


def test_given_the_benchs_load_when_run_then_it_counts_tokens_and_refusals(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    tenants = (Tenant("key-f", 2, 4, 5), Tenant("key-l", 4, 4, 5), Tenant("no-key", 1, 4, 5))
    scheduler.step_seconds = 0.005
    free, limited, unknown = run_job(Job(gateway.url, "alias", tenants, 1.0, 100))
    assert free.completed >= 1
    assert 5 * free.completed <= len(free.token_times) <= 5 * (free.completed + 2)
    assert len(free.ttfts) >= free.completed
    assert not free.failures
    assert limited.refusals, "two of four may run at once"
    assert limited.num_retry_after == len(limited.refusals)
    assert unknown.failures[0].startswith("HTTP 401")
    assert tokens_per_second([free], 0.0, 2.0) == len(free.token_times) / 2


def test_given_every_kind_of_end_when_all_are_over_then_nothing_is_held(crowded: Crowded) -> None:
    scheduler, gateway = crowded
    bodies: list[dict[str, Any]] = [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt": ["a", "b"], "max_tokens": 3, "n": 2},
        {"prompt": "hello", "max_tokens": 9999},
        {"prompt": [9999]},
        {"prompt": "hello", "n": -1},
        {"prompt": "hello", "n": 5000},
        {"prompt": ""},
    ]
    scheduler.reject = lambda r: RequestRejected(r.request_id, 503, "no") if r.params.seed == 13 else None
    try:
        with gateway.http(**key("key-l")) as http:
            for i in range(60):
                body = bodies[i % len(bodies)] | {"seed": 13 if i % 5 == 0 else i, "stream": i % 3 == 0}
                with http.stream("POST", TEXT, json=body) as response:
                    if i % 4:  # else it goes away without reading
                        response.read()
                    assert response.status_code in (200, 400, 429, 503)
    finally:
        scheduler.reject = lambda request: None
    assert requests_of(scheduler, "limited")
