"""What a person is told of a batch that runs, at a terminal and elsewhere."""

from __future__ import annotations

import asyncio
import io

import pytest

from novainfer.entrypoints import batch_progress
from novainfer.entrypoints.batch_lines import Outcome
from novainfer.entrypoints.batch_progress import BatchProgress

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Stream(io.StringIO):
    """What is written, and an event for it."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.has_more = asyncio.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.has_more.set()
        return super().write(text)


class Asker:
    trouble: str | None = None
    num_retries = 2


async def four() -> int | None:
    return 4


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_given_a_batch_that_runs_when_shown_then_it_says_how_far_it_is_what_goes_wrong_and_the_sum(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(batch_progress, "TERMINAL_SECONDS" if is_terminal else "LOG_SECONDS", 0.0)
    stream, asker = Stream(is_terminal=is_terminal), Asker()
    progress = BatchProgress(stream)

    async def next_state() -> str:
        before = len(stream.getvalue())
        stream.has_more.clear()
        await stream.has_more.wait()
        return stream.getvalue()[before:]

    async def main() -> None:
        async with asyncio.timeout(20), progress.shown(asker, four):
            progress.skip()
            progress.count(Outcome(b"", is_ok=True, prompt_tokens=5, output_tokens=7))
            assert "2/4 done, 0 failed" in await next_state()
            progress.count(Outcome(b"", is_ok=False))
            asker.trouble = "503 from there"
            while "3/4 done, 1 failed" not in (state := await next_state()):
                continue
            assert "; trying again: 503 from there" in state

    asyncio.run(main())
    *_, last = stream.getvalue().splitlines()
    assert last.startswith("novainfer run-batch: 1 answered (1 more were there), 1 failed, 2 tries again, in ")
    assert ": 5 prompt tokens, 7 output tokens (" in last
    assert ("\r" in stream.getvalue()) == is_terminal
    assert progress.exit_status() == 1
