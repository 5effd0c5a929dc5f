"""A real server with one row for several tenants: time limits, shares and weights through all processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two rows; what waits for a second is refused, and no long answer is over so soon."""
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text("heavy:key-h\nlight:key-l weight=2 max-requests=4\n")
    flags = ("--max-num-seqs", "2", "--queue-timeout", "1", "--api-key-file", str(folder / "keys"))
    running = RunningServer(*flags, log=folder / "log")
    yield running
    running.stop()


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def long_answer(seed: int) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True, "seed": seed}


def test_given_rows_that_are_taken_when_a_tenant_has_its_share_then_its_next_request_times_out_in_the_queue(
    shared: RunningServer,
) -> None:
    with (
        shared.http(**key("key-h")) as http,
        http.stream("POST", TEXT, json=long_answer(1)) as first,
        http.stream("POST", TEXT, json=long_answer(2)) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        refused = http.post(TEXT, json=long_answer(3))
        assert refused.status_code == 503
        assert "waited in the queue for 1 s" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1


def test_given_rows_that_one_tenant_has_when_another_asks_then_it_is_answered_and_the_others_text_is_the_same(
    shared: RunningServer,
) -> None:
    alone = {**long_answer(7), "max_tokens": 1000, "stream": False}
    texts: list[str] = []

    def ask(body: dict[str, Any]) -> None:
        with shared.http(**key("key-h")) as http:
            reply = http.post(TEXT, json=body)
            assert reply.status_code == 200, reply.text
            texts.append(reply.json()["choices"][0]["text"])

    ask(alone)
    streams = [threading.Thread(target=ask, args=(alone,)) for _ in range(2)]
    for stream in streams:
        stream.start()
    with shared.http(**key("key-l")) as http:
        answer = http.post(TEXT, json={"prompt": "Hello", "max_tokens": 8})
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "4"
    for stream in streams:
        stream.join()
    assert len(texts) == 3
    assert len(set(texts)) == 1


def test_given_a_time_limit_when_it_passes_then_nothing_is_held(shared: RunningServer) -> None:
    with shared.http(**key("key-h"), **{"x-request-timeout": "0.3"}) as http:
        answer = http.post(TEXT, json={**long_answer(5), "stream": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    with shared.http(**key("key-h")) as http:
        assert http.post(TEXT, json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
