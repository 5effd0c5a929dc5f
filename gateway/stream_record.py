"""How a stream is written: kept by the scheduler (`AddRequest.answer`) for a gateway that may have to go on with it.

Every event of a stream has an id, the place that its reader has then come to: one number per choice, joined by `-`.
It is 0 before the choice has begun, else 1 + the tokens told, + 1 once the text that its end sets free was told, + 1
once the finish reason was. What follows an id depends on the tokens alone, so any gateway can go on from there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields

from gateway.errors import ApiError
from gateway.params import asks_for_prompt_alone
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.slices import to_json
from novainfer.errors import InvalidRequestError
from novainfer.protocol.codec import MAX_TEXT_BYTES
from novainfer.text.parts import NONE, Telling
from novainfer.text.tool_calls import call_id

_ID = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})*", re.ASCII)


@dataclass(slots=True)
class StreamRecord:
    """One stream. `created` in Unix seconds; `model` is the name that the client used.

    after_prompt: its text goes on from the prompt's, as of a completion, or a chat that continues its last message.
    prompt_alone: see `PromptState.is_alone`. telling: what is taken out of the text. is_bound: a chat that is told in
    another `Form`, whose events depend on all that was told: no other gateway can go on with it.
    tokens_as_ids: log-probabilities name tokens by their ids. explain: see `explained`.
    """

    is_chat: bool
    response_id: str
    created: int
    model: str
    include_usage: bool
    continuous_usage: bool
    event_ids: bool
    token_ids: bool
    logprobs: bool
    echo: bool
    receipt: bool
    after_prompt: bool
    prompt_alone: bool
    telling: Telling | None = None
    is_bound: bool = False
    tokens_as_ids: bool = False
    explain: bool = False

    @classmethod
    def of(
        cls,
        request: ChatRequest | CompletionRequest,
        response_id: str,
        created: int,
        model: str,
        *,
        receipt: bool,
        telling: Telling | None = None,
    ) -> StreamRecord:
        """What the request asked for."""
        options = request.stream_options
        return cls(
            is_chat=isinstance(request, ChatRequest),
            response_id=response_id,
            created=created,
            model=model,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            event_ids=options is not None and options.include_event_ids,
            token_ids=request.return_token_ids,
            logprobs=request.logprobs if isinstance(request, ChatRequest) else request.logprobs is not None,
            echo=isinstance(request, CompletionRequest) and request.echo,
            receipt=receipt,
            after_prompt=isinstance(request, CompletionRequest) or request.continue_final_message,
            prompt_alone=asks_for_prompt_alone(request),
            telling=telling,
            tokens_as_ids=request.return_tokens_as_token_ids,
            explain=request.explain,
        )

    def call_id(self, choice: int, index: int) -> str:
        """Of a call that a choice tells."""
        return call_id(NONE if self.telling is None else self.telling.calls, self.response_id, choice, index)


_FIELDS = tuple(field.name for field in fields(StreamRecord))


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One of the `count` prompts of a stream. `echo`: its text where the answer repeats it."""

    stream: StreamRecord
    number: int
    count: int
    echo: str

    def to_json(self) -> str:
        """For `AddRequest.answer`."""
        stream = {name: getattr(self.stream, name) for name in _FIELDS}  # `asdict` would copy each value, deeply
        data = {"stream": stream, "number": self.number, "count": self.count, "echo": self.echo}
        return to_json(data)

    @classmethod
    def from_json(cls, text: str) -> PromptRecord:
        """Raises `ApiError` (404) if the request was not a stream."""
        if not text:
            raise ApiError(404, "The request with this id is not a stream.", "stream_not_found")
        data = json.loads(text)
        stream = StreamRecord(**data["stream"])
        if stream.telling is not None:
            stream.telling = Telling(*stream.telling)  # JSON has it as a list
        return cls(**{**data, "stream": stream})


def answers_of(stream: StreamRecord, echoes: list[str]) -> list[str]:
    """`AddRequest.answer` of each prompt, given what the stream repeats of it.

    Raises `InvalidRequestError` if they are too long. All of them together may have what one string may: with `Claimed`
    they come back in one message. A message that its receiver refuses counts as lost, and would end the link again and
    again.
    """
    answers = [PromptRecord(stream, number, len(echoes), echo).to_json() for number, echo in enumerate(echoes)]
    if sum(len(answer.encode()) for answer in answers) > MAX_TEXT_BYTES:
        words = f"echo: a stream may repeat at most {MAX_TEXT_BYTES} bytes of its prompts, written as JSON."
        raise InvalidRequestError(words, param="echo")
    return answers


def parse_event_id(text: str | None, most_tokens: list[int]) -> list[int]:
    """The place of each choice; all at the beginning without an id.

    most_tokens: how many each choice can have. Raises `InvalidRequestError` for what cannot be an event's id.
    """
    if not text:
        return [0] * len(most_tokens)
    places = [int(part) for part in text.split("-")] if _ID.fullmatch(text) else []
    is_one = len(places) == len(most_tokens)
    if not is_one or any(place > most + 3 for place, most in zip(places, most_tokens, strict=True)):
        raise InvalidRequestError("This is not the id of an event of this stream.", param="after")
    return places
