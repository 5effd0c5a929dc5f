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


class PlainChoice:
    """One choice that has begun, whose text depends on its tokens alone.

    around: what stands before and behind a token's text in its event. spell: a text as JSON.
    """

    __slots__ = ("_choice", "_head", "_output", "_spell", "_tail", "_watch", "_writer")

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

    def push(self, token_id: int, last_token_at: list[float], gaps: TokenHistogram) -> bool:
        """Take a token and say so, unless the client would not take at once what is written.

        last_token_at: by choice, on the performance counter; is brought up to date. gaps: seconds between two tokens.
        """
        writer, choice = self._writer, self._choice
        if not writer.is_open:
            return False
        text = self._output.push_token(token_id)
        now = time.perf_counter()
        gaps.observe(now - last_token_at[choice])
        last_token_at[choice] = now
        if text:
            writer.write_between(self._head, self._spell(text), self._tail)
            self._watch.waits_since = self._watch.time()
        return True
