"""The process tree of a real server with two tensor-parallel ranks: who is there, what it loads, where it listens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from novainfer.checkpoint import resolve_checkpoint
from novainfer.config import DEMO_MODEL
from tests.servers import RunningServer, assert_gone

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
    ours = {"supervisor", "gateway 0", "scheduler 0", "worker 0.0", "worker 0.1"}
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


class StreamReader:
    """Reads one long stream in a thread."""

    def __init__(self, server: RunningServer) -> None:
        self.lines: list[str] = []
        self._server = server
        self._started = threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self._started.wait(60)

    def _read(self) -> None:
        body = {**LONG, "stream": True}
        with self._server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in filter(None, reply.iter_lines()):
                self.lines.append(line)
                self._started.set()


def test_given_an_open_stream_when_terminated_then_it_finishes_and_new_requests_get_503(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("--drain-timeout", "300")
    tree = server.tree()
    reader = StreamReader(server)
    server.process.send_signal(signal.SIGTERM)
    refused: list[httpx.Response] = []
    with server.http() as http:
        while reader.thread.is_alive() and not refused:
            try:
                reply = http.post("/v1/chat/completions", json={**LONG, "max_tokens": 1})
            except httpx.TransportError:
                break  # drained and gone already
            if reply.status_code == 503:
                refused.append(reply)
    reader.thread.join(60)
    assert reader.lines[-1] == "data: [DONE]"
    assert server.wait() == 0
    assert_gone(tree)
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_given_an_open_stream_when_the_whole_process_group_is_told_to_stop_then_it_finishes_and_nothing_is_left(
    start_server: Callable[..., RunningServer], number: signal.Signals
) -> None:
    """As `timeout`, a terminal and a shell's `kill -- -PGID` do it: Ray's servers are in our group."""
    run_dir = Path(tempfile.mkdtemp(prefix="nova-")) / "run"
    server = start_server("--drain-timeout", "300", "--run-dir", str(run_dir), leads_group=True)
    tree = server.tree()
    reader = StreamReader(server)
    os.killpg(server.process.pid, number)
    reader.thread.join(60)
    assert reader.lines[-1] == "data: [DONE]"
    assert server.wait() == 0
    assert_gone(tree)
    assert "did not stop" not in server.errors
    assert "ERROR" not in server.errors
    assert not run_dir.exists()
    run_dir.parent.rmdir()


def test_given_a_death_that_cannot_be_mended_when_it_happens_then_the_exit_is_not_zero_and_nothing_is_left(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_checkpoint(DEMO_MODEL), model)
    server = start_server("--model", str(model), "--max-restarts", "1")
    tree = server.tree()
    shutil.rmtree(model)
    server.processes()["worker 0.0"].kill()  # the next one has not loaded the weights yet
    refusals = set()
    with server.http() as http, contextlib.suppress(httpx.TransportError):
        while True:
            refusals.add(http.get("/readyz").status_code)
    assert 503 in refusals
    assert server.wait() != 0
    assert_gone(tree)
