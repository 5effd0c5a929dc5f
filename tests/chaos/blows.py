"""What is done to a server while streams run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.streams import Answer, Streams
from tests.servers import RunningServer

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STRANGE = "compute otherwise"  # in what the server writes when a new group does not compute what the last one did
Disturb = Callable[[RunningServer, Streams], object]


@dataclass(frozen=True)
class Undisturbed:
    """A server, and what it says when nothing happens to it."""

    server: RunningServer
    answers: list[Answer]


def strike(server: RunningServer, title: str, number: signal.Signals) -> psutil.Process:
    """Send a signal to the process with this title."""
    process = server.processes()[title]
    os.kill(process.pid, number)
    return process


def wait_replaced(server: RunningServer, title: str, old: psutil.Process) -> None:
    """Block until another process has this title."""
    while server.processes().get(title, old) == old:
        assert server.process.poll() is None, server.errors
        time.sleep(0.005)  # nothing tells of a process that another one starts
