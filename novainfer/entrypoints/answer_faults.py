"""Where a saved answer says something else than its receipts and the tokens that were computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from novainfer.entrypoints.answer_ways import Way
from novainfer.entrypoints.saved_answer import SaidChoice, SavedAnswer
from novainfer.receipt import ChoiceReceipt
from novainfer.text.tokenizer import Tokenizer

EXCERPT = 24  # characters


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One choice as it was computed again; `text` is what a server says of these tokens, without an echo.

    ways: others in which a server may tell them, in a chat.
    """

    receipt: ChoiceReceipt
    text: str
    token_ids: list[int]
    stop_reason: str | int | None
    ways: tuple[Way, ...] = ()


class Echo:
    """The prompt as an answer may repeat it: the text that the client sent, of which the receipt has the tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Iterable[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self._tokenizer = tokenizer
        self._known: str | None = None  # choices of one prompt repeat the same

    @property
    def decoded(self) -> str:
        """What a prompt that was sent as token ids is echoed as."""
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def is_told_by(self, text: str) -> bool:
        """Whether the prompt can have been echoed so: the text of its tokens, or one that has these tokens."""
        if text == self._known:
            return True
        is_right = text == self.decoded or self._is_encoded_from(text)
        if is_right:
            self._known = text
        return is_right

    def _is_encoded_from(self, text: str) -> bool:
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no prompt can have
            return False
        return any(self._tokenizer.encode(text, add_special_tokens=flag) == self.token_ids for flag in (True, False))


def choice_faults(answer: SavedAnswer, index: int, found: Recomputed, echo: Echo) -> tuple[list[str], str]:
    """What is wrong with what the answer says of this choice; and a note if the file holds only the end of it.

    `found` must be as the receipt says.
    """
    said = answer.choices.get(index)
    if said is None:
        if not answer.may_be_rest:
            return ["the answer has no such choice"], ""
        said = SaidChoice()  # all of it was told before this stream was taken up
    # Other readers may have had the beginning, to the last finish reason.
    may_be_rest = answer.may_be_rest and not said.has_begun
    faults = [f"the answer has '{name}', which this server never writes" for name in sorted(set(said.strays))]
    way, wrong = _way_of(answer, index, found, echo, may_be_rest=may_be_rest)
    faults += wrong
    if said.finish_reasons != [way.finish_reason] and not (may_be_rest and not said.finish_reasons):
        reason = found.receipt.finish_reason
        as_told = "" if reason == way.finish_reason else f", told as '{way.finish_reason}' behind a call"
        faults.append(f"the answer's finish reason is {_shown(said.finish_reasons)}, the receipt's '{reason}'{as_told}")
    if any(stop != found.stop_reason for stop in said.stop_reasons):
        shown = _shown([found.stop_reason])
        faults.append(f"the answer's stop reason is {_shown(said.stop_reasons)}, computed again: {shown}")
    if said.token_ids is not None and not _are_told(said.token_ids, found.token_ids, may_be_rest=may_be_rest):
        faults.append("the answer's token_ids are not those that were computed again")
    if said.prompt_token_ids is not None and said.prompt_token_ids != echo.token_ids:
        faults.append("the answer's prompt_token_ids are not those of the receipt")
    is_rest = said.size < way.size or not said.finish_reasons
    return faults, f"; the file holds only its end, {said.size} characters" if is_rest else ""


def _way_of(
    answer: SavedAnswer, index: int, found: Recomputed, echo: Echo, *, may_be_rest: bool
) -> tuple[Way, list[str]]:
    """In which way the answer tells this choice, the plain one if in none; and what is wrong with what it tells."""
    said = answer.choices.get(index, SaidChoice())
    plain = Way(found.text, found.receipt.finish_reason)
    told = [way for way in (plain, *found.ways) if way.is_told_by(said, may_be_rest=may_be_rest)]
    likely = [way for way in told if said.finish_reasons == [way.finish_reason]] or told
    if likely:
        way = likely[0]
        is_named = not isinstance(answer.id, str) or way.has_ids_of(said, answer.id, index)
        return way, [] if is_named else ["the ids of the answer's calls are not those that its own id gives"]
    names = [name for name, some in (("reasoning_content", said.reasoning), ("tool_calls", said.calls)) if some]
    if names:
        return plain, [f"the answer has {' and '.join(names)}, which no parser of this model makes of these tokens"]
    return plain, _text_faults(said.text, found.text, None if answer.is_chat else echo)


def answer_faults(answer: SavedAnswer) -> list[str]:
    """What is wrong with what the answer says of all its choices together."""
    faults = []
    given = [receipt for receipt in answer.receipts if receipt is not None]
    if answer.model is not None and answer.model != given[0].model:
        faults.append(f"its model is {_shown([answer.model])}, the receipt's {_shown([given[0].model])}")
    if answer.prompt_token_ids is not None and answer.prompt_token_ids != list(given[0].prompt_token_ids):
        faults.append("its prompt_token_ids are not those of the receipt")
    beyond = sorted(set(answer.choices) - set(range(len(answer.receipts) * given[0].params.n)))
    if beyond:
        faults.append(f"no receipt speaks of its choice {beyond[0]}")
    if answer.usage is not None and len(given) == len(answer.receipts):  # else some counts are not known
        prompt = sum(len(receipt.prompt_token_ids) for receipt in given)
        completion = sum(choice.num_tokens for receipt in given for choice in receipt.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        for name, count in counts.items():
            if answer.usage.get(name, count) != count:
                faults.append(f"its usage.{name} is {_shown([answer.usage[name]])}, by the receipts {count}")
    return faults


def _are_told(said: list[Any], found: list[int], *, may_be_rest: bool) -> bool:
    return said == found or (may_be_rest and said == found[max(len(found) - len(said), 0) :])


def _text_faults(said: str, found: str, echo: Echo | None) -> list[str]:
    if said == found:
        return []
    expected = [found]
    if echo is not None:
        if said.endswith(found) and echo.is_told_by(said[: len(said) - len(found)]):
            return []
        expected.append(echo.decoded + found)
    place, right = max((_first_difference(said, text), text) for text in expected)
    return [
        f"the answer's text is not that of these tokens: from character {place} on it says {_excerpt(said, place)}, "
        f"computed again: {_excerpt(right, place)} (was it changed, or did the server have a --tokenizer of its own?)"
    ]


def _first_difference(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _excerpt(text: str, place: int) -> str:
    """What stands there, in ASCII: control characters and letters that look alike are told apart."""
    more = "..." if len(text) > place + EXCERPT else ""
    return ascii(text[place : place + EXCERPT]) + more


def _shown(values: list[Any]) -> str:
    """What was told, perhaps nothing or several things, bounded and in ASCII."""
    return ", ".join(ascii(value)[:64] for value in values[:4]) or "missing"
