"""Stop strings: what is shown never depends on how the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.sampling.stop import StopMatcher

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The stop string that is complete first; of several that end together the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(text=st.text("abcd", max_size=30), stop=_STOPS, data=st.data())
def test_given_any_cut_when_fed_then_text_and_match_equal_the_reference(
    text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    matcher, shown, rest = StopMatcher(stop), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.feed(rest[:size])
        rest = rest[size:]
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == reference(text, stop)


@settings(deadline=None)
@given(text=st.text("abcd", max_size=30), stop=_STOPS)
def test_given_no_match_yet_when_fed_then_only_a_possible_beginning_is_held(text: str, stop: tuple[str, ...]) -> None:
    matcher = StopMatcher(stop)
    shown = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stop)
        longer = [text[i:] for i in range(len(shown)) if any(s.startswith(text[i:]) for s in stop)]
        assert longer == []


def test_given_include_when_matched_then_the_stop_string_is_shown_and_nothing_after() -> None:
    matcher = StopMatcher(("END",), include_stop_str_in_output=True)
    assert matcher.feed("one E") == "one "
    assert matcher.feed("ND two") == "END"
    assert matcher.feed("three") == ""
    assert matcher.flush() == ""


def test_given_many_equal_letters_when_fed_singly_then_steps_grow_linearly() -> None:
    stop = ("a" * 1000 + "b",)
    matcher = StopMatcher(stop)
    shown = [matcher.feed("a") for _ in range(5000)]
    assert sum(map(len, shown)) == 4000
    assert matcher.flush() == "a" * 1000
