"""Shows the human who waits how far the start is: a bar at a terminal, one line a stage elsewhere; then the URL."""

from __future__ import annotations

import logging
import sys
import time
from typing import Protocol, TextIO

from novainfer.config import ServeConfig
from novainfer.entrypoints.notify import Watchdog, notify
from novainfer.protocol.supervision import LoadProgress

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1


class Progress(Protocol):
    """Who wants to know how far a supervisor is."""

    def show(self, message: LoadProgress) -> None:
        """A rank has got on with loading."""
        ...

    def seconds(self) -> float:
        """Since the start."""
        ...

    def announce(self, config: ServeConfig, port: int) -> None:
        """All processes are ready. port: gateway 0's."""
        ...

    def turn(self, serves: bool) -> None:
        """Called several times a second; serves: all processes are ready."""
        ...

    def stopping(self) -> None:
        """The end has begun."""
        ...

    def close(self) -> None:
        """Nothing more is to be shown of the start."""
        ...


class StartProgress:
    """Progress of rank 0, which stands for all: the ranks load in step."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._stage = ""
        self._is_bar_open = False
        self._watchdog = Watchdog()

    def show(self, message: LoadProgress) -> None:
        """Draw the new state."""
        if message.rank != 0:
            return
        if self._stream.isatty():
            self._draw_bar(message)
        elif message.stage != self._stage:
            parts = f" ({message.total} tensors)" if message.total > 1 else ""
            logger.info("loading: %s%s", message.stage, parts)
        self._stage = message.stage

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def announce(self, config: ServeConfig, port: int) -> None:
        """The server is ready; say so on standard output, and to the service manager. port: gateway 0's."""
        self.close()
        workers = _count(config.parallel.tensor_parallel_size, "worker")
        if config.parallel.replicas is not None:
            workers = f"{_count(config.parallel.replicas, 'replica')} of {workers}"
        url = _url(config.server.host, port or config.server.port)
        text = f"ready on {url} (model {config.model.model}, {workers}, {self.seconds():.1f} s)"
        print(f"NovaInfer is {text}", flush=True)
        notify("READY=1", f"STATUS={text}")
        self._watchdog.begin()

    def turn(self, serves: bool) -> None:
        """Tell the service manager."""
        self._watchdog.turn()

    def stopping(self) -> None:
        """Tell the service manager."""
        self.close()
        notify("STOPPING=1")

    def close(self) -> None:
        """Leave the terminal on a line of its own."""
        if self._is_bar_open:
            print(file=self._stream, flush=True)
            self._is_bar_open = False

    def _draw_bar(self, message: LoadProgress, width: int = 30) -> None:
        share = message.done / message.total if message.total else 1.0
        filled = int(share * width)
        bar = "#" * filled + "-" * (width - filled)
        print(f"\r\x1b[Kloading {message.stage}: [{bar}] {share:4.0%}", end="", file=self._stream, flush=True)
        self._is_bar_open = True


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def exit_status(fault: str | None) -> int:
    """Of a server that has ended. A fault is said again: what the others wrote meanwhile has pushed it out of sight."""
    if fault is None:
        return EXIT_OK
    logger.error("the server has ended: %s", fault)
    return EXIT_FAULT
