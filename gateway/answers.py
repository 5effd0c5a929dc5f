"""The answers of chat and text completions, whole and in chunks. Built from text prepared once per request."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from gateway.body_writer import BodyWriter
from gateway.errors import ApiError
from gateway.explained import explained
from gateway.generation import Generation, PromptState
from gateway.logprobs import ChatLogprobs, CompletionLogprobs, LogprobRoom, PromptLogprobs
from gateway.plain_choice import PlainChoice, Spelling
from gateway.receipts import Receipts
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.slices import Slices, Written, to_json, write_object
from gateway.sse import DONE, KEEP_ALIVE, KEEP_ALIVE_BETWEEN_IDS, event, json_bytes, json_string
from gateway.stream_record import StreamRecord
from gateway.told_parts import deltas_of, message_of
from novainfer import __version__
from novainfer.client.output import ChoiceDelta, ChoiceOutput
from novainfer.text.tokenizer import Tokenizer

_ascii = json.JSONEncoder(separators=(",", ":")).encode  # on one line for every reader
FINGERPRINT = f"novainfer-{__version__}"


@lru_cache(maxsize=2)  # a gateway has one tokenizer
def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """How its tokens stand in an event, as JSON."""
    return Spelling(tokenizer, json_bytes)


@dataclass(slots=True)
class Envelope:
    """What all parts of one answer say alike. `created` in Unix seconds."""

    response_id: str
    kind: str
    created: int
    model: str

    @classmethod
    def of(cls, record: StreamRecord, kind: str) -> Envelope:
        """Around the answer that `record` tells of."""
        return cls(record.response_id, kind, record.created, record.model)

    def wrap(self, choices: list[dict[str, Any]] | Written, **more: Any) -> dict[str, Any]:
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
    _TEXT = ""  # a choice's fields with text, which is JSON, and nothing else new

    def __init__(self, generation: Generation, record: StreamRecord, receipts: Receipts | None = None) -> None:
        self._generation = generation
        self._record = record
        self._envelope = Envelope.of(record, self.kind)
        self._receipts = receipts
        self._places = list(generation.told)  # see `stream_record`
        head = to_json(self._envelope.wrap([]))
        self._head = "data: " + head.removesuffix("]}") + '{"index":'

    @property
    def ends_at_once(self) -> bool:
        """What follows the last delta takes no time: it has no receipts."""
        return self._receipts is None

    @property
    def keep_alive(self) -> bytes:
        """See `Chunks`."""
        return KEEP_ALIVE_BETWEEN_IDS if self._record.event_ids else KEEP_ALIVE

    def plain(self, output: ChoiceOutput, writer: BodyWriter) -> PlainChoice | None:
        """The short way for the tokens of a choice that has begun; None if more is told of them than their text."""
        record = self._record
        if record.event_ids or record.continuous_usage or record.token_ids or record.logprobs or record.explain:
            return None
        head, tail = self._chunk(output.choice, self._fields_of("\0", "null")).encode().split(b"\0")
        return PlainChoice(output, (head, tail), spelling_of(self._generation.tokenizer), writer)

    def failed(self, error: ApiError) -> bytes:
        """See `Chunks`."""
        return event(error.body)

    def _fields_of(self, text: str, logprobs: str) -> str:
        return self._TEXT % (text, logprobs)

    async def prepare(self, delta: ChoiceDelta) -> None:
        """Do, in slices, what takes long: to be awaited before `delta` is written."""

    def _begins(self, choice: int) -> bool:
        if self._places[choice]:
            return False
        self._places[choice] = 1
        return True

    def _ends(self, choice: int) -> None:
        """The finish reason is about to be told."""
        self._places[choice] = self._generation.outputs[choice].num_tokens + 3

    def _chunk(self, choice: int, fields: str, more: str = "") -> str:
        """more: fields that stand beside the choices."""
        if self._record.continuous_usage:
            usage = ',"usage":' + to_json(self._generation.usage())
        else:
            usage = ',"usage":null' if self._record.include_usage else ""
        event_id = f"id: {'-'.join(map(str, self._places))}\n" if self._record.event_ids else ""
        return f"{event_id}{self._head}{choice},{fields}}}]{usage}{more}}}\n\n"

    async def last(self) -> bytes:
        """After the last choice has ended: in one chunk without choices usage, explanation, receipts, if asked for."""
        more = {"usage": self._generation.usage()} if self._record.include_usage else {}
        more |= explained(self._generation)
        if self._receipts is not None:
            more |= await self._receipts.fields()
        return (event(self._envelope.wrap([], **more)) if more else b"") + DONE


class ChatChunks(_Chunks):
    """`chat.completion.chunk`: the role first, then content, then the finish reason."""

    kind = "chat.completion.chunk"
    _TEXT = '"delta":{"content":%s},"logprobs":%s,"finish_reason":null'

    def __call__(self, delta: ChoiceDelta) -> bytes:
        """All chunks of one delta; none while its text is held back."""
        chunks: list[str] = []
        if self._begins(delta.choice):
            first = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            prompt = f',"prompt_token_ids":{self._generation.prompts[0].token_ids}' if self._record.token_ids else ""
            chunks.append(self._chunk(delta.choice, first, prompt))  # as in a whole answer, and with vLLM
        self._places[delta.choice] += len(delta.token_ids) + (delta.finish_reason is not None)
        has_parts = delta.reasoning or delta.calls
        if delta.text or has_parts or delta.logprobs or (self._record.token_ids and delta.token_ids):
            ids = f',"token_ids":{delta.token_ids}' if self._record.token_ids else ""
            logprobs = self._logprobs_of(delta)
            if has_parts:
                chunks += self._parts(delta, logprobs, ids)
            else:
                chunks.append(self._chunk(delta.choice, self._fields_of(json_string(delta.text), logprobs) + ids))
        if delta.finish_reason is not None:
            self._ends(delta.choice)
            chunks.append(self._chunk(delta.choice, f'"delta":{{}},"logprobs":null,{_finish(delta)}'))
        return "".join(chunks).encode()

    def _parts(self, delta: ChoiceDelta, logprobs: str, ids: str) -> list[str]:
        """Chunks of more than content; log-probabilities and token ids stand in the first one."""
        chunks = []
        for told in deltas_of(delta, self._record):
            fields = f'"delta":{{{told}}},"logprobs":{logprobs},"finish_reason":null'
            chunks.append(self._chunk(delta.choice, fields + ids))
            logprobs, ids = "null", ""
        return chunks

    def _logprobs_of(self, delta: ChoiceDelta) -> str:
        return _described(delta, ChatLogprobs, self._record) if self._record.logprobs else "null"


class CompletionChunks(_Chunks):
    """`text_completion` chunks: the echoed prompt first, where asked for."""

    kind = "text_completion"
    _TEXT = '"text":%s,"logprobs":%s,"finish_reason":null,"stop_reason":null'

    def __init__(self, generation: Generation, record: StreamRecord, receipts: Receipts | None = None) -> None:
        super().__init__(generation, record, receipts)
        self._echoes: dict[str, str] = {}  # log-probabilities of echoed prompts, by request id

    async def prepare(self, delta: ChoiceDelta) -> None:
        """Write the log-probabilities of its prompt, where they are echoed."""
        prompt = self._generation.prompt_of(delta.choice)
        is_told = self._record.echo and self._record.logprobs and not self._places[delta.choice]
        if is_told and prompt.request_id not in self._echoes:
            echo = CompletionLogprobs(ascii_only=True, as_ids=self._record.tokens_as_ids)
            await _describe(self._generation, prompt, echo)
            self._echoes[prompt.request_id] = "".join(echo.write())

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
            logprobs = _described(delta, CompletionLogprobs, self._record) if delta.logprobs else "null"
            fields = f'"text":{json_string(delta.text)},"logprobs":{logprobs},{_finish(delta)}'
            chunks.append(self._chunk(delta.choice, fields + (f',"token_ids":{delta.token_ids}' if ids else "")))
        return "".join(chunks).encode()

    def _first(self, choice: int, prompt: PromptState) -> str:
        logprobs = self._echoes.get(prompt.request_id, "null")
        fields = self._fields_of(json_string(prompt.echo), logprobs)
        if self._record.token_ids:
            fields += f',"prompt_token_ids":{prompt.token_ids}'
        return self._chunk(choice, fields)


def chunks_of(generation: Generation, record: StreamRecord, receipts: Receipts | None) -> ChatChunks | CompletionChunks:
    """The writer of a stream."""
    return (ChatChunks if record.is_chat else CompletionChunks)(generation, record, receipts)


Logprobs = TypeVar("Logprobs", bound=ChatLogprobs | CompletionLogprobs)


class _Answer(ABC, Generic[Logprobs]):
    """A whole answer. Subclasses say how its choices are written.

    logprobs: makes what writes the log-probabilities of one choice. room: for those. Close it in the end.
    """

    kind = ""

    def __init__(
        self,
        generation: Generation,
        record: StreamRecord,
        request: ChatRequest | CompletionRequest,
        logprobs: type[Logprobs],
        room: LogprobRoom,
    ) -> None:
        self._generation = generation
        self._room = room
        self._tenant = generation.tenant
        self._num_held = 0
        self._record = record
        self._num_prompt_top = request.prompt_logprobs
        self._wants_prompts = request.prompt_logprobs is not None
        # It tells texts alone, as most do.
        self._is_plain = not (record.logprobs or self._wants_prompts or record.token_ids or record.explain)
        count = len(generation.outputs) if record.logprobs else 0
        self._logprobs: list[Logprobs] = [logprobs(as_ids=record.tokens_as_ids) for _ in range(count)]

    def describe(self, delta: ChoiceDelta) -> None:
        """Write the delta's log-probabilities. Raises what `LogprobRoom.take` raises."""
        if not delta.logprobs:
            return
        count = sum([1 + len(entry.top) for entry in delta.logprobs])
        self._room.take(self._tenant, count, self._num_held)
        self._num_held += count
        for entry in delta.logprobs:
            self._logprobs[delta.choice].add(entry)

    def forget(self) -> None:
        """It is written, and will not be again."""
        self._logprobs.clear()

    def close(self) -> None:
        """It holds no more. Idempotent."""
        self._room.give_back(self._tenant, self._num_held)
        self._num_held = 0

    async def write(self, wholes: list[ChoiceDelta], receipts: Receipts | None) -> Written:
        """The answer's JSON, once every choice has ended."""
        if self._is_plain and len(wholes) == 1 and receipts is None:  # written with what stands around it
            choice = await self._choice(wholes[0])
            whole = Envelope.of(self._record, self.kind).wrap([choice], usage=self._generation.usage())
            return Written([to_json(whole)])
        choices = await self._choices(wholes)
        more = {"usage": self._generation.usage(), **explained(self._generation), **await self._more()}
        if receipts is not None:
            more |= await receipts.fields()
        return write_object(Envelope.of(self._record, self.kind).wrap(choices, **more))

    async def _choices(self, wholes: list[ChoiceDelta]) -> Written:
        slices = Slices()
        choices = Written(["["])
        for whole in wholes:
            choices += ["," if whole.choice else "", *write_object(await self._choice(whole))]
            await slices.pause()
        choices.append("]")
        return choices

    @abstractmethod
    async def _choice(self, whole: ChoiceDelta) -> dict[str, Any]:
        """The object of one choice."""

    async def _more(self) -> dict[str, Any]:
        return {}

    def _end(self, whole: ChoiceDelta) -> dict[str, Any]:
        ids = {"token_ids": whole.token_ids} if self._record.token_ids else {}
        return {"finish_reason": whole.finish_reason, "stop_reason": whole.stop_reason, **ids}


class ChatAnswer(_Answer[ChatLogprobs]):
    """`chat.completion`. A chat has one prompt, so what is told of it stands beside the choices, as with vLLM."""

    kind = "chat.completion"

    def __init__(self, generation: Generation, record: StreamRecord, request: ChatRequest, room: LogprobRoom) -> None:
        super().__init__(generation, record, request, ChatLogprobs, room)

    async def _choice(self, whole: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": whole.choice,
            "message": message_of(whole, self._record),
            "logprobs": self._logprobs[whole.choice].write() if self._logprobs else None,
            **self._end(whole),
        }

    async def _more(self) -> dict[str, Any]:
        prompt = self._generation.prompts[0]
        more: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if self._record.token_ids else {}
        if self._wants_prompts:
            logprobs = PromptLogprobs(self._num_prompt_top)
            await _describe(self._generation, prompt, logprobs)
            more["prompt_logprobs"] = logprobs.write()
        return more


class CompletionAnswer(_Answer[CompletionLogprobs]):
    """`text_completion`. What is told of a prompt stands in each of its choices."""

    kind = "text_completion"

    def __init__(
        self, generation: Generation, record: StreamRecord, request: CompletionRequest, room: LogprobRoom
    ) -> None:
        super().__init__(generation, record, request, CompletionLogprobs, room)
        self._num_top = request.logprobs
        self._prompts: dict[str, tuple[CompletionLogprobs, dict[str, Any]]] = {}  # by request id

    async def _choice(self, whole: ChoiceDelta) -> dict[str, Any]:
        prompt = self._generation.prompt_of(whole.choice)
        if self._is_plain:
            text = prompt.echo + whole.text
            return {"index": whole.choice, "text": text, "logprobs": None, **self._end(whole)}
        if prompt.request_id not in self._prompts:
            self._prompts[prompt.request_id] = await self._prompt(prompt)
        echo, fields = self._prompts[prompt.request_id]
        return {
            "index": whole.choice,
            "text": prompt.echo + whole.text,
            "logprobs": self._logprobs[whole.choice].write(echo) if self._logprobs else None,
            **self._end(whole),
            **fields,
        }

    async def _prompt(self, prompt: PromptState) -> tuple[CompletionLogprobs, dict[str, Any]]:
        """The log-probabilities of its echo, and the fields that each of its choices has: written once."""
        # The engine gives one number of alternatives, the larger one of what both are asked for.
        echo = CompletionLogprobs(num_top=self._num_top, as_ids=self._record.tokens_as_ids)
        logprobs = PromptLogprobs(self._num_prompt_top)
        sinks = [echo] if self._record.echo and self._logprobs else []
        if sinks or self._wants_prompts:
            await _describe(self._generation, prompt, *sinks, *([logprobs] if self._wants_prompts else []))
        echo.pack()
        fields: dict[str, Any] = {}
        if self._record.token_ids:
            fields["prompt_token_ids"] = Written([_ascii(prompt.token_ids)])
        if self._wants_prompts:
            fields["prompt_logprobs"] = logprobs.write()
        return echo, fields


def _described(delta: ChoiceDelta, kind: type[ChatLogprobs | CompletionLogprobs], record: StreamRecord) -> str:
    logprobs = kind(ascii_only=True, as_ids=record.tokens_as_ids)
    for entry in delta.logprobs:
        logprobs.add(entry)
    return "".join(logprobs.write())


async def _describe(generation: Generation, prompt: PromptState, *sinks: CompletionLogprobs | PromptLogprobs) -> None:
    """Give each of them the whole prompt."""
    slices = Slices()
    for token, offset, entry in generation.describe(prompt):
        for sink in sinks:
            sink.add_prompt(token, offset, entry)
        await slices.pause()


def _finish(delta: ChoiceDelta) -> str:
    if delta.finish_reason is None:
        return '"finish_reason":null,"stop_reason":null'
    stop = "null" if delta.stop_reason is None else _ascii(delta.stop_reason)
    return f'"finish_reason":"{delta.finish_reason}","stop_reason":{stop}'
