"""The short way of tokens of which nothing but their text is told: from the id into the connection in few calls.

Between two tokens of a stream others have their turn, so each finds the caches cold: it counts how much is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.body_writer import BodyWriter
from gateway.histogram import TokenHistogram
from gateway.watch import Watch
from novainfer.client.output import ChoiceOutput
from novainfer.client.stream import RequestStream


class PlainChoice:
    """One choice that has begun, whose text depends on its tokens alone.

    around: what stands before and behind a token's text in its event. spell: a text as JSON.
    """

    __slots__ = (
        "_choice",
        "_fail",
        "_gaps",
        "_head",
        "_last_token_at",
        "_output",
        "_spell",
        "_stream",
        "_tail",
        "_watch",
        "_writer",
    )

    def __init__(
        self,
        output: ChoiceOutput,
        around: tuple[bytes, bytes],
        spell: Callable[[str], bytes],
        writer: BodyWriter,
        watch: Watch,
    ) -> None:
        self._output = output
        self._choice = output.choice
        self._head, self._tail = around
        self._spell = spell
        self._writer = writer
        self._watch = watch

    def begin(
        self,
        stream: RequestStream,
        last_token_at: list[float],
        gaps: TokenHistogram,
        fail: Callable[[Exception], None],
    ) -> None:
        """Before the first `push`.

        last_token_at: by choice, on the performance counter; is brought up to date. gaps: seconds between two tokens.
        """
        self._stream = stream
        self._last_token_at = last_token_at
        self._gaps = gaps
        self._fail = fail

    def push(self, token_id: int) -> bool:
        """Take a token and say so, unless the client would not take at once what is written, or others come first."""
        writer = self._writer
        if not (self._stream.is_flowing and writer.is_open):
            return False
        try:
            text = self._output.push_token(token_id)
            now, choice, last_token_at = time.perf_counter(), self._choice, self._last_token_at
            self._gaps.observe(now - last_token_at[choice])
            last_token_at[choice] = now
            if text:
                writer.write_between(self._head, self._spell(text), self._tail)
                self._watch.waits_since = now
        except Exception as error:
            self._fail(error)
        return True
