"""What a person is told of a batch that runs: on standard error, now and then, and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TextIO

from novainfer.entrypoints.batch_lines import Outcome

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 10.0  # between two words of how far it is


class Asker(Protocol):
    """Who sends the requests."""

    trouble: str | None
    num_retries: int


class BatchProgress:
    """Counts, and tells of them. A terminal has one line that changes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._total: int | None = None  # lines, where that is known
        self.num_ok = self.num_failed = self.num_skipped = 0
        self._prompt_tokens = self._output_tokens = 0
        self._is_line_open = False
        self._last = ""

    def count(self, outcome: Outcome) -> None:
        """A line of the output has been written."""
        self.num_ok += outcome.is_ok
        self.num_failed += not outcome.is_ok
        self._prompt_tokens += outcome.prompt_tokens
        self._output_tokens += outcome.output_tokens

    def skip(self) -> None:
        """A line of the input is answered in the output already."""
        self.num_skipped += 1

    def exit_status(self) -> int:
        """Of a batch that has ended."""
        return 1 if self.num_failed else 0

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_line_open:
            print(file=self._stream)
            self._is_line_open = False
        print(f"novainfer run-batch: {text}", file=self._stream, flush=True)

    def tell_sum(self, num_retries: int = 0) -> None:
        """What has come of all."""
        before = f" ({self.num_skipped} more were there)" if self.num_skipped else ""
        retries = f", {num_retries} tries again" if num_retries else ""
        self.say(
            f"{self.num_ok} answered{before}, {self.num_failed} failed{retries}, in {self._seconds():.1f} s: "
            f"{self._prompt_tokens} prompt tokens, {self._output_tokens} output tokens ({self._rate():.0f} tokens/s)"
        )

    @contextlib.asynccontextmanager
    async def shown(self, asker: Asker, total: Callable[[], Awaitable[int | None]]) -> AsyncIterator[None]:
        """Tell how far it is from now on, and the sum at the end, if it gets there. total: counts the input's lines."""
        self._began = time.monotonic()
        task = asyncio.get_running_loop().create_task(self._show(asker, total))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        self.tell_sum(asker.num_retries)

    async def _show(self, asker: Asker, total: Callable[[], Awaitable[int | None]]) -> None:
        self._total = await total()
        is_terminal = self._stream.isatty()
        while True:
            await asyncio.sleep(TERMINAL_SECONDS if is_terminal else LOG_SECONDS)
            text = self._state(asker)
            if is_terminal:
                print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)
                self._is_line_open = True
            elif text != self._last:
                self.say(text)
            self._last = text

    def _state(self, asker: Asker) -> str:
        done = self.num_ok + self.num_failed + self.num_skipped
        of = "" if self._total is None else f"/{max(self._total, done)}"
        trouble = "" if asker.trouble is None else f"; trying again: {asker.trouble}"
        return f"{done}{of} done, {self.num_failed} failed, {self._rate():.0f} tokens/s{trouble}"

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _rate(self) -> float:
        return self._output_tokens / max(self._seconds(), 1e-3)
