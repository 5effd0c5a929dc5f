"""Tells systemd (Type=notify) how far the server is; does nothing where there is no systemd."""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)


def notify(*assignments: str) -> None:
    """Send e.g. `READY=1` and `STATUS=...` to the service manager named by NOTIFY_SOCKET (see sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall("\n".join(assignments).encode())
    except OSError as error:
        logger.warning("cannot notify the service manager: %s", error)
