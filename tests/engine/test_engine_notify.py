"""What is sent to a service manager, and that one which does not read holds nobody up."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from novainfer.entrypoints.notify import Watchdog, notify

pytestmark = pytest.mark.stage0


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    return path


def test_a_watchdog_when_the_server_is_not_ready_then_nothing_is_sent(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        watchdog = Watchdog()
        for _ in range(100):
            watchdog.turn()
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        watchdog.begin()
        watchdog.turn()
        assert manager.recv(100) == b"WATCHDOG=1"


def test_a_service_manager_that_does_not_read_when_told_more_than_it_holds_then_we_go_on(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("novainfer.entrypoints.notify._PATIENCE", 0.001)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        while not caplog.messages:
            notify("STATUS=one more")
        assert manager.recv(100) == b"STATUS=one more"
    assert "cannot notify the service manager" in caplog.text
