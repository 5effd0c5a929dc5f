"""Liveness, readiness and health tell apart; recovery of streams; keep-alive; connections that do nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from prometheus_client.parser import text_string_to_metric_families

from gateway import connection, service, sse
from novainfer.client import engine_link
from novainfer.text.tokenizer import Tokenizer
from novainfer.transport.addresses import Endpoint
from tests.fakes import ScriptedScheduler, oracle_tokens
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, config_for
from tests.replica import ReplicaThread

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROBES = ("/livez", "/readyz", "/health", "/healthz", "/ping")


@pytest.fixture
def lonely(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[GatewayThread, Endpoint]]:
    """A gateway whose scheduler does not exist (yet)."""
    endpoint = Endpoint(f"ipc://{tmp_path}/s")
    gateway = GatewayThread(config_for(tiny_model), endpoint, lost_timeout=1.0)
    yield gateway, endpoint
    gateway.close()


def states(gateway: GatewayThread) -> list[int]:
    with gateway.http() as http:
        return [http.get(path).status_code for path in PROBES]


def test_given_no_engine_when_probed_then_only_livez_is_200_and_requests_get_503(
    lonely: tuple[GatewayThread, Endpoint],
) -> None:
    gateway, _ = lonely
    assert states(gateway) == [200, 503, 503, 503, 503]
    with gateway.http() as http:
        assert http.get("/readyz").json() == {"status": "unavailable", "reason": "no engine"}
        refused = http.post(CHAT, json={"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/v1/models").status_code == 200
        assert http.post("/tokenize", json={"prompt": "hello"}).json()["count"] > 0


def test_given_a_gateway_that_replaces_another_one_when_the_engine_is_not_there_yet_then_requests_wait_for_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIGURES_PATIENCE", 60.0)
    endpoint = Endpoint(f"ipc://{tmp_path}/s")
    gateway = GatewayThread(config_for(tiny_model), endpoint, is_successor=True)
    answers: list[int] = []
    scrapes: list[str] = []

    def ask() -> None:
        with gateway.http() as http:
            answers.append(http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code)

    def scrape() -> None:
        with gateway.http() as http:
            scrapes.append(http.get("/metrics").text)

    clients = [threading.Thread(target=act) for act in (ask, scrape)]
    for client in clients:
        client.start()
    while len(gateway.server.server_state.connections) < len(clients):
        assert all(client.is_alive() for client in clients)
    with gateway.http() as http:
        assert http.get("/readyz").status_code == 503
    scheduler = ReplicaThread(endpoint, vocab_size=Tokenizer.load(tiny_model).vocab_size)
    try:
        for client in clients:
            client.join(30.0)
        assert answers == [200]
        assert "novainfer_num_requests_running{" in scrapes[0]
    finally:
        gateway.close()
        scheduler.close()


def test_given_an_engine_that_has_just_become_ready_when_scraped_then_its_figures_are_waited_for(
    lonely: tuple[GatewayThread, Endpoint], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIGURES_PATIENCE", 60.0)
    gateway, endpoint = lonely
    with gateway.http() as http:
        assert "novainfer_num_requests_running{" not in http.get("/metrics").text  # it loads: nothing to wait for
        scheduler = ScriptedScheduler(endpoint, vocab_size=Tokenizer.load(tiny_model).vocab_size, send_stats=False)
        try:
            while http.get("/readyz").status_code != 200:
                pass
            assert http.get("/health").status_code == 503
            with ThreadPoolExecutor() as pool, gateway.http() as other:
                scrape = pool.submit(other.get, "/metrics")
                while len(gateway.server.server_state.connections) < 2:
                    assert not scrape.done()
                scheduler.run_in_thread(lambda: setattr(scheduler, "send_stats", True))
                assert "novainfer_num_requests_running{" in scrape.result().text
        finally:
            scheduler.close()


def test_given_a_gateway_that_replaces_another_one_when_the_engine_starts_again_then_its_figures_are_waited_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIGURES_PATIENCE", 60.0)
    endpoint = Endpoint(f"ipc://{tmp_path}/s")
    vocab_size = Tokenizer.load(tiny_model).vocab_size
    scheduler = ScriptedScheduler(endpoint, vocab_size=vocab_size, send_stats=False)
    scheduler.run_in_thread(lambda: setattr(scheduler, "ready", False))
    gateway = GatewayThread(config_for(tiny_model), endpoint, is_successor=True)
    try:
        with ThreadPoolExecutor() as pool, gateway.http() as http, gateway.http() as other:
            while http.get("/readyz").json()["reason"] == "no engine":
                pass
            scrape = pool.submit(other.get, "/metrics")
            while len(gateway.server.server_state.connections) < 2:
                assert not scrape.done()
            scheduler.run_in_thread(lambda: vars(scheduler).update(ready=True, send_stats=True))
            assert "novainfer_num_requests_running{" in scrape.result().text
    finally:
        gateway.close()
        scheduler.close()


def test_given_an_engine_that_never_tells_its_figures_when_scraped_then_the_gateway_tells_its_own(
    lonely: tuple[GatewayThread, Endpoint], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIGURES_PATIENCE", 0.01)
    gateway, endpoint = lonely
    scheduler = ScriptedScheduler(endpoint, vocab_size=Tokenizer.load(tiny_model).vocab_size, send_stats=False)
    try:
        gateway.wait_ready()
        with gateway.http() as http:
            text = http.get("/metrics").text
        assert "novainfer_engine_ready{" in text
        assert "novainfer_num_requests_running{" not in text
    finally:
        scheduler.close()


def test_given_a_loading_engine_when_it_gets_ready_then_probes_change(
    lonely: tuple[GatewayThread, Endpoint], tiny_model: Path
) -> None:
    gateway, endpoint = lonely
    scheduler = ScriptedScheduler(endpoint, vocab_size=Tokenizer.load(tiny_model).vocab_size)
    try:
        scheduler.run_in_thread(lambda: setattr(scheduler, "ready", False))
        scheduler.wait_for(lambda: gateway.client.info is not None)
        if not (gateway.client.info and gateway.client.info.ready):
            assert states(gateway)[1] == 503
        scheduler.ready = True
        scheduler.run_in_thread(scheduler._send_info)
        gateway.wait_ready()
        scheduler.wait_for(lambda: gateway.client.stats is not None)
        assert states(gateway) == [200] * 5
    finally:
        scheduler.close()


def test_given_a_stuck_step_whose_clients_have_left_when_probed_then_health_fails(pair: Pair) -> None:
    pair.scheduler.seconds_since_progress = 1000.0
    client = pair.gateway.client
    pair.scheduler.wait_for(lambda: client.stats is not None and client.stats.seconds_since_progress > 0)
    assert client.stats is not None
    assert client.stats.num_running + client.stats.num_waiting == 0
    assert pair.http.get("/health").json() == {"status": "unavailable", "reason": "no progress"}


def test_given_work_without_progress_when_probed_then_health_fails_and_readiness_stays(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 0
    with pair.gateway.http() as other, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.post, CHAT, {"messages": HELLO, "max_tokens": 1})
        pair.scheduler.wait_for(lambda: bool(pair.scheduler.live))
        pair.scheduler.seconds_since_progress = 1000.0
        client = pair.gateway.client
        pair.scheduler.wait_for(lambda: client.stats is not None and client.stats.seconds_since_progress > 0)
        assert other.get("/health").json() == {"status": "unavailable", "reason": "no progress"}
        assert other.get("/readyz").status_code == 200
        pair.scheduler.tokens_before_pause = None
        assert answer.result(20).status_code == 200
        pair.scheduler.seconds_since_progress = 0.0
        pair.scheduler.wait_for(lambda: client.stats is not None and client.stats.seconds_since_progress == 0)
        assert other.get("/health").status_code == 200


def test_given_workers_that_are_replaced_when_probed_then_it_recovers_and_requests_wait(pair: Pair) -> None:
    def say(ready: bool) -> None:
        pair.scheduler.ready = ready
        pair.scheduler._send_info()

    client = pair.gateway.client
    pair.scheduler.tokens_before_pause = 0
    pair.scheduler.run_in_thread(lambda: say(False))
    pair.scheduler.wait_for(lambda: not client.ready)
    for path in ("/readyz", "/health"):
        assert pair.http.get(path).status_code == 503
        assert pair.http.get(path).json() == {"status": "unavailable", "reason": "recovering"}
    assert pair.http.get("/v1/models").json()["data"][0]["max_model_len"] == pair.scheduler.max_model_len
    assert pair.post("/tokenize", {"prompt": "hello"}).json()["max_model_len"] == pair.scheduler.max_model_len
    with pair.gateway.http() as other, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(other.post, CHAT, json={"messages": HELLO, "max_tokens": 2})
        pair.scheduler.wait_for(lambda: bool(pair.scheduler.live))
        pair.scheduler.run_in_thread(lambda: say(True))
        pair.scheduler.tokens_before_pause = None
        assert answer.result(20).status_code == 200


def test_given_a_scheduler_restart_when_streams_are_open_then_clients_see_the_same_tokens(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 5
    body = {"messages": HELLO, "stream": True, "max_tokens": 12, "n": 2, "seed": 4, "return_token_ids": True}
    with pair.http.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        pair.scheduler.wait_for(lambda: any(live.counts == [5, 5] for live in pair.scheduler.live.values()))
        pair.scheduler.restart()
        pair.scheduler.tokens_before_pause = None
        rest = [line for line in lines if line]
    tokens: list[list[int]] = [[], []]
    for line in [first, *rest[:-1]]:
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        tokens[choice["index"]] += choice.get("token_ids", [])
    sent = pair.scheduler.added[0]
    assert rest[-1] == "data: [DONE]"
    assert tokens == [oracle_tokens(sent, c, 12, pair.tokenizer.vocab_size) for c in range(2)]
    assert len(pair.scheduler.added) == 2


def test_given_a_lost_engine_when_streams_are_open_then_each_ends_with_one_error(
    lonely: tuple[GatewayThread, Endpoint], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "BEAT_SECONDS", 0.05)
    gateway, endpoint = lonely
    scheduler = ScriptedScheduler(endpoint, vocab_size=Tokenizer.load(tiny_model).vocab_size)
    scheduler.tokens_before_pause = 2
    gateway.wait_ready()
    with gateway.http() as http, http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
        scheduler.wait_for(lambda: any(live.counts == [2] for live in scheduler.live.values()))
        scheduler.close()
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert all("error" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_given_a_long_wait_when_streaming_then_comments_keep_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    pair.scheduler.tokens_before_pause = 0
    stream = pair.sdk.chat.completions.create(model="alias", messages=HELLO, stream=True, max_tokens=3)
    pair.scheduler.tokens_before_pause = None
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    pair.scheduler.tokens_before_pause = 0
    with pair.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True, "max_tokens": 3}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        pair.scheduler.tokens_before_pause = None
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("has_ids", [False, True])
def test_given_a_long_wait_between_events_when_the_sdk_reads_then_each_event_has_data(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, has_ids: bool
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    pair.scheduler.tokens_before_pause = 2
    body = {"messages": HELLO, "stream": True, "max_tokens": 4, "stream_options": {"include_event_ids": has_ids}}
    text = b""
    with pair.http.stream("POST", CHAT, json=body) as response:
        for piece in response.iter_bytes():
            text += piece
            if text.count(b": keep-alive\n") >= 2:
                pair.scheduler.tokens_before_pause = None
    events = [*SSEDecoder().iter_bytes(iter([text]))]
    assert b"data" in text.partition(b": keep-alive")[0]
    assert [bool(event.id) for event in events] == [has_ids] * len(events)
    assert [event.json()["object"] for event in events[:-1]] == ["chat.completion.chunk"] * (len(events) - 1)
    assert events[-1].data == "[DONE]"
    for block in text.split(b"\n\n")[:-1]:  # as simple readers do, which ask for no ids
        assert has_ids or block == b": keep-alive" or block.startswith(b"data: ")


def test_given_64_streams_at_once_when_read_then_each_has_its_own_tokens(pair: Pair) -> None:
    def ask(number: int) -> tuple[str, str]:
        body = {"prompt": f"request {number}", "max_tokens": 20, "seed": number, "temperature": number % 2}
        whole = pair.post("/v1/completions", body).json()["choices"][0]["text"]
        parts: list[str] = []
        with pair.gateway.http() as http, http.stream("POST", "/v1/completions", json={**body, "stream": True}) as r:
            parts += [json.loads(x[6:])["choices"][0]["text"] for x in r.iter_lines() if x.startswith("data: {")]
        return whole, "".join(parts)

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(ask, range(64)))
    assert all(whole == streamed for whole, streamed in results)
    assert len({whole for whole, _ in results}) == 64


def test_given_traffic_when_scraped_then_metrics_parse_and_count_by_route(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(name: str, **labels: str) -> float:
        text = pair.http.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(found)

    handler = {"handler": CHAT, "status": "200"}
    before = value("novainfer_http_requests_total", **handler)
    tokens = value("novainfer_inter_token_latency_seconds_count")
    pair.post(CHAT, {"messages": HELLO, "max_tokens": 5})
    for number in range(20):
        pair.http.get(f"/nowhere/{number}")
        pair.post(CHAT, {"model": f"invented-{number}", "messages": HELLO})
    assert value("novainfer_http_requests_total", **handler) == before + 1
    # Tokens that come together with the first are part of its time.
    assert tokens <= value("novainfer_inter_token_latency_seconds_count") <= tokens + 4
    assert value("novainfer_engine_ready") == 1
    assert value("novainfer_engine_epoch") == pair.gateway.client.info.epoch
    monkeypatch.setattr(pair.gateway.client.links[0].session, "num_protocol_errors", 3)
    assert value("novainfer_protocol_errors_total") == 3
    assert value("novainfer_choices_finished_total", finish_reason="stop") == 1
    text = pair.http.get("/metrics").text
    assert "nowhere" not in text
    assert "invented" not in text
    assert {"novainfer_num_requests_running", "novainfer_kv_cache_usage_ratio"} <= {
        line.split("{")[0] for line in text.splitlines()
    }


def test_given_headers_that_are_too_large_when_sent_then_431_says_so_before_the_connection_ends(pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 200_000)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_given_headers_that_come_too_slowly_or_never_end_when_waiting_then_the_connection_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)
    address = ("127.0.0.1", pair.gateway.port)
    with socket.create_connection(address, timeout=20) as silent, socket.create_connection(address, timeout=20) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nX-Slow: ")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    with socket.create_connection(address, timeout=20) as second:
        second.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /livez HTTP/1.1\r\nX-Slow: ")
        assert second.recv(1) == b"", "a later request has no more time than the first"
    with socket.create_connection(address, timeout=20) as endless:
        monkeypatch.setattr(connection, "HEADER_SECONDS", 10.0)
        closed = threading.Event()
        try:
            endless.sendall(b"GET /livez HTTP/1.1\r\n")
            for _ in range(1000):
                endless.sendall(b"X-Large: " + b"x" * 8000 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            closed.set()
        assert closed.is_set()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/any"])
def test_given_a_fault_of_ours_when_any_route_is_called_then_it_is_a_500_like_all_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(pair.gateway.service, "model_names", None)
    answer = pair.http.get(path, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"
