"""What a real server lets out and in: sockets off loopback, API keys in its processes and files, oversized requests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
LOOPBACK = ("127.0.0.1", "::1")
CHUNK = 16 * 1024 * 1024  # bytes of memory looked at once


@dataclass(frozen=True)
class Locked:
    """A server with keys, where its run directory is, and every key that it was given."""

    server: RunningServer
    run_dir: Path
    keys: tuple[str, ...]

    def http(self, key: str) -> httpx.Client:
        return self.server.http(authorization=f"Bearer {key}")


def start_locked(folder: Path, *flags: str, variable: str) -> tuple[RunningServer, Path]:
    """A server with these flags and this `NOVAINFER_API_KEY`."""
    run_dir = Path(tempfile.mkdtemp(prefix="nova-"))  # short, for the sake of the sockets in it
    environ = {**os.environ, "NOVAINFER_API_KEY": variable}
    return RunningServer("--run-dir", str(run_dir), *flags, log=folder / "log", environ=environ), run_dir


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """One gateway on every address, with keys from a flag and a file; the variable gives one that the flag replaces."""
    folder = tmp_path_factory.mktemp("exposed")
    (folder / "keys").write_text("team:sk-of-the-file\n")
    flags = ("--host", "0.0.0.0", "--max-num-seqs", "128", "--api-key", "sk-of-the-flag")
    server, run_dir = start_locked(folder, *flags, "--api-key-file", str(folder / "keys"), variable="sk-replaced")
    yield Locked(server, run_dir, ("sk-of-the-flag", "sk-of-the-file", "sk-replaced"))
    server.stop()
    run_dir.rmdir()


@pytest.fixture(scope="module")
def shared_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """Two gateways, with two keys from the variable."""
    folder = tmp_path_factory.mktemp("shared")
    server, run_dir = start_locked(folder, "--num-gateways", "2", variable="sk-of-alice,sk-of-bob")
    yield Locked(server, run_dir, ("sk-of-alice", "sk-of-bob"))
    server.stop()
    run_dir.rmdir()


@pytest.fixture(params=["exposed", "shared_port"])
def locked(request: pytest.FixtureRequest) -> Locked:
    """Either of them."""
    chosen: Locked = request.getfixturevalue(request.param)
    return chosen


def memory_holds(process: psutil.Process, text: bytes) -> bool:
    """Whether its writable memory has `text` anywhere."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if " rw" in line and "/dev/" not in line]
    with open(f"/proc/{process.pid}/mem", "rb") as memory:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in ranges):
            for position in range(start, end, CHUNK):
                memory.seek(position)
                if text in memory.read(min(CHUNK + len(text), end - position)):
                    return True
    return False


def test_given_all_addresses_when_sockets_are_listed_then_one_listens_off_loopback_the_http_port(
    exposed: Locked,
) -> None:
    listening = [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in exposed.server.tree()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert not [p.cmdline() for p in exposed.server.tree() if "dashboard/dashboard.py" in " ".join(p.cmdline())]
    port = httpx.URL(exposed.server.base_url).port
    assert [address for address in listening if address[0] not in LOOPBACK] == [("0.0.0.0", port)]
    assert len(listening) > 3  # Ray's are among them


def test_given_keys_when_children_and_files_are_searched_then_none_has_one(locked: Locked) -> None:
    children = locked.server.tree()[1:]
    assert len(children) > 4  # Ray's are among them
    for key in map(str.encode, locked.keys):
        for process in children:
            for name in ("environ", "cmdline"):
                assert key not in Path(f"/proc/{process.pid}/{name}").read_bytes(), process.cmdline()
        files = [path for path in locked.run_dir.rglob("*") if path.is_file()]
        assert locked.run_dir / "config.json" in files
        assert [path for path in files if key in path.read_bytes()] == []
        assert key.decode() not in locked.server.errors


def test_given_keys_when_the_memory_of_engine_processes_is_searched_then_none_has_one(exposed: Locked) -> None:
    """A rank's configuration comes to it over Ray, so no file and no variable shows it."""
    processes = exposed.server.processes()
    key = exposed.keys[0].encode()
    assert memory_holds(processes["supervisor"], key)  # the check itself can see it
    assert not memory_holds(processes["scheduler 0"], key)
    assert not memory_holds(processes["worker 0.0"], key)


def test_given_keys_of_a_flag_and_a_file_when_used_then_they_open_and_a_replaced_one_does_not(exposed: Locked) -> None:
    statuses = []
    for key in exposed.keys:
        with exposed.http(key) as http:
            statuses.append(http.get("/v1/models").status_code)
    assert statuses == [200, 200, 401]


def test_given_lists_that_would_make_a_step_too_large_when_sent_then_400_and_the_largest_allowed_are_served(
    exposed: Locked,
) -> None:
    with exposed.http(exposed.keys[0]) as http:
        vocab_size = 512  # of ids that the demo model has, at least
        replies = []
        for length in (65_536, 4096):
            ids = [i % vocab_size for i in range(length)]
            lists = {"allowed_token_ids": ids, "banned_token_ids": ids[:-1:2] * 2, "stop_token_ids": ids}
            body = {**HELLO, **lists, "n": 128, "max_tokens": 2, "ignore_eos": True}
            replies.append(http.post(CHAT, json=body))
        assert replies[0].status_code == 400
        assert replies[1].status_code == 200, replies[1].text
        assert len(replies[1].json()["choices"]) == 128
        assert http.get("/health").json() == {"status": "ok"}
        assert http.post(CHAT, json={**HELLO, "max_tokens": 4}).json()["choices"][0]["message"]["content"]


def test_given_two_gateways_when_a_stream_is_cancelled_at_either_then_only_its_tenant_can(shared_port: Locked) -> None:
    """Each cancel is a new connection, and the kernel deals them out over the gateways."""
    alice, bob = shared_port.keys

    def cancel(key: str, name: str) -> int:
        with shared_port.http(key) as http:
            return http.post(f"/v1/requests/{name}/cancel").status_code

    def read(name: str) -> str:
        body = {**HELLO, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with shared_port.http(alice) as http, http.stream("POST", CHAT, json=body, headers={"x-request-id": name}) as r:
            lines = r.iter_lines()
            first = next(lines)
            assert [cancel(bob, name) for _ in range(4)] == [404] * 4
            assert cancel(alice, name) == 200
            rest = [first, *(line for line in lines if line)]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"cancelled"' in rest[-2]
            return name

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(read, [f"stream-{i}" for i in range(8)]))) == 8
