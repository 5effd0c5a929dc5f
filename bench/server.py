"""Starts our own server for a measurement and ends it afterwards."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

_READY = re.compile(r"NovaInfer is ready on (http://\S+)")
_STOP_TIMEOUT = 90  # seconds


@dataclass(frozen=True, slots=True)
class Started:
    """A server that is ready, and how long that took from the start of its process."""

    base_url: str
    seconds: float
    pid: int


@contextlib.contextmanager
def started_server(model: str, *flags: str) -> Iterator[Started]:
    """Run `novainfer serve MODEL` on a free port, from the main thread; raises SystemExit if it does not get ready."""
    command = [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", model, "--port", "0", *flags]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    # A measurement that is told to end shall end its server, too, in the `finally` below, however often it is told.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        assert process.stdout is not None
        for line in process.stdout:
            match = _READY.search(line)
            if match:
                yield Started(match.group(1), time.perf_counter() - began, process.pid)
                break
        else:
            raise SystemExit("the server did not get ready")
    finally:
        asked: list[int] = []  # to end, while the server does
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        finally:
            process.kill()
            process.stdout.close()  # type: ignore[union-attr]
            signal.signal(signal.SIGTERM, before)
            if asked:
                sys.exit(128 + asked[0])
