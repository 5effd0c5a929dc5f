"""A server on one host, its ranks on another one of a Ray cluster: two network namespaces, real Ray, real sockets."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from novainfer.protocol.step import WORKER_SCHEMA, WorkerFault
from novainfer.protocol.supervision import FIRST_EPOCH, ROLE_WORKER, SUPERVISOR_SCHEMA, ChildFault
from novainfer.transport.addresses import RunDir
from tests.netns import Host, hosts_of_one_network, kept_folders, why_not
from tests.servers import RunningServer, assert_gone

pytestmark = pytest.mark.stage2

PORT = "6379"
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--object-store-memory", str(80 * 1024 * 1024))
CHAT = """
import json, sys, httpx
body = {"messages": [{"role": "user", "content": "What is 23 plus 45?"}], "stream": True, "max_tokens": 12}
with httpx.stream("POST", sys.argv[1] + "/v1/chat/completions", json=body, trust_env=False, timeout=60) as reply:
    print(json.dumps([line for line in reply.iter_lines() if line]))
"""
# TCP that speaks no ZeroMQ, then ZeroMQ without keys; prints what the one heard before it was cut off, and whether the
# other was let in.
INTRUDER = """
import json, socket, sys, zmq
from zmq.utils.monitor import recv_monitor_message
address, message = sys.argv[1], bytes.fromhex(sys.argv[2])
host, port = address.removeprefix("tcp://").split(":")
heard = b""
with socket.create_connection((host, int(port)), timeout=60) as plain:
    plain.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n" * 10)
    try:
        while data := plain.recv(4096):
            heard += data
    except ConnectionResetError:
        pass
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, dealer.get_monitor_socket() as monitor:
    dealer.set(zmq.LINGER, 0)
    dealer.connect(address)
    dealer.send(message)
    event = None
    while event not in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        event = recv_monitor_message(monitor)["event"]
    dealer.disable_monitor()
print(json.dumps([heard.hex(), event == zmq.EVENT_HANDSHAKE_SUCCEEDED]))
"""
ZMTP_GREETING_BYTES = 64


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """A Ray cluster of two hosts; the first has no room for ranks."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts_of_one_network(tmp_path_factory.mktemp("hosts")) as (front, back):
        head = ("--head", "--port", PORT, "--num-cpus", "0", "--include-dashboard=false", "--disable-usage-stats")
        front.run(*RAY, *head, "--node-ip-address", front.address, environ=environ())
        other = ("--address", f"{front.address}:{PORT}", "--num-cpus", "2", "--node-ip-address", back.address)
        back.run(*RAY, *other, environ=environ())
        yield front, back


@pytest.fixture
def server(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[RunningServer]:
    """On the first host."""
    front, _ = hosts
    running = RunningServer(
        *("--run-dir", "/tmp/server", "--tensor-parallel-size", "2"),
        *("--ray-address", f"{front.address}:{PORT}", "--cluster-host", front.address),
        log=tmp_path / "log",
        environ=environ(),
        prefix=front.prefix,
    )
    yield running
    if running.process.poll() is None:
        running.kill()


def environ() -> dict[str, str]:
    """The token is the same for all of Ray, whatever the user's own set-up is."""
    return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


def ranks(host: Host) -> dict[str, psutil.Process]:
    """The rank processes in a host's network, by title."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ()).strip("\0 ")
        if title.startswith("novainfer: worker") and host.holds(process.pid):
            found[title] = process
    return found


def test_given_a_cluster_of_two_hosts_when_only_the_other_has_room_then_its_ranks_serve_and_strangers_hear_nothing(
    hosts: tuple[Host, Host], server: RunningServer
) -> None:
    front, back = hosts
    assert set(ranks(back)) == {"novainfer: worker 0.0", "novainfer: worker 0.1"}
    assert not ranks(front)
    assert f"the ranks are on {back.address}" in server.errors
    run_dir = RunDir(front.tmp / "server")
    for file in (run_dir.workers_file(0), run_dir.rank_reports_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    said = "a stranger's word"
    fault = WORKER_SCHEMA.encode(WorkerFault(FIRST_EPOCH, 0, said))
    report = SUPERVISOR_SCHEMA.encode(ChildFault(ROLE_WORKER, 0, FIRST_EPOCH, said))
    for endpoint, message in ((run_dir.workers(0), fault), (run_dir.rank_reports(), report)):
        heard, was_let_in = json.loads(back.run(sys.executable, "-c", INTRUDER, endpoint.address, message.hex()))
        assert len(bytes.fromhex(heard)) <= ZMTP_GREETING_BYTES
        assert not was_let_in

    lines = json.loads(front.run(sys.executable, "-c", CHAT, server.base_url))
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    assert "".join(delta[0]["delta"].get("content") or "" for delta in deltas if delta)

    server.stop()
    assert said not in server.errors
    assert not (front.tmp / "server").exists()
    lent = {Path(folder).parts[2] for folder in kept_folders()}  # a checkout below /tmp is
    left = {path.name for path in back.tmp.iterdir() if any(path.iterdir())}
    assert left - lent == {"ray"}


def test_given_ranks_on_another_host_when_the_supervisor_is_killed_then_they_end_too(
    hosts: tuple[Host, Host], server: RunningServer
) -> None:
    _, back = hosts
    processes = list(ranks(back).values())
    assert len(processes) == 2
    server.kill()
    assert_gone(processes)
