"""What a chat's text is told as: content, reasoning and calls. Which parsers cut it, and the one that joins them.

Fed the same text it gives the same parts, however that is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from novainfer.text.call_object import CallDelta
from novainfer.text.reasoning import CLOSE, OPEN, ThoughtSplitter
from novainfer.text.tool_calls import CALL_FORMS, CallSplitter

AUTO, NONE, THINK = "auto", "none", "think"
TOOL_CALL_PARSERS = (AUTO, NONE, *CALL_FORMS)
REASONING_PARSERS = (AUTO, NONE, THINK)
ALLOWED, BEGUN, BARRED = "allowed", "begun", "barred"  # whether an answer may think before it says what it has to
TOLD, DROPPED, KEPT = "told", "dropped", "kept"  # what becomes of reasoning; kept: in the content, as it is


class Parsers(NamedTuple):
    """Those of a model, by name."""

    calls: str = NONE
    reasoning: str = NONE


class Telling(NamedTuple):
    """How one answer is told.

    thoughts: what becomes of reasoning. is_parallel: more than the first call is told. is_inside: the prompt ends
    inside a thought. calls_lead: calls are all that an answer says, or it has none.
    """

    calls: str = NONE
    reasoning: str = NONE
    thoughts: str = TOLD
    is_parallel: bool = True
    is_inside: bool = False
    calls_lead: bool = False

    @property
    def is_plain(self) -> bool:
        """All of the text is content."""
        return self.calls == NONE and (self.reasoning == NONE or self.thoughts == KEPT)

    @property
    def marks(self) -> tuple[str, ...]:
        """What its parsers look for, which may be special tokens."""
        calls = CALL_FORMS[self.calls].marks if self.calls != NONE else ()
        return (*calls, OPEN, CLOSE) if self.reasoning != NONE else calls


@dataclass(slots=True)
class Parts:
    """What a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class PartsParser:
    """Cuts the text of one choice. `num_calls`: told so far."""

    def __init__(self, telling: Telling) -> None:
        self.num_calls = 0
        self._telling = telling
        self._thought: ThoughtSplitter | None = None
        self._calls: CallSplitter | None = None
        if telling.reasoning != NONE:
            self._thought = ThoughtSplitter(is_inside=telling.is_inside, verbatim=telling.thoughts == KEPT)
        if telling.calls != NONE:
            self._calls = CallSplitter(CALL_FORMS[telling.calls], leads=telling.calls_lead)

    @property
    def is_inside(self) -> bool:
        """What comes next is reasoning, and not kept in the content."""
        return self._thought is not None and self._thought.is_inside and self._telling.thoughts != KEPT

    @property
    def ends_in_calls(self) -> bool:
        """Calls were told, and all of their arguments have come."""
        if self._calls is None or not self.num_calls:
            return False
        return not self._calls.is_cut or not (self._telling.is_parallel or self._calls.count == 1)

    @property
    def num_ended(self) -> int:
        """Calls all of whose arguments have come."""
        return 0 if self._calls is None else self._calls.count - self._calls.is_cut

    @property
    def is_over(self) -> bool:
        """All further text is content."""
        return (self._thought is None or self._thought.is_over) and (self._calls is None or self._calls.is_over)

    def looks_for(self, mark: str) -> bool:
        """Whether it would mean something now."""
        if mark in (OPEN, CLOSE):
            return self._thought is not None and self._thought.looks_for(mark)
        return self._calls is not None and not self._calls.is_over

    def feed(self, text: str) -> Parts:
        """What is now certain."""
        reasoning, rest = ("", text) if self._thought is None else self._thought.feed(text)
        content, calls = (rest, []) if self._calls is None else self._calls.feed(rest)
        return self._parts(reasoning, content, calls)

    def flush(self) -> Parts:
        """What is left at the end."""
        reasoning, rest = ("", "") if self._thought is None else self._thought.flush()
        if self._calls is None:
            return self._parts(reasoning, rest, [])
        content, calls = self._calls.feed(rest)
        return self._parts(reasoning, content + self._calls.flush(), calls)

    def _parts(self, reasoning: str, content: str, calls: list[CallDelta]) -> Parts:
        if calls and not self._telling.is_parallel:
            calls = [call for call in calls if call.index == 0]
        if calls:
            self.num_calls = max(self.num_calls, calls[-1].index + 1)
        if self._telling.thoughts == KEPT:
            return Parts(reasoning + content, "", calls)
        return Parts(content, reasoning if self._telling.thoughts == TOLD else "", calls)


def choose_parsers(calls: str, reasoning: str, templates: Iterable[str], *, has_thoughts: bool) -> Parsers:
    """The names as given; in place of `auto`, what a model's chat templates show.

    has_thoughts: its tokenizer has a token for the end of a thought.
    """
    source = "\n".join(templates).replace("\\", "")
    if calls == AUTO:
        calls = _form_of(source)
    if reasoning == AUTO:
        reasoning = THINK if has_thoughts or CLOSE in source else NONE
    return Parsers(calls, reasoning)


def _form_of(source: str) -> str:
    """Of calls, as templates show them; others have calls between the same marks that are no JSON."""
    if "<tool_call>" in source:
        is_json = '"arguments"' in source and "<function=" not in source and "<arg_key>" not in source
        return "hermes" if is_json else NONE
    if "[TOOL_CALLS]" in source:
        return "mistral"
    instructs = '{"name": function name, "parameters":' in source
    return "llama3_json" if instructs or "<|python_tag|>" in source else NONE


def ends_behind(prompt_end: str) -> bool:
    """Whether a prompt with this end has ended a thought."""
    return prompt_end.rstrip().endswith(CLOSE)


def ends_inside(prompt_end: str) -> bool:
    """Whether a prompt with this end has begun a thought."""
    return prompt_end.rstrip().endswith(OPEN)
