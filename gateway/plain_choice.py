"""The short way of tokens of which nothing but their text is told: from ids into the connections, a step at a time.

Between two tokens of a stream others have their turn, so each finds the caches cold, and Python and the kernel push
each other out of them: it counts how many objects are touched, and a step is spelled before any of it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.body_writer import BodyWriter
from gateway.loop_metrics import LoopHistogram
from novainfer.client.output import ChoiceOutput
from novainfer.client.stream import ShortWay
from novainfer.text.tokenizer import Tokenizer

_MOST_KNOWN = 1 << 17  # tokens
_SIZES = [b"%x\r\n" % size for size in range(2048)]  # as they stand before a part


class Spelling:
    """How the tokens of a tokenizer stand in an event, of those whose text is the same wherever they stand.

    spell: a text as JSON. known: by token, filled as they come.
    """

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> None:
        self.spell = spell
        self.known: dict[int, bytes] = {}
        self._tokenizer = tokenizer

    def learn(self, token_id: int) -> None:
        """A token that has come between two characters."""
        text = None if token_id in self._tokenizer.special_ids else self._tokenizer.whole_text(token_id)
        if text and len(self.known) < _MOST_KNOWN:
            self.known[token_id] = self.spell(text)


_NONE: dict[int, bytes] = {}  # within a character, or where the text of each token depends on others


class PlainChoice(ShortWay):
    """One choice that has begun, whose text depends on its tokens alone.

    last_at, written_at: when its last token came, and when text of it was written last, on the performance counter.
    """

    __slots__ = (
        "_fail",
        "_gaps",
        "_output",
        "_spelling",
        "choice",
        "head",
        "last_at",
        "size",
        "spelled",
        "tail",
        "told",
        "write",
        "written_at",
    )

    def __init__(
        self, output: ChoiceOutput, around: tuple[bytes, bytes], spelling: Spelling, writer: BodyWriter
    ) -> None:
        """around: what stands before and behind a token's text in its event."""
        super().__init__()
        self.choice = output.choice
        self.head = around[0]
        self.tail = around[1] + b"\r\n"
        self.size = len(around[0]) + len(around[1])
        self.write = writer.write_part
        self.told = output.token_ids
        self.spelled = _NONE  # what a token's text is if it can be known without what came before
        self.last_at = self.written_at = 0.0
        self._output = output
        self._spelling = spelling

    def begin(self, gaps: LoopHistogram, fail: Callable[[Exception], None]) -> None:
        """Before the first token. gaps: seconds between two tokens. fail: called with what went wrong."""
        self._gaps = gaps
        self._fail = fail

    def look_ahead(self) -> None:
        """Before its way is opened: tokens that came another way may have ended within a character."""
        self.spelled = self._spelling.known if self._output.is_between else _NONE

    @classmethod
    def pour(cls, taken: list[tuple[PlainChoice, int]]) -> None:
        """See `ShortWay`."""
        now = time.perf_counter()
        parts: list[tuple[PlainChoice, bytes]] = []
        last_at, count = taken[0][0].last_at, 0  # most came in the same step before this one, too
        gaps = taken[0][0]._gaps
        for way, token_id in taken:
            text = way.spelled.get(token_id)
            if text is None:
                text = way._spell(token_id)
            else:
                way.told.append(token_id)
            if way.last_at != last_at:
                gaps.observe(now - last_at, count)
                last_at, count = way.last_at, 0
            count += 1
            way.last_at = now
            if text:
                way.written_at = now
                parts.append((way, b"".join((_size(way.size + len(text)), way.head, text, way.tail))))
        gaps.observe(now - last_at, count)
        for way, part in parts:
            try:
                way.write(part)
            except Exception as error:
                way._fail(error)

    def pour_run(self, token_ids: list[int]) -> None:
        """See `ShortWay`."""
        now, count = time.perf_counter(), len(token_ids)
        try:
            text = self._output.push_tokens(token_ids)
            self._gaps.observe((now - self.last_at) / count, count)
            self.last_at = now
            if text:
                self.written_at = now
                data = self._spelling.spell(text)
                self.write(b"".join((_size(self.size + len(data)), self.head, data, self.tail)))
        except Exception as error:
            self._fail(error)
        self.look_ahead()

    def _spell(self, token_id: int) -> bytes:
        """Of a token whose text is not known."""
        try:
            if self._output.is_between:
                self._spelling.learn(token_id)
            text = self._output.push_tokens([token_id])
            self.look_ahead()
            return self._spelling.spell(text) if text else b""
        except Exception as error:
            self._fail(error)
            return b""


def _size(size: int) -> bytes:
    return _SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size
