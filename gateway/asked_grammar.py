"""What a request says its answer has to be, and the grammar that a text process makes of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gateway.routes.endpoint import Call
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.service import GatewayService
from gateway.text_jobs import GrammarJob
from novainfer.errors import InvalidRequestError
from novainfer.sampling.grammars import CHOICE, JSON, KINDS
from novainfer.sampling.params import MAX_GRAMMAR_BYTES
from novainfer.text.model_parsers import thoughts_after
from novainfer.text.parts import BARRED, NONE

FORMATS = ("text", "json_object", "json_schema")  # types of `response_format`
FORMAT, OUTPUTS = "response_format", "structured_outputs"
_LEAST = 2  # characters of JSON that a value takes: one, and what stands before the next
_ANY_OBJECT = '{"type": "object"}'
# Where an object's schema stands: in the first field llama.cpp's clients have it, in the second one TGI's.
SCHEMA_FIELDS = ("schema", "value")
_OBJECTS = {"json_object": SCHEMA_FIELDS, "json": ("value",)}
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"


@dataclass(frozen=True, slots=True)
class Asked:
    """kind: one of those of `grammars`, and the text of that; param: the field that says so.

    Raises `InvalidRequestError` if that is too long for a grammar.
    """

    param: str
    kind: str
    source: str

    def __post_init__(self) -> None:
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            words = f"{self.param}: half of a surrogate pair is no text."
            raise InvalidRequestError(words, param=self.param) from None
        if size > MAX_GRAMMAR_BYTES:
            raise too_large(self.param)


def asked_grammar(request: ChatRequest | CompletionRequest) -> Asked | None:
    """None: the answer may be anything. Raises `InvalidRequestError`."""
    asked = None if request.response_format is None else _of_format(request.response_format)
    outputs = None if request.structured_outputs is None else _of_outputs(request.structured_outputs)
    if asked is not None and outputs is not None:
        raise InvalidRequestError(f"{OUTPUTS} cannot be combined with {FORMAT}.", param=OUTPUTS)
    return asked or outputs


def thoughts_before(service: GatewayService, request: ChatRequest, prompt: list[int]) -> str:
    """Whether an answer that has a form may think first: ALLOWED, BEGUN by the prompt, or BARRED."""
    if service.parsers.reasoning == NONE:
        return BARRED
    return thoughts_after(service.tokenizer, prompt, is_continued=request.continue_final_message)


async def make_grammar(call: Call, asked: Asked, thoughts: str = BARRED) -> str:
    """For `SamplingParams.grammar`. Raises `InvalidRequestError`, with the field's name, and what `prepare` raises."""
    (grammar,) = await call.prepare(GrammarJob(asked.param, asked.kind, asked.source.encode(), thoughts))
    return str(grammar, "utf-8")


def _of_format(given: dict[str, Any]) -> Asked | None:
    kind = given.get("type")
    fields = [name for name in SCHEMA_FIELDS if given.get(name) is not None]
    if fields:
        return _of_object(given, kind, fields)
    if kind not in FORMATS:
        raise InvalidRequestError(f"response_format.type must be one of {', '.join(FORMATS)}.", param=FORMAT)
    if kind == "text":
        return None
    if kind == "json_object":
        return Asked(FORMAT, JSON, _ANY_OBJECT)
    about = given.get("json_schema")
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(schema, dict):
        words = "response_format.json_schema must be an object whose 'schema' is an object."
        raise InvalidRequestError(words, param=FORMAT)
    name, strict = about.get("name"), about.get("strict")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        words = "response_format.json_schema.name must be 1 to 64 of the characters A-Z, a-z, 0-9, _ and -."
        raise InvalidRequestError(words, param=FORMAT)
    if not isinstance(about.get("description"), str | None):
        raise InvalidRequestError("response_format.json_schema.description must be a text.", param=FORMAT)
    if not isinstance(strict, bool | None):
        raise InvalidRequestError("response_format.json_schema.strict must be true or false.", param=FORMAT)
    return Asked(FORMAT, JSON, _schema_text(schema, FORMAT))


def _of_object(given: dict[str, Any], kind: Any, fields: list[str]) -> Asked:
    name = fields[0]
    if len(fields) > 1 or name not in _OBJECTS.get(str(kind), ()):
        words = f"response_format.{name} must be the only schema, and the type 'json_object'."
        raise InvalidRequestError(words, param=FORMAT)
    if not isinstance(given[name], dict):
        raise InvalidRequestError(f"response_format.{name} must be an object.", param=FORMAT)
    return Asked(FORMAT, JSON, _schema_text(given[name], FORMAT))


def _of_outputs(given: dict[str, Any]) -> Asked:
    fields = {name: value for name, value in given.items() if value is not None}
    kind, value = next(iter(fields.items()), ("", None))
    if len(fields) > 1 or kind not in KINDS:
        words = f"{OUTPUTS} must have one of {', '.join(KINDS)}, and nothing else."
        raise InvalidRequestError(words, param=OUTPUTS)
    if kind == CHOICE:
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise InvalidRequestError(f"{OUTPUTS}.choice must be a list of one or more texts.", param=OUTPUTS)
    elif not isinstance(value, str) and not (kind == JSON and isinstance(value, dict)):
        wanted = "a JSON schema, or its text" if kind == JSON else "a text"
        raise InvalidRequestError(f"{OUTPUTS}.{kind} must be {wanted}.", param=OUTPUTS)
    return Asked(OUTPUTS, kind, value if isinstance(value, str) else _schema_text(value, OUTPUTS))


def _schema_text(value: Any, param: str) -> str:
    """Of a schema, or a list of texts. What is far too large is not written out: that would hold up the event loop."""
    if not may_fit(value, MAX_GRAMMAR_BYTES):
        raise too_large(param)
    return to_json(value, param)


def too_large(param: str) -> InvalidRequestError:
    """The error of a field that makes too large a grammar."""
    return InvalidRequestError(f"{param}: the grammar has more than {MAX_GRAMMAR_BYTES} bytes.", param=param)


def may_fit(value: dict[str, Any] | list[Any], limit: int) -> bool:
    """Whether its JSON may have so few characters: each part counts for the least that it can take."""
    room = limit
    rest = [value]
    while rest and room >= 0:
        value = rest.pop()
        room -= len(value) * _LEAST
        if room < 0:  # more than shall be looked at
            break
        for part in value if isinstance(value, list) else chain(value, value.values()):
            if type(part) is str:
                room -= len(part)
            elif isinstance(part, list | dict):
                rest.append(part)
    return room >= 0


def to_json(value: Any, param: str) -> str:
    """Of a part of a request. Raises `InvalidRequestError`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"{param} holds what JSON cannot say, or is nested too deeply.", param=param
        ) from None
