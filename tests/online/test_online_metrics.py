"""What /metrics says of a server with several gateways and replicas: everything adds up, also after deaths."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.conservation import at_rest, scrape
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

KEY = {"x-api-key": "key-red"}
PATIENCE = 60  # seconds; only a failing test waits that long
NUM_PLAIN, NUM_CANCELLED, NUM_STOPPED, CHOICES = 12, 4, 4, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("red:key-red\nblue:key-blue\n")
    flags = ("--replicas", "2", "--num-gateways", "2", "--api-key-file", str(keys), "--metrics-compat", "vllm")
    with RunningServer(*flags, log=tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def ask(server: RunningServer, key: str, **body: object) -> None:
    body = {"prompt": "The sea was calm.", "max_tokens": 24, "ignore_eos": True, **body}
    answer = httpx.post(
        f"{server.base_url}/v1/completions", json=body, headers={"x-api-key": key}, trust_env=False, timeout=PATIENCE
    )
    assert answer.status_code == 200, answer.text


def leave_early(server: RunningServer) -> None:
    """Ask for a long stream, and go away after its first event."""
    body = {"prompt": "The sea was calm.", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST",
        f"{server.base_url}/v1/completions",
        json=body,
        headers={"x-api-key": "key-red"},
        trust_env=False,
        timeout=PATIENCE,
    ) as answer:
        next(answer.iter_lines())


def work(server: RunningServer) -> int:
    """Requests of all kinds, many at once; how many there were."""
    threads = [threading.Thread(target=ask, args=(server, "key-blue")) for _ in range(NUM_PLAIN)]
    threads += [threading.Thread(target=leave_early, args=(server,)) for _ in range(NUM_CANCELLED)]
    stop = {"n": CHOICES, "stop": ["e"], "temperature": 1.0}
    threads += [threading.Thread(target=ask, args=(server, "key-red"), kwargs=stop) for _ in range(NUM_STOPPED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(threads)


def test_given_two_gateways_and_replicas_when_all_is_done_then_every_scrape_says_the_same_and_it_adds_up(
    server: RunningServer,
) -> None:
    num_requests = work(server)
    assert num_requests == NUM_PLAIN + NUM_CANCELLED + NUM_STOPPED
    for now in at_rest(server, num_requests, **KEY):
        assert now["requests_begun_total"] == num_requests
        assert now.of("requests_ended_total", "cancelled") == NUM_CANCELLED
        assert now.of("requests_ended_total", "finished") == NUM_PLAIN + NUM_STOPPED
        assert now.of("requests_ended_total", "failed") == 0
        now.check_engines()
        assert now["choices_accepted_total"] == NUM_PLAIN + NUM_CANCELLED + NUM_STOPPED * CHOICES
        assert now["generation_tokens_total"] == now["gateway_tokens_received_total"]
        assert now["requests_routed_total"] == num_requests
        assert now.of("tenant_requests_total", "blue") == NUM_PLAIN
        assert now.of("tenant_generation_tokens_total", "blue") == NUM_PLAIN * 24
        assert now["request_generation_tokens_count"] == num_requests
        assert now["request_queue_time_seconds_count"] == now["choices_accepted_total"]
        # Of those that ran to the end: a choice that was cancelled has none.
        assert now["request_inference_time_seconds_count"] == now["request_decode_time_seconds_count"]
        assert NUM_PLAIN <= now["request_inference_time_seconds_count"] < now["choices_accepted_total"]
        assert now.sums["vllm:num_requests_running"] == 0
        assert now.sums["vllm:generation_tokens_total"] == now["generation_tokens_total"]
        assert now.sums["vllm:request_success_total"] == now["choices_finished_total"]


def test_given_counts_when_a_rank_a_scheduler_and_a_gateway_are_killed_then_none_is_lost(server: RunningServer) -> None:
    before = scrape(server, KEY)
    ended = int(before["requests_ended_total"])
    for victim in ("worker 0.0", "scheduler 1"):
        load = threading.Thread(target=ask, args=(server, "key-blue"), kwargs={"max_tokens": 1000})
        load.start()
        server.processes()[victim].kill()
        load.join()
        ended += 1
        now = at_rest(server, ended, **KEY)[-1]
        assert now.of("requests_ended_total", "failed") == 0
        now.check_engines()
        if victim.startswith("worker"):
            assert now["generation_tokens_total"] == now["gateway_tokens_received_total"]
    assert now["engine_epoch"] > before["engine_epoch"]

    at_rest(server, ended, **KEY)
    old = server.processes()["gateway 1"]
    old.kill()
    deadline = time.monotonic() + PATIENCE
    while "gateway 1" not in (found := server.processes()) or found["gateway 1"].pid == old.pid:
        assert time.monotonic() < deadline
    server.wait_until_ready()
    for now in at_rest(server, ended, **KEY):
        assert now["requests_begun_total"] == ended
        assert now["gateway_tokens_received_total"] >= before["gateway_tokens_received_total"]
    ended += work(server)
    assert at_rest(server, ended, **KEY)[-1]["requests_begun_total"] == ended
