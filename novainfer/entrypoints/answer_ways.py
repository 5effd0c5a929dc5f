"""The ways in which a server may tell a chat's tokens: a receipt does not say whether the request had tools."""

from __future__ import annotations

from dataclasses import dataclass

from novainfer.client.output import ChoiceOutput
from novainfer.entrypoints.saved_answer import SaidCall, SaidChoice
from novainfer.protocol.messages import FINISH_STOP, TokenOutput
from novainfer.receipt import Receipt
from novainfer.text.call_object import CallDelta, join_calls
from novainfer.text.model_parsers import begins_inside
from novainfer.text.parts import DROPPED, KEPT, NONE, TOLD, Parsers, Telling
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.tool_calls import call_id


@dataclass(frozen=True, slots=True)
class Way:
    """One of them. `form`: how its calls are written."""

    text: str
    finish_reason: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    form: str = NONE

    @property
    def size(self) -> int:
        """In characters."""
        return len(self.text) + len(self.reasoning) + sum(len(call.arguments) for call in self.calls)

    def is_told_by(self, said: SaidChoice, *, may_be_rest: bool) -> bool:
        """Whether a file says this; may_be_rest: or the end of it."""
        if may_be_rest:
            is_same = self.text.endswith(said.text) and self.reasoning.endswith(said.reasoning)
            return is_same and self._ends_with(list(said.calls.items()))
        calls = [(index, call.name, call.arguments) for index, call in said.calls.items()]
        told = [(call.index, call.name, call.arguments) for call in self.calls]
        return (said.text, said.reasoning, calls) == (self.text, self.reasoning, told)

    def _ends_with(self, said: list[tuple[int, SaidCall]]) -> bool:
        told = self.calls[len(self.calls) - len(said) :] if len(said) <= len(self.calls) else ()
        return len(told) == len(said) and all(
            (call.name is None and number == 0 and own.arguments.endswith(call.arguments) and index == own.index)
            or (index, call.name, call.arguments) == (own.index, own.name, own.arguments)
            for number, ((index, call), own) in enumerate(zip(said, told, strict=True))
        )

    def has_ids_of(self, said: SaidChoice, answer_id: str, choice: int) -> bool:
        """Whether the calls that a file tells the beginning of have the ids that a server gives them."""
        return all(
            call.id == (None if call.name is None else call_id(self.form, answer_id, choice, index))
            for index, call in said.calls.items()
        )


def ways_of(receipt: Receipt, token_ids: list[int], finish_reason: str, told: tuple[Tokenizer, Parsers]) -> list[Way]:
    """All of one choice but the plain one. `told`: by which tokenizer and parsers.

    Who looks for calls looks for thoughts too, where the model has any: a call within one is none.
    """
    tokenizer, parsers = told
    is_inside = begins_inside(parsers.reasoning, tokenizer, receipt.prompt_token_ids, is_continued=receipt.after_prompt)
    tellings = {
        Telling(calls, parsers.reasoning, thoughts, is_parallel, is_inside): None
        for calls in (NONE, parsers.calls)
        for thoughts in ((TOLD, DROPPED, KEPT) if parsers.reasoning != NONE else (TOLD,))
        for is_parallel in ((True, False) if calls != NONE else (True,))
    }
    output = _output(receipt, token_ids, finish_reason)
    return [_way(receipt, output, tokenizer, telling) for telling in tellings if not telling.is_plain]


def _output(receipt: Receipt, token_ids: list[int], finish_reason: str) -> TokenOutput:
    """As the engine gave them: a stop token is no text."""
    params = receipt.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else receipt.eos_token_ids)}
    is_stop = finish_reason == FINISH_STOP and bool(token_ids) and token_ids[-1] in stops
    return TokenOutput("", 0, 0, token_ids, finish_reason, stop_token_id=token_ids[-1] if is_stop else None)


def _way(receipt: Receipt, output: TokenOutput, tokenizer: Tokenizer, telling: Telling) -> Way:
    choice = ChoiceOutput(tokenizer, receipt.params, after_prompt=receipt.after_prompt, telling=telling)
    delta = choice.push(output)
    calls = tuple(join_calls(delta.calls))
    return Way(delta.text, delta.finish_reason or "", delta.reasoning, calls, telling.calls)
