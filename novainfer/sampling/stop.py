"""Stop strings in a stream of text: found the moment they are complete, held back while they might begin.

One Aho-Corasick automaton (Aho and Corasick, 1975) over all stop strings: constant time a character, whatever the
strings are, and the same result however the text is cut into deltas.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _State:
    depth: int  # length of the longest stop string prefix that the text now ends with
    next: dict[str, _State] = field(default_factory=dict)
    fail: _State | None = None  # the state of the next shorter such prefix
    match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Watches one choice's text. The stop string that is complete first wins, of two that end together the longer."""

    def __init__(self, stop: tuple[str, ...], *, include_stop_str_in_output: bool = False) -> None:
        self._root = _build(stop)
        self._state = self._root
        self._held = ""
        self._include = include_stop_str_in_output
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown now. After a match (`matched` is set) nothing more is ever shown."""
        if self.matched is not None or not text:
            return ""
        state, root = self._state, self._root
        for position, char in enumerate(text):
            while char not in state.next and state.fail is not None:
                state = state.fail
            state = state.next.get(char, root)
            if state.match is not None:
                return self._end(self._held + text[: position + 1], state.match)
        self._state = state
        whole = self._held + text
        shown = len(whole) - state.depth
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _end(self, text: str, match: str) -> str:
        self.matched, self._held = match, ""
        return text if self._include else text[: -len(match)]


@lru_cache(maxsize=16)
def _build(stop: tuple[str, ...]) -> _State:
    """The automaton; nothing changes it afterwards, so the choices of a request share one."""
    root = _State(0)
    for text in stop:
        state = root
        for char in text:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = text
    queue = deque(root.next.values())
    for state in queue:
        state.fail = root
    while queue:
        state = queue.popleft()
        for char, child in state.next.items():
            fail = state.fail
            while fail is not None and char not in fail.next:
                fail = fail.fail
            child.fail = root if fail is None else fail.next[char]
            child.match = child.match or child.fail.match
            queue.append(child)
    return root
