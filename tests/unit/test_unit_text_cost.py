"""What the text of a stream costs: work that grows with its length, whatever it says. Steps are counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from novainfer.client import output as output_module
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.protocol.messages import TokenOutput
from novainfer.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from novainfer.sampling.stop import StopMatcher
from novainfer.text.detokenizer import Detokenizer
from novainfer.text.parts import Telling
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_thinker
from tests.unit.test_unit_detokenizer import tokenizer_of

pytestmark = pytest.mark.unit

SIZES = (1024, 2048, 4096, 8192)
MOST = 2.2  # times the steps for twice the text


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python `work` executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(counts: list[int]) -> None:
    assert counts[0] >= SIZES[0]
    assert all(more <= MOST * fewer for fewer, more in pairwise(counts)), counts


LONG = "a" * (MAX_STOP_LENGTH - 1)
STOPS = {
    "nearly complete again and again": ((LONG + "b",), LONG + "c"),
    "all suffixes of one another": (
        tuple("a" * (50 * i) + "b" for i in range(1, MAX_STOP_STRINGS + 1)),
        "a" * 799 + "c",
    ),
    "periodic": (("ab" * (MAX_STOP_LENGTH // 2 - 1) + "aa",), "ab"),
    "repeated letters": ((LONG + "b",), "a"),
}


@pytest.mark.parametrize(("stop", "pattern"), STOPS.values(), ids=STOPS.keys())
def test_given_text_made_against_stop_strings_when_it_comes_by_characters_then_work_and_memory_follow_its_length(
    stop: tuple[str, ...], pattern: str
) -> None:
    counts, held = [], 0
    for size in SIZES:
        matcher, text = StopMatcher(stop), (pattern * size)[:size]
        counts.append(lines_run(lambda matcher=matcher, text=text: [matcher.feed(char) for char in text]))
        assert matcher.matched is None
        held = max([held, *(len(value) for value in vars(matcher).values() if isinstance(value, (str, list)))])
    assert_linear(counts)
    assert held <= MAX_STOP_LENGTH  # who searched the whole text again would have to keep it


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("byte", ["\u00f0", "a"])
def test_given_bytes_that_make_no_character_when_they_come_one_by_one_then_each_is_looked_at_once(
    kind: str, byte: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(kind)
    name = byte if kind == "byte_level" else f"<0x{ord(byte):02X}>"
    token_id = tokenizer.token_id(name)
    assert token_id is not None
    looked_at: list[int] = []
    token = Tokenizer.token

    def count(self: Tokenizer, token_id: int) -> str | None:
        looked_at.append(1)
        return token(self, token_id)

    def decode(self: Tokenizer, token_ids: list[int], **options: bool) -> str:
        looked_at.append(len(token_ids))
        return ""

    monkeypatch.setattr(Tokenizer, "token", count)
    monkeypatch.setattr(Tokenizer, "decode", decode)
    counts = []
    for size in SIZES:
        looked_at.clear()
        detokenizer = Detokenizer(tokenizer)
        counts.append(lines_run(lambda d=detokenizer, n=size: [d.feed([token_id]) for _ in range(n)]))
        detokenizer.flush()
        assert sum(looked_at) <= size
    assert_linear(counts)


def test_given_a_choice_with_stop_strings_when_its_tokens_come_one_by_one_then_work_follows_their_number() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_id = tokenizer.token_id("a") or 0
    params = SamplingParams(stop=(LONG + "b",))
    counts = []
    for size in SIZES:
        output = ChoiceOutput(tokenizer, params)
        messages = [TokenOutput("r", 0, i, [token_id]) for i in range(size)]
        counts.append(lines_run(lambda o=output, m=messages: [o.push(message) for message in m]))
        assert output.num_tokens == size
    assert_linear(counts)


def test_given_special_marks_behind_text_that_is_held_back_when_it_is_released_then_work_follows_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0

    class Counting(ChoiceDelta):
        def __setattr__(self, name: str, value: Any) -> None:
            nonlocal moved
            moved += len(value) if name == "text" else 0
            super().__setattr__(name, value)

    class Shifting(list[Any]):
        def pop(self, place: Any = -1) -> Any:
            nonlocal moved
            moved += len(self) if place == 0 else 0
            return super().pop(place)

    monkeypatch.setattr(output_module, "ChoiceDelta", Counting)
    thinker = Tokenizer.load(write_thinker(tmp_path, are_special=True))
    mark = thinker.token_id("<tool_call>") or 0
    counts = []
    for size in SIZES:
        output = ChoiceOutput(thinker, SamplingParams(stop=("hz",)), telling=Telling("hermes"))
        if isinstance(output._untold, list):
            output._untold = Shifting()
        ids = [*thinker.encode("h"), *[mark] * size]
        assert output.push(TokenOutput("r", 0, 0, ids)).text == ""
        moved = 0
        last = TokenOutput("r", 0, len(ids), thinker.encode("a"), "length")
        lines = lines_run(lambda o=output, last=last: o.push(last))
        counts.append(lines + moved)
    assert_linear(counts)
