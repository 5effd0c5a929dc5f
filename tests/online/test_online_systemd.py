"""What a service manager hears from a real server: ready, again and again that it turns, and that it stops."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

PATIENCE = 60  # seconds; only a failing test waits that long
WATCHDOG_SECONDS = 1.5


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """systemd's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        yield listener


def heard_until(manager: socket.socket, word: str) -> list[str]:
    """All that comes up to a message with this assignment."""
    found: list[str] = []
    while word not in found:
        found += manager.recv(4096).decode().split("\n")
    return found


@pytest.mark.parametrize("flags", [(), ("--replicas", "1")], ids=["one engine", "replicas"])
def test_given_a_service_manager_when_a_server_lives_then_it_hears_of_it_until_the_end(
    manager: socket.socket, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    # Short, so that Ray's sockets fit below it, also a replica's.
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        flags = (*flags, "--run-dir", f"{folder}/run")
        check_life(manager, tmp_path, flags)


def check_life(manager: socket.socket, tmp_path: Path, flags: tuple[str, ...]) -> None:
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}
    with RunningServer(*flags, log=tmp_path / "log", environ={**os.environ, **told}) as server:
        heard_until(manager, "READY=1")
        for _ in range(5):
            manager.settimeout(WATCHDOG_SECONDS * 4)  # a busy machine; systemd would be stricter
            heard_until(manager, "WATCHDOG=1")
        manager.settimeout(PATIENCE)
        server.stop()
        assert "STOPPING=1" in heard_until(manager, "STOPPING=1")
