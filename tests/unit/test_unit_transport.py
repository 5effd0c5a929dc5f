"""Links beyond one host: tcp with CURVE keys, on real sockets; who gets in, who does not, and what that disturbs."""

from __future__ import annotations

import contextlib
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from novainfer.errors import ConfigError
from novainfer.transport.addresses import CurveKeys, Endpoint, RunDir
from novainfer.transport.channel import (
    bind_pull,
    bind_router,
    connect_dealer,
    connect_push,
    new_keys,
    start_authenticator,
)
from novainfer.transport.cluster import cluster_links

pytestmark = pytest.mark.unit

HOST = "127.0.0.1"
WAIT_MS = 30_000  # an event ends each wait long before
ZMTP_GREETING_BYTES = 64
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[Context]:
    """Of the peers; the server's is its own, as in another process."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


class Server:
    """A bound ROUTER, with its authenticator, that takes messages and answers."""

    def __init__(self, endpoint: Endpoint, *, with_authenticator: bool = True) -> None:
        self.context: Context = zmq.Context()
        self.router = bind_router(self.context, endpoint)
        keys = endpoint.curve if with_authenticator else None
        self.authenticator = None if keys is None else start_authenticator(self.context, keys)

    def hear(self) -> bytes:
        assert self.router.poll(WAIT_MS)
        return self.router.recv_multipart()[1]

    def close(self) -> None:
        self.router.close()
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """Of a server whose ranks may live elsewhere."""
    run_dir = RunDir.create(str(tmp_path / "run"))
    with cluster_links(run_dir, HOST):
        yield run_dir


@pytest.fixture
def endpoint(run_dir: RunDir) -> Endpoint:
    return run_dir.workers(0)


@pytest.fixture
def server(endpoint: Endpoint) -> Iterator[Server]:
    server = Server(endpoint)
    yield server
    server.close()


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.address.rpartition(":")[2])


def is_let_in(peer: Socket, endpoint: Endpoint, word: bytes) -> bool:
    """Connect a socket that has its keys, send, and wait for the end of the handshake."""
    peer.set(zmq.LINGER, 0)
    with peer.get_monitor_socket() as monitor:
        peer.connect(endpoint.address)
        with contextlib.suppress(zmq.Again):  # one that is refused at once has nobody any more to send to
            peer.send(word, zmq.DONTWAIT)
        event = None
        while event not in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
            assert monitor.poll(WAIT_MS)
            event = recv_monitor_message(monitor)["event"]
        peer.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def talk(context: Context, server: Server, endpoint: Endpoint) -> None:
    """The holder of the key says something, and the server hears it first."""
    with connect_dealer(context, endpoint.for_client(), b"rank-0-1") as peer:
        peer.send(b"hello")
        assert server.hear() == b"hello"
        server.router.send_multipart([b"rank-0-1", b"welcome"])
        assert peer.poll(WAIT_MS)
        assert peer.recv() == b"welcome"


def test_the_right_key_when_it_connects_then_both_sides_hear_each_other(
    context: Context, server: Server, endpoint: Endpoint
) -> None:
    talk(context, server, endpoint)


def without_keys(context: Context, keys: CurveKeys) -> Socket:
    return context.socket(zmq.DEALER)


def with_plain_password(context: Context, keys: CurveKeys) -> Socket:
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.PLAIN_USERNAME, b"rank")
    peer.set(zmq.PLAIN_PASSWORD, b"guess")
    return peer


def with_keys_of_its_own(context: Context, keys: CurveKeys) -> Socket:
    """It knows the server's public key, which is enough to encrypt."""
    return with_keys(context, replace(new_keys(), server_public=keys.server_public))


def with_another_servers_keys(context: Context, keys: CurveKeys) -> Socket:
    return with_keys(context, replace(keys, server_public=new_keys().server_public))


def with_keys(context: Context, keys: CurveKeys) -> Socket:
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.CURVE_SERVERKEY, keys.server_public.encode())
    peer.set(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
    peer.set(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
    return peer


@pytest.mark.parametrize(
    "stranger", [without_keys, with_plain_password, with_keys_of_its_own, with_another_servers_keys]
)
def test_a_stranger_when_it_connects_then_it_is_not_let_in_and_disturbs_nobody(
    context: Context, server: Server, endpoint: Endpoint, stranger: Callable[[Context, CurveKeys], Socket]
) -> None:
    assert endpoint.curve is not None
    with stranger(context, endpoint.curve) as peer:
        assert not is_let_in(peer, endpoint, b"let me in")
        talk(context, server, endpoint)
        assert not server.router.poll(0)
        assert not peer.poll(0)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 200, bytes(200)])
def test_garbage_when_it_is_sent_then_the_line_is_cut_and_nobody_is_disturbed(
    context: Context, server: Server, endpoint: Endpoint, garbage: bytes
) -> None:
    with socket.create_connection((HOST, port_of(endpoint)), timeout=WAIT_MS / 1000) as plain:
        plain.sendall(garbage)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while data := plain.recv(4096):
                heard += data
    assert len(heard) <= ZMTP_GREETING_BYTES
    talk(context, server, endpoint)
    assert not server.router.poll(0)


def test_a_server_without_authenticator_when_the_right_key_connects_then_not_even_that_is_let_in(
    context: Context, endpoint: Endpoint
) -> None:
    assert endpoint.curve is not None
    server = Server(endpoint, with_authenticator=False)
    try:
        with with_keys(context, endpoint.curve) as peer:
            assert not is_let_in(peer, endpoint, b"hello")
    finally:
        server.close()


def test_an_ipc_socket_when_its_context_has_an_authenticator_then_it_needs_no_key(
    context: Context, server: Server, run_dir: RunDir
) -> None:
    reports = bind_pull(server.context, run_dir.supervisor())
    with connect_push(context, run_dir.supervisor()) as child:
        child.send(b"started")
        assert reports.poll(WAIT_MS)
        assert reports.recv() == b"started"
    reports.close()


def test_a_server_when_it_is_started_again_then_it_has_its_address_back_and_its_peer_too(
    context: Context, endpoint: Endpoint
) -> None:
    first = Server(endpoint)
    with connect_dealer(context, endpoint.for_client(), b"rank-0-1") as peer:
        peer.send(b"to the first")
        assert first.hear() == b"to the first"
        first.close()
        second = Server(endpoint)
        try:
            # What is sent before the peer has noticed is lost with the first server: speak until one is heard.
            while not second.router.poll(100):
                peer.send(b"to the second")
            assert second.hear() == b"to the second"
        finally:
            second.close()


def test_a_reserved_port_when_somebody_asks_for_any_then_it_is_not_given_out_and_if_taken_the_bind_says_so(
    context: Context, endpoint: Endpoint
) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port_of(endpoint)))
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind((HOST, port_of(endpoint)))
        thief.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on {endpoint.address}: Address already in use"):
            bind_router(context, endpoint)


def test_cluster_links_when_opened_then_ranks_get_tcp_with_one_pair_of_keys_and_files_are_private(
    tmp_path: Path,
) -> None:
    run_dir = RunDir.create(str(tmp_path / "run"))
    local = run_dir.workers(0), run_dir.rank_reports()
    assert [link.address.partition(":")[0] for link in local] == ["ipc", "ipc"]
    assert run_dir.rank_reports() == run_dir.supervisor()
    with cluster_links(run_dir, HOST):
        workers, reports = run_dir.workers(0), run_dir.rank_reports()
        assert {link.address.partition(":")[0] for link in (workers, reports)} == {"tcp"}
        assert workers.address != reports.address
        assert workers.curve == reports.curve
        assert workers.curve is not None
        for file in (run_dir.workers_file(0), run_dir.rank_reports_file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert {run_dir.supervisor().address[:3], run_dir.gateways(0).address[:3]} == {"ipc"}
        sent = workers.for_client().to_json()
        assert workers.curve.server_secret not in sent
        assert workers.curve.client_secret not in repr(workers)
    assert (run_dir.workers(0), run_dir.rank_reports()) == local
    with cluster_links(run_dir, HOST):
        assert run_dir.workers(0).curve != workers.curve  # fresh keys at every start


def test_links_of_a_killed_server_when_the_next_one_has_none_then_they_are_forgotten(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path / "run"))
    for file in (run_dir.workers_file(0), run_dir.rank_reports_file):
        file.write_text(Endpoint("tcp://192.0.2.1:1", new_keys()).to_json())
    with cluster_links(run_dir, None):
        assert run_dir.workers(0).address.startswith("ipc://")
        assert run_dir.rank_reports() == run_dir.supervisor()


def test_an_address_of_another_host_when_links_are_opened_then_config_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"),
        cluster_links(RunDir(tmp_path), "192.0.2.1"),
    ):
        pass


def test_ipv6_when_links_are_opened_then_they_work_alike(context: Context, tmp_path: Path) -> None:
    with cluster_links(RunDir(tmp_path), "::1"):
        endpoint = RunDir(tmp_path).workers(0)
        server = Server(endpoint)
        try:
            talk(context, server, endpoint)
        finally:
            server.close()


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:1", "tcp://*:1", "tcp://0.0.0.0:1", "tcp://127.example.com:1"])
def test_an_address_beyond_loopback_when_it_has_no_keys_then_it_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        Endpoint(address).check()
    Endpoint(address, new_keys()).check()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/socket"])
def test_an_address_of_this_host_alone_when_it_has_no_keys_then_it_is_fine(address: str) -> None:
    Endpoint(address).check()


@pytest.mark.parametrize("path", ["/proc/x", "{file}"])
def test_given_a_place_where_no_directory_can_be_when_a_run_dir_is_made_then_the_reason_is_told(
    tmp_path: Path, path: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDir.create(path.format(file=file))


def test_a_libzmq_with_known_flaws_when_it_is_found_then_nothing_that_opens_sockets_can_be_imported() -> None:
    code = "import zmq; zmq.zmq_version_info = lambda: (4, 3, 2); import novainfer.transport.channel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "libzmq 4.3.3 or newer is needed" in done.stderr
