"""The process tree of a real server with two tensor-parallel ranks: who is there, what it loads, where it listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

LONG = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def pair_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("tp2") / "log"
    running = RunningServer("--tensor-parallel-size", "2", "--dtype", "float32", log=log)
    yield running
    running.stop()


def mapped_files(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


def test_given_two_ranks_when_started_then_titles_say_who_is_who(pair_of_ranks: RunningServer) -> None:
    texts = {"gateway 0 text zygote", "gateway 0 text 0", "gateway 0 text 1"}
    ours = {"supervisor", "gateway 0", "scheduler 0", "rank zygote", "worker 0.0", "worker 0.1"}
    assert set(pair_of_ranks.processes()) == ours | texts


@pytest.mark.parametrize("title", ["gateway 0", "gateway 0 text 0", "scheduler 0"])
def test_given_a_front_process_when_its_memory_is_read_then_no_torch_ray_or_triton(
    pair_of_ranks: RunningServer, title: str
) -> None:
    processes = pair_of_ranks.processes()
    for name in ("torch", "triton", "/ray/"):
        assert name not in mapped_files(processes[title])
    assert "torch" in mapped_files(processes["worker 0.0"])  # the check itself can see it


def test_given_a_running_server_when_sockets_are_listed_then_all_listen_on_loopback(
    pair_of_ranks: RunningServer,
) -> None:
    listening = [
        connection.laddr
        for process in pair_of_ranks.tree()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_given_two_ranks_when_asked_then_the_answer_is_that_of_one(
    pair_of_ranks: RunningServer, start_server: Callable[..., RunningServer]
) -> None:
    single = start_server("--dtype", "float32")
    body = {**LONG, "max_tokens": 60}
    with single.http() as one, pair_of_ranks.http() as two:
        texts = [
            client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            for client in (one, two)
        ]
    assert texts[0]
    assert texts[0] == texts[1]
