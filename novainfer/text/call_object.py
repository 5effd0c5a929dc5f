"""The JSON objects in which models write calls, read character by character: arguments are told while they come.

Each reader is a coroutine that is sent the characters. It returns with the last one that is its own, and raises
`ValueError` at the first one with which this is no call. Nothing is recursive: depth is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

Reader = Generator[None, str, None]
_Value = Generator[None, str, str]

MAX_NAME = 256  # characters
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")
_HIGH, _LOW, _BEYOND = 0xD800, 0xDC00, 0xE000  # where the halves of surrogate pairs begin, and end
_SCALAR = frozenset("0123456789+-.") | frozenset("abcdefghijklmnopqrstuvwxyzE")
_LOST = "\ufffd"
_BESIDE = frozenset({"name", "id", "type"})  # keys of a call that has no arguments


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a call. `name` comes with the first one, whole.

    arguments: as the model wrote them, JSON or not; where it wrote them as a string, the text of that, from its first
    brace on.
    """

    index: int
    name: str | None
    arguments: str


def join_calls(deltas: list[CallDelta]) -> list[CallDelta]:
    """One for each call, in order."""
    names: dict[int, str | None] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names.setdefault(delta.index, delta.name)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [CallDelta(index, name, "".join(arguments[index])) for index, name in sorted(names.items())]


class CallSink:
    """Where readers put what they have read. `arguments`: of the call that is open, appended to.

    is_open: its object has not ended. is_cut: its arguments have not.
    """

    __slots__ = ("_pending", "arguments", "count", "is_cut", "is_open")

    def __init__(self) -> None:
        self.count = 0
        self.is_open = False
        self.is_cut = False
        self.arguments: list[str] = []
        self._pending: list[tuple[int, str | None, list[str]]] = []

    def begin(self, name: str) -> None:
        """From now on it is certain that this is a call."""
        self.arguments = []
        self._pending.append((self.count, name, self.arguments))
        self.count += 1
        self.is_open = self.is_cut = True

    def end(self) -> None:
        """Nothing more of the call comes."""
        self.is_open = self.is_cut = False

    def take(self) -> list[CallDelta]:
        """What has come since it was last asked."""
        if not self._pending:
            return []
        found = [CallDelta(index, name, "".join(parts)) for index, name, parts in self._pending]
        self._pending.clear()
        if self.is_open:
            self.arguments = []
            self._pending.append((self.count - 1, None, self.arguments))
        return [delta for delta in found if delta.name is not None or delta.arguments]


class _Call:
    """One that is being read: it begins in the sink once its name is known and its arguments have begun."""

    __slots__ = ("_early", "has_arguments", "name", "sink")

    def __init__(self, sink: CallSink) -> None:
        self.sink = sink
        self.name: str | None = None
        self.has_arguments = False
        self._early: list[str] = []  # arguments that came before the name

    def take_name(self, name: str) -> None:
        """All of it."""
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError("no name")
        self.name = name
        if self.has_arguments:
            self.sink.begin(name)
            self.sink.arguments.extend(self._early)
            self.sink.is_cut = False

    def put(self, char: str) -> None:
        """The next character of its arguments."""
        if not self.has_arguments:
            if char.isspace():
                return
            if char != "{":
                raise ValueError("arguments that are no object")
            self.has_arguments = True
            if self.name is not None:
                self.sink.begin(self.name)
        (self._early if self.name is None else self.sink.arguments).append(char)


def read_call(sink: CallSink, keys: frozenset[str], *, needs_object: bool = False) -> Reader:
    """The rest of an object behind its brace. `keys`: names that its arguments may have.

    It is a call once it has a name and its arguments have begun. Without arguments, where they are null or an empty
    string, or with nothing that could be meant for them, they are {}; needs_object: then it is none, nor if they are a
    string.
    """
    call, is_odd = _Call(sink), needs_object
    char = yield from next_char()
    while char != "}":
        key = yield from _text(char)
        if (yield from next_char()) != ":":
            raise ValueError("no colon")
        char = yield from next_char()
        if key == "name" and call.name is None:
            call.take_name((yield from _text(char)))
            char = yield from next_char()
        elif key in keys and not call.has_arguments:
            if needs_object and char != "{":
                raise ValueError("arguments that are no object")
            char = yield from _arguments(char, call)
        else:
            is_odd = is_odd or key not in _BESIDE
            char = yield from _skip(char)
        if char == ",":
            char = yield from next_char()
        elif char != "}":
            raise ValueError("no comma")
    if call.name is None or (is_odd and not call.has_arguments):
        raise ValueError("no name, or no arguments")
    if not call.has_arguments:
        sink.begin(call.name)
        sink.arguments.append("{}")
    sink.end()


def read_arguments(sink: CallSink, name: str) -> Reader:
    """The rest of an object of arguments behind its brace."""
    call = _Call(sink)
    call.take_name(name)
    yield from _nested("{", call.put)
    sink.end()


def next_char() -> _Value:
    """The next character that is no white space."""
    while (char := (yield)).isspace():
        pass
    return char


def _arguments(char: str, call: _Call) -> _Value:
    """An object as it is, the text of a string, or null; returns the character behind it."""
    if char == "{":
        yield from _nested(char, call.put)
    elif char == '"':
        yield from _string(char, call.put)
    else:
        for expected in "null":
            if char != expected:
                raise ValueError("arguments that are no object")
            char = yield
        return (yield from next_char()) if char.isspace() else char
    call.sink.is_cut = False
    return (yield from next_char())


def _drop(char: str) -> None:
    """Of what is skipped."""


def _nested(char: str, put: Callable[[str], None]) -> Reader:
    """An object or a list to its end, put as it is. No JSON has a `<` but in strings: there a mark begins."""
    depth, quoted, escaped = 0, False, False
    while True:
        if quoted:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "<":
            raise ValueError("no JSON")
        put(char)
        if not depth:
            return
        char = yield


def _text(char: str) -> _Value:
    """The text of a string."""
    parts: list[str] = []
    yield from _string(char, parts.append)
    return "".join(parts)


def _string(char: str, put: Callable[[str], None]) -> Reader:
    """A string, its text put; half of a surrogate pair becomes a replacement character."""
    if char != '"':
        raise ValueError("no string")
    high = 0
    while (char := (yield)) != '"':
        code = -1
        if char == "\\":
            char = yield
            if char == "u":
                code = yield from _code()
            elif char in _ESCAPES:
                char = _ESCAPES[char]
            else:
                raise ValueError("no escape")
        if high and _LOW <= code < _BEYOND:
            code += 0x10000 + ((high - _HIGH) << 10) - _LOW
        elif high:
            put(_LOST)
        high = code if _HIGH <= code < _LOW else 0
        if not high:
            put(char if code < 0 else _LOST if _LOW <= code < _BEYOND else chr(code))
    if high:
        put(_LOST)


def _code() -> Generator[None, str, int]:
    digits = ""
    for _ in range(4):
        digits += yield
    if not _HEX.issuperset(digits):
        raise ValueError("no escape")
    return int(digits, 16)


def _skip(char: str) -> _Value:
    """Any value; returns the character behind it."""
    if char == '"':
        yield from _string(char, _drop)
    elif char in "{[":
        yield from _nested(char, _drop)
    else:
        while char in _SCALAR:
            char = yield
        return (yield from next_char()) if char.isspace() else char
    return (yield from next_char())
