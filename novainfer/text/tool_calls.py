"""Calls of tools that a model writes into its text: taken out of it as it comes, in the forms that models were taught.

A call is told once its name is known and its arguments have begun; until then its text is kept, and if it turns out to
be none, that is content as it is. What a call has when the answer ends is told. White space right before a call and
between calls is dropped, and so are brackets that close more than a call has opened.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Generator
from dataclasses import dataclass

from novainfer.text.call_object import MAX_NAME, CallDelta, CallSink, Reader, next_char, read_arguments, read_call
from novainfer.text.marks import Lead, partial_mark

_PYTHON_TAG = "<|python_tag|>"
_TAGS = ("[ARGS]", "[CALL_ID]")
_WORD = frozenset(string.ascii_letters + string.digits + "_.:-")
_KEYS = frozenset({"arguments", "parameters"})
_BETWEEN = " \t\r\n,;]"  # what stands between calls, and is nothing by itself


def _hermes(sink: CallSink) -> Reader:
    if (yield from next_char()) != "{":
        raise ValueError("no object")
    yield from read_call(sink, _KEYS)


def _llama3_json(sink: CallSink) -> Reader:
    """The whole answer: it never ends by itself."""
    char = yield from next_char()
    while True:
        if char == _PYTHON_TAG[0]:
            for expected in _PYTHON_TAG[1:]:
                if (yield) != expected:
                    raise ValueError("no mark")
            char = yield from next_char()
        if char != "{":
            raise ValueError("no object")
        yield from read_call(sink, _KEYS, needs_object=True)
        char = yield from next_char()
        while char in ",;":
            char = yield from next_char()


def _mistral(sink: CallSink) -> Reader:
    """A list of objects, or names and their arguments."""
    char = yield from next_char()
    if char in "[{":
        is_list = char == "["
        if is_list:
            char = yield from next_char()
        while True:
            if char != "{":
                raise ValueError("no object")
            yield from read_call(sink, _KEYS)
            if not is_list or (char := (yield from next_char())) == "]":
                return
            if char != ",":
                raise ValueError("no comma")
            char = yield from next_char()
    while True:
        name, char = yield from _word(char)
        while char == "[":
            tag = yield from _tag()
            char = yield from next_char()
            if tag == "[CALL_ID]":
                _, char = yield from _word(char)
        if char != "{":
            raise ValueError("no object")
        yield from read_arguments(sink, name)
        char = yield from next_char()


def _word(char: str) -> Generator[None, str, tuple[str, str]]:
    """It, and the character behind it and behind white space."""
    word = ""
    while char in _WORD:
        if len(word) == MAX_NAME:
            raise ValueError("no word")
        word += char
        char = yield
    if not word:
        raise ValueError("no word")
    return word, ((yield from next_char()) if char.isspace() else char)


def _tag() -> Generator[None, str, str]:
    """The rest of one behind its bracket."""
    tag = "["
    while tag not in _TAGS:
        tag += yield
        if not any(other.startswith(tag) for other in _TAGS):
            raise ValueError("no mark")
    return tag


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls. opens: what stands before some; "": they are the whole answer. closes: behind each.

    marks: all of these, which may be special tokens. read: of what stands behind the opening mark.
    """

    read: Callable[[CallSink], Reader]
    opens: str = ""
    closes: str = ""
    marks: tuple[str, ...] = ()


CALL_FORMS = {
    "hermes": CallForm(_hermes, "<tool_call>", "</tool_call>", ("<tool_call>", "</tool_call>")),
    "llama3_json": CallForm(_llama3_json, marks=(_PYTHON_TAG,)),
    "mistral": CallForm(_mistral, "[TOOL_CALLS]", marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}


def call_id(form: str, response_id: str, choice: int, index: int) -> str:
    """Of a call: the same whoever tells it. Mistral's templates want nine letters and digits."""
    digest = hashlib.sha256(f"{response_id}/{choice}/{index}".encode()).hexdigest()
    return digest[:9] if form == "mistral" else f"call_{digest[:24]}"


class CallSplitter:
    """Cuts a text into content and calls. leads: what follows content is content too."""

    def __init__(self, form: CallForm, *, leads: bool = False) -> None:
        self._form = form
        self._is_over_behind_content = leads or not form.opens
        self._sink = CallSink()
        self._space: list[str] = []  # white space that a call may follow
        self._kept = ""  # behind it: what may become the opening mark
        self._raw: list[str] = []  # of a call that is none yet
        self._reader: Reader | None = None
        self._close: Lead | None = None  # behind a call: while its closing mark may follow
        self._is_behind_call = False
        self._is_over = False
        if not form.opens:
            self._begin("")

    @property
    def count(self) -> int:
        """Calls that have begun."""
        return self._sink.count

    @property
    def is_cut(self) -> bool:
        """The last one lacks some of its arguments, and they may still come."""
        return self._sink.is_cut

    @property
    def is_over(self) -> bool:
        """All further text is content."""
        return self._is_over

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        """The content and the calls that are now certain."""
        if self._is_plain(text):
            self._is_behind_call = False
            self._is_over = self._is_over_behind_content
            return text, []
        content: list[str] = []
        while text:
            if self._is_over:
                content.append(text)
                break
            if self._reader is not None:
                text = self._read(self._reader, text, content)
            elif self._close is not None:
                text = self._find_close(self._close, text)
            else:
                text = self._find_open(text, content)
        return "".join(content), self._sink.take()

    def flush(self) -> str:
        """The content that is left at the end."""
        if self._close is not None:
            return ""
        rest = "".join(self._raw) + "".join(self._space) + self._kept
        return "" if self._is_behind_call and not rest.strip(_BETWEEN) else rest

    def _is_plain(self, text: str) -> bool:
        """Nothing is kept, and nothing of this text will be."""
        is_free = self._reader is None and self._close is None and not (self._kept or self._space)
        return is_free and bool(text) and not text[-1].isspace() and self._form.opens[:1] not in text

    def _begin(self, raw: str) -> None:
        self._raw = [raw]
        self._reader = self._form.read(self._sink)
        next(self._reader)

    def _read(self, reader: Reader, text: str, content: list[str]) -> str:
        """Give the reader what it takes; returns the rest."""
        sink, raw = self._sink, self._raw
        for place, char in enumerate(text):
            was_open, count = sink.is_open, sink.count
            try:
                reader.send(char)
            except StopIteration:
                raw.clear()
                self._end_call()
                return text[place + 1 :]
            except ValueError:
                return self._give_up(content) + text[place:]
            if sink.count > count or was_open:
                raw.clear()
                self._is_behind_call = True
            else:
                raw.append(char)
        return ""

    def _end_call(self) -> None:
        """Nothing more is read behind a call that was told; white space is left of what was."""
        self._space += self._raw
        self._raw = []
        self._reader = None
        self._sink.end()
        self._is_behind_call = True
        self._close = Lead(self._form.closes, dropped="}]")

    def _give_up(self, content: list[str]) -> str:
        """This is no call, or nothing that belongs to one any more; returns what may be the beginning of a mark."""
        raw = "".join(self._raw)
        if self._sink.is_open or (self._is_behind_call and not raw.strip()):
            self._end_call()
            return ""
        self._reader, self._raw = None, []
        keep = 0 if self._is_over_behind_content else partial_mark(raw, self._form.opens)
        self._tell(raw[: len(raw) - keep], content)
        if self._is_over_behind_content:
            self._is_over = True
            content.append(self._take_space())
        return raw[len(raw) - keep :]

    def _find_close(self, lead: Lead, text: str) -> str:
        found = lead.feed(text)
        if found is None:
            return ""
        is_closed, text = found
        space, self._close = self._take_space() + lead.flush(), None
        if self._form.closes and is_closed:
            return text
        if self._form.closes and text[0] == "{":
            self._begin(space)
            return text
        if not self._form.opens:
            self._is_over = True
            return space + text
        self._space.append(space)
        return text

    def _find_open(self, text: str, content: list[str]) -> str:
        mark = self._form.opens
        text, self._kept = self._kept + text, ""
        start = text.find(mark)
        cut = len(text) - partial_mark(text, mark) if start < 0 else start
        if self._is_over_behind_content and text[:cut].strip():
            self._is_over, self._is_behind_call = True, False
            return self._take_space() + text
        self._tell(text[:cut], content)
        if start < 0:
            self._kept = text[cut:]
            return ""
        self._begin(self._take_space() + mark)
        return text[start + len(mark) :]

    def _take_space(self) -> str:
        space, self._space = "".join(self._space), []
        return space

    def _tell(self, text: str, content: list[str]) -> None:
        stripped = text.rstrip()
        if stripped:
            content += [*self._space, stripped]
            self._space = []
            self._is_behind_call = False
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])
