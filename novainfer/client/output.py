"""One choice as its reader sees it: token ids become text deltas, stop strings end it, log-probabilities get words.

Pure and synchronous; the gateway and the offline `LLM` both use it. Fed the same tokens it gives the same text,
however they are cut into messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from novainfer.protocol.messages import FINISH_STOP, Logprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.sampling.stop import StopMatcher
from novainfer.text.call_object import CallDelta
from novainfer.text.detokenizer import Detokenizer
from novainfer.text.parts import Parts, PartsParser, Telling
from novainfer.text.tokenizer import Tokenizer

FINISH_TOOL_CALLS = "tool_calls"  # told in place of a stop behind calls that are whole
_NO_STOP = StopMatcher(())  # is fed nothing


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token by itself. `data` may be part of a character, which `text` then shows as a replacement character."""

    token_id: int
    text: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token of the output (or the prompt), with the alternatives at its place."""

    token: TokenText
    logprob: float
    rank: int
    text_offset: int  # characters of the choice's text that were finished before this token
    top: list[tuple[TokenText, float]] = field(default_factory=list)


@dataclass(slots=True)
class ChoiceDelta:
    """What one `ChoiceOutput.push` adds. `stop_reason`: the stop string, or the stop id that is no end of text.

    text: without the reasoning and the calls that a parser takes out of it. call_places: for each of `calls`, how many
    characters of the text came before it. num_ended: calls of the choice all of whose arguments have come; 0: nothing
    is new.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    call_places: list[int] = field(default_factory=list)
    num_ended: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class _Told:
    """What tokens that came together add, in pieces: joined once, as there may be many."""

    contents: list[str]
    thoughts: list[str]
    calls: list[CallDelta]
    places: list[int] = field(default_factory=list)  # for each of these: how many contents came before it

    def add(self, parts: Parts) -> None:
        """The next ones. What goes on with a call comes before the content beside it, what begins one behind that."""
        if parts.calls:
            is_begun = False
            for call in parts.calls:
                is_begun = is_begun or call.name is not None
                self.places.append(len(self.contents) + is_begun)
            self.calls += parts.calls
        self.contents.append(parts.content)
        self.thoughts.append(parts.reasoning)

    def call_places(self) -> list[int]:
        """See `ChoiceDelta`."""
        if not self.places:
            return []
        ends = list(accumulate(map(len, self.contents), initial=0))
        return [ends[place] for place in self.places]


class ChoiceOutput:
    """Text, counts and end of one choice.

    After `push` returned a `finish_reason` that the engine did not send (`ended_here`), the caller must cancel the
    choice at the engine; later tokens of it are ignored. after_prompt: see `Detokenizer`. text_offset: characters
    that stand before the output where offsets are counted from (an echoed prompt). telling: what parsers take out of
    the text; stop strings and offsets are those of all of it. num_reasoning_tokens: that came while a thought was open.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        choice: int = 0,
        *,
        after_prompt: bool = False,
        text_offset: int = 0,
        telling: Telling | None = None,
    ) -> None:
        self.choice = choice
        self.token_ids: list[int] = []  # sampled ids seen, including the one that ended the choice
        self.finish_reason: str | None = None
        self.ended_here = False
        self.num_reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._parser = None if telling is None or telling.is_plain else PartsParser(telling)
        self._marks: dict[int, str] = {}  # special tokens that are no text, but for the parser
        if telling is not None and self._parser is not None and params.skip_special_tokens:
            self._marks = tokenizer.special_ids_of(telling.marks)
        self._untold: deque[tuple[int, str]] = deque()  # of these: those behind text that is held back, and its length
        self._num_told = text_offset  # characters, of the text that the parser got
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, after_prompt=after_prompt
        )
        self._stop = _NO_STOP
        if params.stop:
            self._stop = StopMatcher(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._text_length = text_offset

    @property
    def num_tokens(self) -> int:
        """Sampled ids seen."""
        return len(self.token_ids)

    @property
    def is_plain(self) -> bool:
        """Its text depends on its tokens alone: `push_tokens` may be used."""
        return not self._params.stop and (self._parser is None or self._parser.is_over)

    @property
    def is_between(self) -> bool:
        """See `Detokenizer`."""
        return self._detokenizer.is_between

    def push_tokens(self, token_ids: list[int]) -> str:
        """`push` of tokens without log-probabilities, none of which is the last one: their text.

        While `is_between`, one whose text is known may be added to `token_ids` instead: then no log-probabilities can
        be described later, as their offsets are not counted.
        """
        self.token_ids += token_ids
        text = self._detokenizer.feed(token_ids)
        self._text_length += len(text)
        self._num_told = self._text_length
        return text

    def push(self, output: TokenOutput) -> ChoiceDelta:
        """Take the next tokens of this choice."""
        delta = ChoiceDelta(self.choice)
        if self.finish_reason is not None:
            return delta
        if self.is_plain and not output.logprobs and output.finish_reason is None:
            delta.token_ids, delta.text = output.token_ids, self.push_tokens(output.token_ids)
            return delta
        told = _Told([], [], delta.calls)
        self._push(output, delta, told)
        delta.text, delta.reasoning = "".join(told.contents), "".join(told.thoughts)
        delta.call_places = told.call_places()
        if self._parser is not None:
            delta.num_ended = self._parser.num_ended
        return delta

    def _push(self, output: TokenOutput, delta: ChoiceDelta, told: _Told) -> None:
        bare = len(output.token_ids) - len(output.logprobs)
        for position, token_id in enumerate(output.token_ids):
            if position >= bare:
                delta.logprobs.append(self._logprob(output.logprobs[position - bare]))
            delta.token_ids.append(token_id)
            last = position == len(output.token_ids) - 1
            self._tell(told, self._take(token_id, hidden=last and self._is_hidden_stop(output, token_id)))
            if self._stop.matched is not None:
                self.ended_here = True
                self._end(delta, told, FINISH_STOP, self._stop.matched)
                return
        if output.finish_reason is None:
            return
        rest = self._detokenizer.flush()
        if rest or self._params.stop:
            self._tell(told, self._match(rest) + self._stop.flush())
        delta.error = output.error
        if self._stop.matched is not None:  # the flush itself completed a stop string
            self._end(delta, told, FINISH_STOP, self._stop.matched)
            return
        stop_id = output.stop_token_id
        self._end(delta, told, output.finish_reason, stop_id if stop_id in self._params.stop_token_ids else None)

    def _end(self, delta: ChoiceDelta, told: _Told, reason: str, stop_reason: str | int | None) -> None:
        self.finish_reason = delta.finish_reason = reason
        if self._parser is not None:
            told.add(self._parser.flush())
            if reason == FINISH_STOP and self._parser.ends_in_calls:
                delta.finish_reason = FINISH_TOOL_CALLS
        delta.stop_reason = stop_reason

    def _is_hidden_stop(self, output: TokenOutput, token_id: int) -> bool:
        """The stop token itself is no text, unless asked for."""
        return (
            output.finish_reason == FINISH_STOP
            and output.stop_token_id == token_id
            and not self._params.include_stop_str_in_output
        )

    def _take(self, token_id: int, *, hidden: bool) -> str:
        self.token_ids.append(token_id)
        if self._parser is not None and self._parser.is_inside:
            self.num_reasoning_tokens += 1
        if token_id in self._marks and not hidden:
            self._untold.append((self._text_length, self._marks[token_id]))
        return "" if hidden else self._match(self._detokenizer.feed_token(token_id))

    def _tell(self, told: _Told, text: str) -> None:
        if self._parser is None:
            told.contents.append(text)
            return
        start, end = 0, self._num_told + len(text)
        while self._untold and self._untold[0][0] <= end:
            place, mark = self._untold.popleft()
            if place > self._num_told:
                count = place - self._num_told
                told.add(self._parser.feed(text[start : start + count]))
                start, self._num_told = start + count, place
            if self._parser.looks_for(mark):
                told.add(self._parser.feed(mark))
        self._num_told = end
        told.add(self._parser.feed(text[start:]))

    def _match(self, text: str) -> str:
        """Text to show. Stop strings count only in text that begins after `min_tokens` tokens."""
        self._text_length += len(text)
        if not self._params.stop or self.num_tokens <= self._params.min_tokens:
            return text
        return self._stop.feed(text)

    def _logprob(self, entry: Logprobs) -> TokenLogprob:
        return describe_logprobs(self._tokenizer, entry, self._text_length)


def describe_token(tokenizer: Tokenizer, token_id: int) -> TokenText:
    """A token's own bytes and text."""
    data = tokenizer.token_bytes(token_id)
    return TokenText(token_id, data.decode("utf-8", "replace"), data)


def describe_logprobs(tokenizer: Tokenizer, entry: Logprobs, text_offset: int) -> TokenLogprob:
    """The wire's numbers with the tokens' words."""
    top = [
        (describe_token(tokenizer, token_id), logprob)
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]
    token = describe_token(tokenizer, entry.token_id)
    return TokenLogprob(token, entry.logprob, entry.rank, text_offset, top)


def describe_prompt(
    tokenizer: Tokenizer, prompt_token_ids: list[int], entries: list[Logprobs]
) -> list[TokenLogprob | None]:
    """Prompt log-probabilities, one per token; the first token has none. `entries`: those of tokens 1, 2, ...

    A prompt that was not computed to its end, because its request was cancelled, has None for the tokens at its end.
    """
    places = zip(entries, prompt_places(tokenizer, prompt_token_ids)[1:], strict=False)
    described = [describe_logprobs(tokenizer, entry, offset) for entry, (_, offset) in places]
    return [None, *described, *[None] * (len(prompt_token_ids) - 1 - len(described))]


def prompt_places(tokenizer: Tokenizer, prompt_token_ids: list[int]) -> list[tuple[TokenText, int]]:
    """Each token of a prompt, and how many characters of the prompt's text were finished before it."""
    detokenizer = Detokenizer(tokenizer)
    places, offset = [], 0
    for token_id in prompt_token_ids:
        places.append((describe_token(tokenizer, token_id), offset))
        offset += len(detokenizer.feed((token_id,)))
    return places
