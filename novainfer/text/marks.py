"""Looking for marks in a text that comes in pieces."""

from __future__ import annotations

import re

_SPACE = re.compile(r"\s*")


def partial_mark(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of a `mark` that is not whole yet."""
    start = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while start >= 0:
        if mark.startswith(text[start:]):
            return len(text) - start
        start = text.find(mark[0], start + 1)
    return 0


class Lead:
    """White space and then a mark, or something else: text is kept until that is known.

    An empty mark is there as soon as something else than white space is. dropped: characters that may stand among the
    white space, and are not kept.
    """

    __slots__ = ("_dropped", "_kept", "_mark", "_skipped", "_space")

    def __init__(self, mark: str, *, dropped: str = "") -> None:
        self._mark = mark
        self._dropped = dict.fromkeys(map(ord, dropped))
        self._skipped = re.compile(rf"[\s{re.escape(dropped)}]*") if dropped else _SPACE
        self._space: list[str] = []
        self._kept = ""

    @property
    def is_partial(self) -> bool:
        """What may become the mark has begun."""
        return bool(self._kept)

    def feed(self, text: str) -> tuple[bool, str] | None:
        """Whether the mark is there, and the text behind it or else the white space; None while that is open."""
        kept, self._kept = self._kept, ""
        if not kept:
            match = self._skipped.match(text)
            end = 0 if match is None else match.end()
            self._space.append(text[:end].translate(self._dropped))
            text = text[end:]
        text = kept + text
        if text and text.startswith(self._mark):
            return True, text[len(self._mark) :]
        if self._mark.startswith(text):
            self._kept = text
            return None
        return False, text

    def flush(self) -> str:
        """What is kept: once it is known whether the mark is there, the white space."""
        kept, self._kept = self._kept, ""
        space = "".join(self._space)
        self._space.clear()
        return space + kept
