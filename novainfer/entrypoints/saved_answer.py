"""Answers of the API as files: the receipts in them, and what they say beside those. Nothing is computed here.

Whoever wrote the file is not trusted. What two readers could read in two ways is refused: a name that stands twice in
an object, events after `[DONE]`, parts of several answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from novainfer.errors import ConfigError
from novainfer.receipt import Receipt

_LINE_END = re.compile(r"\r\n|\r|\n")  # of events
_EVENT_ID = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})*", re.ASCII)  # a place for each choice
_STREAM_STARTS = ("data:", "id:", "event:", "retry:", ":")
_TEXTS = {"text_completion": "text", "chat.completion": "message", "chat.completion.chunk": "delta"}
_NEVER_WRITTEN = ("refusal", "function_call", "reasoning", "audio")  # other servers put something there
_CALL_KEYS, _FUNCTION_KEYS = frozenset({"id", "type", "function"}), frozenset({"name", "arguments"})
Place = tuple[int, ...]


@dataclass(slots=True)
class SaidCall:
    """A call as the file tells it. `id`, `name`: None where its beginning is not there."""

    id: str | None = None
    name: str | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """All of their text."""
        return "".join(self.parts)


@dataclass(slots=True)
class SaidChoice:
    """One choice as the file tells it; what a stream says in parts is joined. Calls stand by their indexes.

    token_ids, prompt_token_ids: None where they were not asked for. strays: names of fields with content that no
    answer of this server has. has_begun: a chat's first event is there.
    """

    parts: list[str] = field(default_factory=list)
    finish_reasons: list[Any] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    token_ids: list[Any] | None = None
    prompt_token_ids: Any = None
    strays: list[str] = field(default_factory=list)
    has_begun: bool = False
    thoughts: list[str] = field(default_factory=list)
    calls: dict[int, SaidCall] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of its text, of a chat the content."""
        return "".join(self.parts)

    @property
    def reasoning(self) -> str:
        """All of its reasoning."""
        return "".join(self.thoughts)

    @property
    def size(self) -> int:
        """In characters."""
        return len(self.text) + len(self.reasoning) + sum(len(call.arguments) for call in self.calls.values())

    def take_parts(self, holder: dict[str, Any], *, is_stream: bool) -> None:
        """What a message or a part of one has beside its content; what no server of ours wrote is a stray."""
        self.strays += [other for other in _NEVER_WRITTEN if holder.get(other)]
        reasoning, calls = holder.get("reasoning_content"), holder.get("tool_calls")
        if isinstance(reasoning, str):
            self.thoughts.append(reasoning)
        elif reasoning:
            self.strays.append("reasoning_content")
        entries = calls if isinstance(calls, list) else [calls] if calls else []
        if not all(self._take_call(entry, None if is_stream else number) for number, entry in enumerate(entries)):
            self.strays.append("tool_calls")

    def _take_call(self, entry: Any, number: int | None) -> bool:
        """number: its place in a message. Whether it is one, or in a stream a part of one."""
        if not isinstance(entry, dict) or not isinstance(entry.get("function"), dict):
            return False
        keys = _CALL_KEYS if number is not None else _CALL_KEYS | {"index"}
        if not (_said(entry) <= keys and _said(entry["function"]) <= _FUNCTION_KEYS):
            return False
        index = entry.get("index") if number is None else number
        told_id, name, arguments = entry.get("id"), entry["function"].get("name"), entry["function"].get("arguments")
        if type(index) is not int or not isinstance(arguments, str):
            return False
        if name is not None or told_id is not None or number is not None:  # it begins
            is_whole = isinstance(name, str) and isinstance(told_id, str) and entry.get("type") == "function"
            if not is_whole or index in self.calls:
                return False
        self.calls.setdefault(index, SaidCall(told_id, name)).parts.append(arguments)
        return True


@dataclass(slots=True)
class SavedAnswer:
    """A file with receipts. `choices` by index; without any, there is nothing but receipts and perhaps a usage."""

    is_stream: bool
    receipts: list[Receipt | None] = field(default_factory=list)
    choices: dict[int, SaidChoice] = field(default_factory=dict)
    model: Any = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: Any = None  # a whole chat's
    id: Any = None
    _kind: str | None = None
    _place: Place | None = None

    @property
    def is_chat(self) -> bool:
        """Its texts are messages, which never repeat the prompt."""
        return self._kind not in (None, "text_completion")

    @property
    def may_be_rest(self) -> bool:
        """The stream's events have ids, so it may have been taken up again, after its beginning."""
        return self._place is not None

    def take(self, document: dict[str, Any], event_id: str | None) -> None:
        """Add what one event says, or a whole body. Raises `ConfigError` or `InvalidRequestError`."""
        if not self.is_stream and not {"object", "receipt", "receipts"} & document.keys():  # no answer of the API
            self.receipts.append(Receipt.from_json(document))
            return
        if "error" in document:
            raise ConfigError("the file holds an error")
        self._take_receipts(document)
        for name in ("id", "model"):
            if name in document:
                self._take_name(name, document[name])
        choices = document.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ConfigError("the answer's choices are not a list of objects")
        if not (self.is_stream and choices):  # until then it still grows
            self._take_usage(document.get("usage"))
        self.prompt_token_ids = document.get("prompt_token_ids", self.prompt_token_ids)
        if choices:
            self._take_choices(choices, str(document.get("object")), event_id)

    def _take_name(self, name: str, value: Any) -> None:
        """What each event of an answer repeats."""
        if not isinstance(value, str):
            raise ConfigError(f"the answer's {name} is not text")
        self._of_one_answer(name, value)

    def _take_usage(self, usage: Any) -> None:
        if usage is None:
            return
        if not isinstance(usage, dict):
            raise ConfigError("the answer's usage is not an object")
        self._of_one_answer("usage", usage)

    def _of_one_answer(self, name: str, value: Any) -> None:
        if getattr(self, name) not in (None, value):
            raise ConfigError("the file holds parts of several answers")
        setattr(self, name, value)

    def _take_choices(self, choices: list[dict[str, Any]], kind: str, event_id: str | None) -> None:
        name = _TEXTS.get(kind, "")
        if name not in ("text", "delta" if self.is_stream else "message"):
            raise ConfigError(f"the file holds choices of the kind {kind[:64]!a}, which it cannot have")
        self._of_one_answer("_kind", kind)
        if self.is_stream:
            self._advance(event_id)
        for choice in choices:
            self._take_choice(choice, name)
        if not self.is_stream and (len(self.choices) < len(choices) or list(self.choices) != sorted(self.choices)):
            raise ConfigError("the answer's choices do not stand in order, each once")

    def _take_receipts(self, document: dict[str, Any]) -> None:
        found = document.get("receipts")
        if not isinstance(found, list):
            found = [document["receipt"]] if "receipt" in document else []
        if found and self.receipts:
            raise ConfigError("the file holds the receipts of several answers")
        self.receipts += [None if data is None else Receipt.from_json(data) for data in found]

    def _advance(self, event_id: str | None) -> None:
        """Every event of a stream with ids comes further than the one before it."""
        place = None
        if event_id is not None:
            if not _EVENT_ID.fullmatch(event_id):
                raise ConfigError("the file holds an event with an id that is not one of this server's")
            place = tuple(map(int, event_id.split("-")))
        before = self._place
        if self.choices and (place is None) != (before is None):
            raise ConfigError("some events have ids and some have none: save a stream that was taken up by itself")
        if place is not None and before is not None:
            is_further = len(place) == len(before) and place != before
            if not is_further or any(new < old for new, old in zip(place, before, strict=True)):
                raise ConfigError("the stream begins again within the file: save one of its readings")
        self._place = place

    def _take_choice(self, data: dict[str, Any], name: str) -> None:
        index = data.get("index")
        if type(index) is not int:
            raise ConfigError("a choice of the answer has no index")
        choice = self.choices.setdefault(index, SaidChoice())
        holder = data if name == "text" else data.get(name)
        if not isinstance(holder, dict):
            raise ConfigError(f"choice {index} of the answer has no {name}")
        text = holder.get("text" if name == "text" else "content")
        if isinstance(text, str):
            choice.parts.append(text)
        elif text is not None or not (self.is_stream or (name != "text" and holder.get("tool_calls"))):
            raise ConfigError(f"choice {index} of the answer has no text")
        choice.strays += [other for other in _TEXTS.values() if other != name and data.get(other)]
        if name != "text":
            choice.take_parts(holder, is_stream=self.is_stream)
            choice.has_begun = choice.has_begun or bool(holder.get("role"))
        if data.get("finish_reason") is not None:
            choice.finish_reasons.append(data["finish_reason"])
            choice.stop_reasons += [data["stop_reason"]] if "stop_reason" in data else []
        if data.get("token_ids") is not None:
            if not isinstance(data["token_ids"], list) or not all(type(item) is int for item in data["token_ids"]):
                raise ConfigError(f"the token_ids of choice {index} of the answer are not a list of integers")
            choice.token_ids = (choice.token_ids or []) + data["token_ids"]
        if data.get("prompt_token_ids") is not None:
            choice.prompt_token_ids = data["prompt_token_ids"]


def read_answer(text: str) -> SavedAnswer:
    """What `text` holds: a receipt itself, the body of a response, or a saved event stream.

    Its receipts are one a prompt, None for a prompt that has none. Raises `ConfigError` or `InvalidRequestError` for
    anything else, and if there is no receipt.
    """
    answer = SavedAnswer(is_stream=text.startswith(_STREAM_STARTS))
    is_done = False
    for event_id, data in _events(text) if answer.is_stream else [(None, text)]:
        if is_done:
            raise ConfigError("the file goes on after the end of its event stream")
        is_done = answer.is_stream and data == "[DONE]"
        if not is_done:
            answer.take(_parse(data), event_id)
    if not any(answer.receipts):
        raise ConfigError('the file holds no receipt: ask for one with `"receipt": true`')
    return answer


def _said(data: dict[str, Any]) -> set[str]:
    """The names of what an object says, null being nothing."""
    return {name for name, value in data.items() if value is not None}


def _events(text: str) -> Iterator[tuple[str | None, str]]:
    """(id, data) of each event: this server writes the data of one on one line, and its id before that."""
    event_id = None
    for line in _LINE_END.split(text):
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            yield event_id, line[5:].strip()
            event_id = None


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise ConfigError("the file is neither JSON nor an event stream") from None
    if not isinstance(data, dict):
        raise ConfigError("the file does not hold a JSON object")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ConfigError("a name stands twice in one object of the file")
    return data
