"""Reasoning that a model writes before its answer, between `<think>` and `</think>`: taken out of the text as it comes.

`<think>` counts at the beginning alone, behind white space at most; a prompt may have written it, and a model then
writes it once more or not. What is not closed is reasoning to the end. Line breaks at the beginning and the end of a
thought, and those behind `</think>`, are dropped.
"""

from __future__ import annotations

from enum import Enum

from novainfer.text.marks import Lead, partial_mark

OPEN, CLOSE = "<think>", "</think>"


class _Place(Enum):
    BEFORE = 0
    INSIDE = 1
    BEHIND = 2  # until something else than a line break comes
    OVER = 3


class ThoughtSplitter:
    """Cuts a text into reasoning and the rest.

    is_inside: the prompt has begun the thought. verbatim: reasoning keeps its marks and all line breaks.
    """

    def __init__(self, *, is_inside: bool, verbatim: bool) -> None:
        self._place = _Place.BEFORE
        self._is_opened = is_inside
        self._verbatim = verbatim
        self._lead = Lead(OPEN)
        self._breaks = 0  # line breaks that may be the last ones
        self._kept = ""  # behind those: what may become the closing mark
        self._has_begun = False  # something else than line breaks was told

    @property
    def is_inside(self) -> bool:
        """A thought has begun and has not ended."""
        return self._place is _Place.INSIDE or (self._is_opened and self._place is _Place.BEFORE)

    @property
    def is_over(self) -> bool:
        """All further text is none of its business."""
        return self._place is _Place.OVER

    def looks_for(self, mark: str) -> bool:
        """Whether it would mean something now, and not be text like any other."""
        if mark == CLOSE:
            return self.is_inside
        return self._place is _Place.BEFORE and not self._lead.is_partial

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the other text that are now certain."""
        if self._place is _Place.OVER or not text:
            return "", text
        before = ""
        if self._place is _Place.BEFORE:
            found = self._lead.feed(text)
            if found is None:
                return "", ""
            (is_there, text), space = found, self._lead.flush()
            if not (is_there or self._is_opened):
                self._place = _Place.OVER
                return "", space + text
            self._place = _Place.INSIDE
            if not is_there:
                text = space + text
            elif self._verbatim:
                before = space + OPEN
        if self._place is _Place.INSIDE:
            reasoning, rest = self._inside(text)
            return before + reasoning, rest
        return "", self._behind(text)

    def flush(self) -> tuple[str, str]:
        """The same, of what is left at the end."""
        if self._place is _Place.BEFORE:
            rest = self._lead.flush()
            return (self._told(rest), "") if self._is_opened else ("", rest)
        return (self._told(self._kept) if self._kept else "", "")

    def _inside(self, text: str) -> tuple[str, str]:
        text, self._kept = self._kept + text, ""
        end = text.find(CLOSE)
        if end < 0:
            keep = partial_mark(text, CLOSE)
            self._kept = text[len(text) - keep :]
            return self._told(text[: len(text) - keep]), ""
        reasoning, rest = self._told(text[:end]), text[end + len(CLOSE) :]
        if self._verbatim:
            self._place = _Place.OVER
            return reasoning + CLOSE, rest
        self._place = _Place.BEHIND
        return reasoning, self._behind(rest)

    def _told(self, text: str) -> str:
        """Of a thought's text, what is told: line breaks at its end wait for what follows."""
        if self._verbatim:
            return text
        if not self._has_begun:
            text = text.lstrip("\n")
        stripped = text.rstrip("\n")
        breaks = len(text) - len(stripped)
        if not stripped:
            self._breaks += breaks
            return ""
        told = "\n" * self._breaks + stripped
        self._breaks, self._has_begun = breaks, True
        return told

    def _behind(self, text: str) -> str:
        text = text.lstrip("\r\n")
        if text:
            self._place = _Place.OVER
        return text
