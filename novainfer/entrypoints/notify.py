"""Tells systemd (Type=notify) how far the server is; does nothing where there is no systemd."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds, for a service manager that does not read: children wait for us meanwhile


class Watchdog:
    """Tells systemd that we turn, as often as `WatchdogSec=` wants; what does not is killed and started again.

    systemd watches from `READY=1` on. What is sent before would only stand in its queue, which is short.
    """

    def __init__(self) -> None:
        microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        is_for_us = microseconds.isdigit() and pid in ("", str(os.getpid()))
        self._interval = int(microseconds) / 1e6 / 3 if is_for_us else float("inf")
        self._last = float("inf")

    def begin(self) -> None:
        """The server is ready."""
        self._last = 0.0

    def turn(self) -> None:
        """Called several times a second."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            notify("WATCHDOG=1")


def notify(*assignments: str) -> None:
    """Send e.g. `READY=1` and `STATUS=...` to the service manager named by NOTIFY_SOCKET (see sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_PATIENCE)
            channel.connect(address)
            channel.sendall("\n".join(assignments).encode())
    except OSError as error:
        logger.warning("cannot notify the service manager: %s", error)
