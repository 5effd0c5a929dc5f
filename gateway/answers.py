"""The answers of chat and text completions, whole and in chunks. Built from text prepared once per request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gateway.generation import Generation, PromptState
from gateway.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.receipts import Receipts
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.sse import DONE, event, json_string
from gateway.stream_record import StreamRecord
from novainfer import __version__
from novainfer.client.output import ChoiceDelta, TokenLogprob

FINGERPRINT = f"novainfer-{__version__}"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one answer say alike. `created` in Unix seconds."""

    response_id: str
    kind: str
    created: int
    model: str

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer's object around its choices."""
        return {
            "id": self.response_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


class _Chunks:
    """Chunks of one stream. Subclasses say how a choice's delta is written."""

    kind = ""

    def __init__(self, generation: Generation, record: StreamRecord, receipts: Receipts | None = None) -> None:
        self._generation = generation
        self._record = record
        self._envelope = Envelope(record.response_id, self.kind, record.created, record.model)
        self._receipts = receipts
        self._places = list(generation.told)  # see `stream_record`
        head = json.dumps(self._envelope.wrap([]), ensure_ascii=False, separators=(",", ":"))
        self._head = "data: " + head.removesuffix("]}") + '{"index":'

    def _begins(self, choice: int) -> bool:
        if self._places[choice]:
            return False
        self._places[choice] = 1
        return True

    def _ends(self, choice: int) -> None:
        """The finish reason is about to be told."""
        self._places[choice] = self._generation.outputs[choice].num_tokens + 3

    def _chunk(self, choice: int, fields: str) -> str:
        if self._record.continuous_usage:
            usage = ',"usage":' + json.dumps(self._generation.usage(), separators=(",", ":"))
        else:
            usage = ',"usage":null' if self._record.include_usage else ""
        event_id = f"id: {'-'.join(map(str, self._places))}\n" if self._record.event_ids else ""
        return f"{event_id}{self._head}{choice},{fields}}}]{usage}}}\n\n"

    async def last(self) -> bytes:
        """After the last choice has ended: usage and receipts where asked for, in one chunk without choices."""
        more = {"usage": self._generation.usage()} if self._record.include_usage else {}
        if self._receipts is not None:
            more |= await self._receipts.fields()
        return (event(self._envelope.wrap([], **more)) if more else b"") + DONE


class ChatChunks(_Chunks):
    """`chat.completion.chunk`: the role first, then content, then the finish reason."""

    kind = "chat.completion.chunk"

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """All chunks of one delta; none while its text is held back."""
        chunks: list[str] = []
        if self._begins(delta.choice):
            first = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            if self._record.token_ids:
                first += f',"prompt_token_ids":{self._generation.prompt_of(delta.choice).token_ids}'
            chunks.append(self._chunk(delta.choice, first))
        self._places[delta.choice] += len(delta.token_ids) + (delta.finish_reason is not None)
        if delta.text or delta.logprobs or (self._record.token_ids and delta.token_ids):
            content = f'"delta":{{"content":{json_string(delta.text)}}},"logprobs":{self._logprobs_of(delta)}'
            ids = f',"token_ids":{delta.token_ids}' if self._record.token_ids else ""
            chunks.append(self._chunk(delta.choice, f'{content},"finish_reason":null{ids}'))
        if delta.finish_reason is not None:
            self._ends(delta.choice)
            chunks.append(self._chunk(delta.choice, f'"delta":{{}},"logprobs":null,{_finish(delta)}'))
        return "".join(chunks).encode()

    def _logprobs_of(self, delta: ChoiceDelta) -> str:
        return _dumps(chat_logprobs(delta.logprobs)) if self._record.logprobs else "null"


class CompletionChunks(_Chunks):
    """`text_completion` chunks: the echoed prompt first, where asked for."""

    kind = "text_completion"

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """All chunks of one delta; none while its text is held back."""
        chunks: list[str] = []
        prompt = self._generation.prompt_of(delta.choice)
        begins = self._begins(delta.choice)
        if begins and (self._record.echo or self._record.token_ids):
            chunks.append(self._first(delta.choice, prompt))
        self._places[delta.choice] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ends(delta.choice)
        ids = self._record.token_ids and bool(delta.token_ids)
        if delta.text or delta.logprobs or ids or delta.finish_reason is not None:
            logprobs = _dumps(completion_logprobs(delta.logprobs)) if delta.logprobs else "null"
            fields = f'"text":{json_string(delta.text)},"logprobs":{logprobs},{_finish(delta)}'
            chunks.append(self._chunk(delta.choice, fields + (f',"token_ids":{delta.token_ids}' if ids else "")))
        return "".join(chunks).encode()

    def _first(self, choice: int, prompt: PromptState) -> str:
        logprobs = "null"
        if self._record.echo and self._record.logprobs:
            entries = self._generation.prompt_logprobs(prompt)
            logprobs = _dumps(completion_logprobs(entries, self._generation.prompt_places(prompt)))
        fields = f'"text":{json_string(prompt.echo)},"logprobs":{logprobs},"finish_reason":null,"stop_reason":null'
        if self._record.token_ids:
            fields += f',"prompt_token_ids":{prompt.token_ids}'
        return self._chunk(choice, fields)


def chunks_of(generation: Generation, record: StreamRecord, receipts: Receipts | None) -> ChatChunks | CompletionChunks:
    """The writer of a stream."""
    return (ChatChunks if record.is_chat else CompletionChunks)(generation, record, receipts)


def chat_answer(
    generation: Generation, envelope: Envelope, request: ChatRequest, wholes: list[ChoiceDelta]
) -> dict[str, Any]:
    """`chat.completion`."""
    choices = [
        {
            "index": whole.choice,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": chat_logprobs(whole.logprobs) if request.logprobs else None,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
            **_ids(whole, request.return_token_ids),
        }
        for whole in wholes
    ]
    return envelope.wrap(choices, usage=generation.usage(), **_prompt_extras(generation, request))


def completion_answer(
    generation: Generation, envelope: Envelope, request: CompletionRequest, wholes: list[ChoiceDelta]
) -> dict[str, Any]:
    """`text_completion`."""
    choices: list[dict[str, Any]] = []
    for whole in wholes:
        prompt = generation.prompt_of(whole.choice)
        logprobs = None
        if request.logprobs is not None:
            before = generation.prompt_logprobs(prompt) if request.echo else []
            entries: list[TokenLogprob | None] = [*before, *whole.logprobs]
            logprobs = completion_logprobs(entries, generation.prompt_places(prompt) if request.echo else ())
        choice: dict[str, Any] = {
            "index": whole.choice,
            "text": prompt.echo + whole.text,
            "logprobs": logprobs,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
            **_ids(whole, request.return_token_ids),
        }
        if request.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs(prompt))
        choices.append(choice)
    return envelope.wrap(choices, usage=generation.usage())


def _prompt_extras(generation: Generation, request: ChatRequest) -> dict[str, Any]:
    """A chat has one prompt, so these stand beside the choices, as with vLLM."""
    extras: dict[str, Any] = {}
    prompt = generation.prompts[0]
    if request.return_token_ids:
        extras["prompt_token_ids"] = prompt.token_ids
    if request.prompt_logprobs is not None:
        extras["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs(prompt))
    return extras


def _ids(whole: ChoiceDelta, wanted: bool) -> dict[str, Any]:
    return {"token_ids": whole.token_ids} if wanted else {}


def _finish(delta: ChoiceDelta) -> str:
    if delta.finish_reason is None:
        return '"finish_reason":null,"stop_reason":null'
    return f'"finish_reason":"{delta.finish_reason}","stop_reason":{_dumps(delta.stop_reason)}'


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
