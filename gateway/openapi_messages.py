"""JSON schemas of `/v1/messages` and `/v1/messages/count_tokens`; see `openapi_schemas`."""

from __future__ import annotations

from gateway.message_blocks import TEXT, THINKING, TOOL_USE
from gateway.message_chat import CHOICES, KEPT_THOUGHTS, LEFT_TO_IT, MAX_EFFORT, MODES
from gateway.message_events import STOP_REASONS
from gateway.openapi_parts import (
    COUNT,
    STRING,
    Schema,
    any_of,
    array,
    integer,
    object_of,
    or_null,
    string,
    tagged,
    told_object,
)
from gateway.schema_fields import MAX_TOOLS
from gateway.schemas import MAX_MESSAGES
from novainfer.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS

MESSAGE_ERROR = "MessageError"
_OBJECT: Schema = {"type": "object"}
_BOOLEAN: Schema = {"type": "boolean"}


def conversation_schemas() -> dict[str, Schema]:
    """Fields of both. What becomes of them as a template is rendered no schema can tell."""
    form = tagged("json_schema", schema=_OBJECT)
    idle = object_of(type={"const": KEPT_THOUGHTS}, keep={"const": "all"})
    return {
        "messages": array(any_of(*_messages()), 1, MAX_MESSAGES),
        "system": any_of(STRING, array(tagged(TEXT, text=STRING))),
        "tools": array(_tool(), 0, MAX_TOOLS),
        "tool_choice": any_of(*_choices()),
        "thinking": _with(object_of(type={"enum": [*MODES, *LEFT_TO_IT]}), budget_tokens=integer(1, 2**31)),
        "output_config": told_object(effort=string(0, MAX_EFFORT), format=form),
        "output_format": form,
        "context_management": told_object(edits=array(idle)),
        "metadata": told_object(user_id=STRING),
    }


def stop_schemas() -> dict[str, Schema]:
    """Of what only an answer has."""
    return {"stop_sequences": array(string(1, MAX_STOP_LENGTH), 0, MAX_STOP_STRINGS)}


def _messages() -> list[Schema]:
    words = tagged(TEXT, text=STRING)
    result = tagged("tool_result", tool_use_id=STRING)
    result = _with(result, content=any_of(STRING, array(words)), is_error=_BOOLEAN)
    call = tagged(TOOL_USE, id=STRING, name=STRING, input=_OBJECT)
    said = any_of(words, call, tagged(THINKING, thinking=STRING), tagged("redacted_thinking"))
    return [
        object_of(role={"const": "user"}, content=any_of(STRING, array(any_of(words, result), 1))),
        object_of(role={"const": "assistant"}, content=any_of(STRING, array(said))),
    ]


def _tool() -> Schema:
    return _with(object_of(name=string(1), input_schema=_OBJECT), type={"const": "custom"}, description=STRING)


def _choices() -> list[Schema]:
    kinds = object_of(type={"enum": [*CHOICES]}), tagged("tool", name=STRING)
    return [_with(kind, disable_parallel_tool_use=_BOOLEAN) for kind in kinds]


def _with(schema: Schema, **optional: Schema) -> Schema:
    """The object, with fields that may be there, or null."""
    more = {name: or_null(one) for name, one in optional.items()}
    return {**schema, "properties": {**schema["properties"], **more}}


MESSAGE_ANSWERS: dict[str, Schema] = {
    MESSAGE_ERROR: object_of(type={"const": "error"}, error=object_of(type=STRING, message=STRING)),
    "Message": object_of(
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=array(
            any_of(
                tagged(TEXT, text=STRING),
                tagged(THINKING, thinking=STRING, signature=STRING),
                tagged(TOOL_USE, id=STRING, name=STRING, input=_OBJECT),
            )
        ),
        stop_reason={"enum": [*STOP_REASONS.values(), "stop_sequence"]},
        stop_sequence={"type": ["string", "null"]},
        usage=object_of(
            input_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT, output_tokens=COUNT
        ),
    ),
    "TokenCount": object_of(input_tokens=COUNT),
}
