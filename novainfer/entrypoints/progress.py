"""Shows the human who waits how far loading is: a bar at a terminal, one line a stage elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from novainfer.protocol.supervision import LoadProgress


class StartProgress:
    """Progress of rank 0, which stands for all: the ranks load in step."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._stage = ""
        self._is_bar_open = False

    def show(self, message: LoadProgress) -> None:
        """Draw the new state."""
        if message.rank != 0:
            return
        if self._stream.isatty():
            self._draw_bar(message)
        elif message.stage != self._stage:
            parts = f" ({message.total} tensors)" if message.total > 1 else ""
            print(f"loading: {message.stage}{parts}", file=self._stream, flush=True)
        self._stage = message.stage

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
