"""The gateway as a process: start, reports to the supervisor, draining, exit codes, and what it must not import."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq

from novainfer.config import ServeConfig
from novainfer.protocol.supervision import (
    GIVE_UP_SIGNAL,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    GatewayPulse,
)
from novainfer.text.tokenizer import Tokenizer
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import bind_pull
from novainfer.transport.replicas import IN, NAME, Replicas, write_replicas
from tests.fakes import ScriptedScheduler
from tests.online.gateways import config_for, text_processes

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 8}


class Supervisor:
    """Starts gateways in a run directory and hears their reports."""

    def __init__(self, folder: Path, config: ServeConfig) -> None:
        self.run_dir = RunDir.create(str(folder))
        self.run_dir.config_file.write_text(config.to_json())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_pull(self._context, self.run_dir.supervisor())
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, index: int = 0, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gateway.process", "--run-dir", str(self.run_dir.path), "--index", str(index)]
        child = subprocess.Popen([*command, *more], stderr=subprocess.DEVNULL)
        self.children.append(child)
        return child

    def hear_anything(self) -> Any:
        assert self._socket.poll(30_000), "the gateway said nothing"
        return SUPERVISOR_SCHEMA.decode(self._socket.recv())

    def hear(self) -> Any:
        """The next report that is not a pulse."""
        while isinstance(report := self.hear_anything(), GatewayPulse):
            pass
        return report

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        self._socket.close()
        self._context.term()


@pytest.fixture
def supervisor(tiny_model: Path, tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "run", config_for(tiny_model, drain_timeout=20.0))
    yield supervisor
    supervisor.close()


@pytest.fixture
def scheduler(supervisor: Supervisor, tiny_model: Path) -> Iterator[ScriptedScheduler]:
    vocab_size = Tokenizer.load(tiny_model).vocab_size
    scripted = ScriptedScheduler(supervisor.run_dir.gateways(0), vocab_size=vocab_size)
    yield scripted
    scripted.close()


def client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=30.0)


def test_given_a_start_when_the_engine_is_ready_then_both_phases_are_reported_and_nothing_heavy_is_loaded(
    supervisor: Supervisor, scheduler: ScriptedScheduler
) -> None:
    child = supervisor.start(3)
    started = supervisor.hear()
    assert started == ChildStarted("gateway", 3, child.pid, started.port)
    assert supervisor.hear() == ChildReady("gateway", 3)
    with client(started.port) as http:
        assert http.get("/readyz").status_code == 200
        assert http.post(CHAT, json=BODY).text.endswith("data: [DONE]\n\n")
    process = psutil.Process(child.pid)
    assert process.cmdline()[0].startswith("novainfer: gateway 3")
    assert os.sched_getscheduler(child.pid) == os.SCHED_BATCH
    mapped = [region.path for region in process.memory_maps()]
    assert not [path for path in mapped if any(name in path for name in ("torch", "triton", "/ray/"))]
    listening = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.port for c in listening] == [started.port]
    texts = list(text_processes(process).values())
    assert len(texts) == 3
    assert {" ".join(text.cmdline()).rpartition(" text ")[0] for text in texts} == {"novainfer: gateway 3"}
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    assert not [text for text in texts if text.is_running()]


def test_given_a_gateway_when_it_runs_then_it_sends_pulses_before_the_engine_is_ready_and_while_it_drains(
    supervisor: Supervisor, request: pytest.FixtureRequest
) -> None:
    child = supervisor.start(2, "--epoch", "5")
    port = supervisor.hear().port
    assert [supervisor.hear_anything() for _ in range(3)] == [GatewayPulse(2, 5, 0, [0], [0])] * 3
    scheduler: ScriptedScheduler = request.getfixturevalue("scheduler")
    scheduler.tokens_before_pause = 2
    assert supervisor.hear() == ChildReady("gateway", 2, 5)
    with client(port) as http, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(http.post, CHAT, json=BODY)
        scheduler.wait_for(lambda: any(live.counts == [2] for live in scheduler.live.values()))
        child.send_signal(signal.SIGTERM)
        pulses = [supervisor.hear_anything() for _ in range(8)]  # the first may be from before the stream
        assert [isinstance(pulse, GatewayPulse) and (pulse.index, pulse.epoch) for pulse in pulses] == [(2, 5)] * 8
        assert pulses[-1] == GatewayPulse(2, 5, 0, [0], [1])
        scheduler.tokens_before_pause = None
        assert stream.result(20).text.endswith("data: [DONE]\n\n")
    assert child.wait(20) == 0


def test_given_open_streams_when_terminated_then_they_finish_new_ones_get_503_and_the_exit_is_0(
    supervisor: Supervisor, scheduler: ScriptedScheduler
) -> None:
    scheduler.tokens_before_pause = 2
    child = supervisor.start()
    port = supervisor.hear().port
    supervisor.hear()
    with client(port) as http, client(port) as other, ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(http.post, CHAT, json=BODY) for _ in range(2)]
        scheduler.wait_for(lambda: [live.counts for live in scheduler.live.values()] == [[2], [2]])
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group and must not hurry anyone
        while other.get("/readyz").status_code == 200:
            pass
        assert other.get("/livez").status_code == 200
        refused = other.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert child.poll() is None
        scheduler.tokens_before_pause = None
        for stream in streams:
            assert stream.result(20).text.endswith("data: [DONE]\n\n")
    assert child.wait(20) == 0


def test_given_streams_that_outlast_the_drain_when_terminated_then_each_gets_an_error_event(
    supervisor: Supervisor, scheduler: ScriptedScheduler, tiny_model: Path
) -> None:
    supervisor.run_dir.config_file.write_text(config_for(tiny_model, drain_timeout=0.2).to_json())
    scheduler.tokens_before_pause = 2
    child = supervisor.start()
    port = supervisor.hear().port
    supervisor.hear()
    with client(port) as http, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(http.post, CHAT, json=BODY)
        scheduler.wait_for(lambda: any(live.counts == [2] for live in scheduler.live.values()))
        child.send_signal(signal.SIGTERM)
        last = stream.result(20).text.removesuffix("\n\n").rpartition("\n\n")[2]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert child.wait(20) == 0
    scheduler.wait_for(lambda: not scheduler.live)


def test_given_a_gateway_that_drains_when_the_engine_has_failed_for_good_then_each_stream_gets_an_error_event(
    supervisor: Supervisor, scheduler: ScriptedScheduler
) -> None:
    scheduler.tokens_before_pause = 2
    child = supervisor.start()
    port = supervisor.hear().port
    supervisor.hear()
    with client(port) as http, client(port) as other, ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(http.post, CHAT, json=BODY) for _ in range(2)]
        scheduler.wait_for(lambda: [live.counts for live in scheduler.live.values()] == [[2], [2]])
        child.send_signal(signal.SIGTERM)
        while other.get("/readyz").status_code == 200:
            pass
        child.send_signal(GIVE_UP_SIGNAL)
        lasts = [stream.result(20).text.removesuffix("\n\n").rpartition("\n\n")[2] for stream in streams]
    for last in lasts:
        assert "failed for good" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert child.wait(20) == 0


def test_given_files_that_cannot_be_read_or_written_when_a_gateway_runs_then_it_sends_pulses_and_drains_as_ever(
    supervisor: Supervisor,
) -> None:
    supervisor.run_dir.metrics_file(0).with_suffix(".new").mkdir()
    child = supervisor.start()
    supervisor.hear()
    replicas = supervisor.run_dir.path / NAME
    replicas.mkdir()
    for _ in range(8):  # the first may be from before
        assert supervisor.hear_anything() == GatewayPulse(0, 1, 0, [0], [0])
    replicas.rmdir()
    write_replicas(supervisor.run_dir, Replicas(1, {0: IN}))
    while supervisor.hear_anything().version != 1:
        pass
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0


def test_given_two_gateways_when_started_then_they_share_one_port(tiny_model: Path, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "run", config_for(tiny_model, num_gateways=2))
    try:
        supervisor.start(0)
        port = supervisor.hear().port
        supervisor.start(1, "--port", str(port))
        assert supervisor.hear().port == port
        with client(port) as http:
            assert http.get("/livez").status_code == 200
    finally:
        supervisor.close()


@pytest.mark.parametrize("fault", ["port", "model", "keys", "template"])
def test_given_a_configuration_that_cannot_work_when_started_then_a_fault_is_reported_and_the_exit_is_2(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    config = config_for(tiny_model)
    if fault == "model":
        config = config_for(tmp_path / "nothing")
    elif fault == "keys":
        config = replace(config, server=replace(config.server, api_key=("not sealed",)))
    elif fault == "template":
        config = replace(config, model=replace(config.model, chat_template=str(tmp_path / "nothing")))
    else:
        config = config_for(tiny_model, host="203.0.113.1")
    supervisor = Supervisor(tmp_path / "run", config)
    try:
        child = supervisor.start()
        report = supervisor.hear()
        assert isinstance(report, ChildFault)
        assert report.message
        assert child.wait(20) == 2
    finally:
        supervisor.close()


def test_given_a_parent_that_is_killed_when_it_is_gone_then_so_is_the_gateway(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    run_dir = str(supervisor.run_dir.path)
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', 'gateway.process', '--run-dir', {run_dir!r}])\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    supervisor.children.append(parent)
    started = supervisor.hear()
    gateway = psutil.Process(started.pid)
    texts = list(text_processes(gateway).values())
    assert texts
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    gateway.wait(20)
    assert not gateway.is_running()
    assert psutil.wait_procs(texts, timeout=20)[1] == []


def test_given_a_gateway_that_is_killed_when_its_text_processes_still_live_then_its_port_is_free(
    supervisor: Supervisor, scheduler: ScriptedScheduler
) -> None:
    child = supervisor.start()
    port = supervisor.hear().port
    supervisor.hear()
    with client(port) as http:
        assert http.post(CHAT, json=BODY).status_code == 200
    texts = list(text_processes(psutil.Process(child.pid)).values())
    assert len(texts) == 3
    assert [text.net_connections("inet") for text in texts] == [[], [], []]
    child.kill()
    child.wait()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    assert psutil.wait_procs(texts, timeout=20)[1] == []
