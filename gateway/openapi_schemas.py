"""JSON schemas for the description: the bounds of requests that their models leave to other doors, and the answers.

Every optional field may also be null. Rules between fields (`min_tokens` and `max_tokens`, say) no schema can tell.
"""

from __future__ import annotations

import math

from gateway.asked_grammar import FORMATS, NAME_PATTERN
from gateway.explained import EXPLAINED_COUNTS, EXPLAINED_TIMES
from gateway.foreign_fields import (
    KWARGS,
    LEFT_TO_IT,
    LEVELS,
    LORA,
    MODES,
    NEUTRAL,
    NO_LIMIT,
    NO_OPS,
    ON_WHEN_EMPTY,
    SAME,
    THINK,
    THINKING,
    UNSUPPORTED,
    UNSUPPORTED_PREFIX,
)
from gateway.message_schemas import CountTokensRequest, MessagesRequest
from gateway.openapi_embeddings import EMBEDDINGS, embedding_fields
from gateway.openapi_messages import MESSAGE_ANSWERS, conversation_schemas, stop_schemas
from gateway.openapi_parts import (
    COUNT,
    STRING,
    ModelBounds,
    Schema,
    array,
    integer,
    object_of,
    or_null,
    string,
    tagged,
    told_object,
)
from gateway.openapi_server import SERVER_INFO
from gateway.params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS
from gateway.response_chat import ENCRYPTED, LOGPROBS, MAX_EFFORT, STREAM_OPTIONS, SUMMARIES
from gateway.response_items import ITEM_ROLES
from gateway.schema_fields import KWARG_NAME, MAX_TEMPLATE_KWARGS, MAX_TOOLS
from gateway.schemas import (
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    ROLES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseRequest,
    TemplateRequest,
    TokenizeRequest,
)
from novainfer.protocol.messages import (
    WAITED_BLOCKS,
    WAITED_GRAMMAR,
    WAITED_ROWS,
    WAITED_SHARE,
    WAITED_TOKENS,
    WAITED_WORKERS,
)
from novainfer.sampling.grammars import CHOICE, JSON, LARK, REGEX
from novainfer.sampling.params import (
    FLOAT_BOUNDS,
    INT_BOUNDS,
    MAX_BIAS,
    MAX_GRAMMAR_BYTES,
    MAX_ID_LIST,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
)
from novainfer.text.chat_template import OWN_NAMES

STATE = "State"
_NAME: Schema = {"type": "string", "pattern": NAME_PATTERN}
_BODIES = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    TemplateRequest,
    DetokenizeRequest,
)


def complete_bodies(schemas: dict[str, Schema], bounds: ModelBounds) -> None:
    """Add to the models' own schemas, in place, what they do not say."""
    conversation = conversation_schemas() | {"chat_template_kwargs": _TEMPLATE_KWARGS}
    fields = {
        "ChatRequest": _sampling(bounds) | _chat(),
        "CompletionRequest": _sampling(bounds) | _completion(bounds),
        "EmbeddingRequest": embedding_fields(bounds),
        "ResponseRequest": _sampling(bounds) | _response(),
        "MessagesRequest": _sampling(bounds) | conversation | stop_schemas(),
        "CountTokensRequest": conversation,
        "TokenizeRequest": _RENDERED,
        "TemplateRequest": _RENDERED,
        "DetokenizeRequest": {"tokens": array(integer(0, bounds.num_texts - 1))},
    }
    for kind, schema in schemas.items():
        properties, required = schema["properties"], schema.get("required", ())
        for name, own in properties.items():
            told = fields.get(kind, {}).get(name)
            if told is not None and (kind, name) != ("ChatRequest", "logprobs"):  # that is a flag
                kept = {key: own[key] for key in ("title", "default") if key in own}
                properties[name] = own = {**kept, **told}
            if name not in required:
                properties[name] = or_null(own)
    for model in _BODIES:
        _add_other_names(schemas[model.__name__]["properties"], model.unsupported)
        _refuse(schemas[model.__name__], model.unsupported | UNSUPPORTED)
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [name], "properties": {name: {"type": kind}}}
        for name, kind in (("prompt", "string"), ("messages", "array"))
    ]


def _refuse(schema: Schema, names: frozenset[str]) -> None:
    """Features that do not exist yet may only be switched off, or given nothing to do."""
    about: Schema = {"description": "Not supported yet."}
    switched: Schema = {"enum": [False, "", [], {}]}
    off: Schema = about | {"enum": [None, *switched["enum"]]}
    schema["properties"] |= dict.fromkeys(sorted(names), off)
    schema["patternProperties"] = {f"^{UNSUPPORTED_PREFIX}": off}
    schema["maxProperties"] = MAX_FIELDS
    for name in names & (NO_OPS.keys() | ON_WHEN_EMPTY):  # best_of: n, and function_call: auto alone, are none either
        schema["properties"][name] = about | {"enum": [False, None, *NO_OPS.get(name, ())]}
    for name in names & NEUTRAL.keys():
        low, high = NEUTRAL[name]
        bounds = {"minimum": low, "maximum": high}
        number: Schema = {"type": "number"} | {key: bound for key, bound in bounds.items() if math.isfinite(bound)}
        schema["properties"][name] = about | or_null({"anyOf": [number, switched]})
    idle: Schema = {"type": "array", "items": {"required": ["scale"], "properties": {"scale": {"const": 0}}}}
    idle["items"]["type"] = "object"
    levels: Schema = {"enum": [*LEVELS]}
    for name, kind in ((THINK, levels), (THINKING, _thinking("disabled", *LEFT_TO_IT)), (LORA, idle)):
        if name in names:
            schema["properties"][name] = about | or_null({"anyOf": [kind, switched]})


def _add_other_names(properties: dict[str, Schema], unsupported: frozenset[str]) -> None:
    """Beside the fields that they mean, where those are. That both say the same no schema can tell."""
    for name, ours in SAME.items():
        if ours in properties and name not in unsupported:
            same = {key: value for key, value in properties[ours].items() if key != "title"}
            properties[name] = {"description": f"Another name of {ours}.", **same}
            if name == NO_LIMIT[0]:
                properties[name]["anyOf"] = [*properties[name]["anyOf"], {"const": NO_LIMIT[1]}]
    if KWARGS in properties:
        for name, kind in ((THINK, {"enum": [True, False, *LEVELS]}), (THINKING, _thinking(*MODES, *LEFT_TO_IT))):
            told = {"description": f"An argument of the template: see {KWARGS}.", **or_null(kind)}
            properties.setdefault(name, told)  # Messages have one of their own


def _thinking(*types: str) -> Schema:
    told: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"enum": [*types]}}}
    return told | {"additionalProperties": {"type": "null"}}


def _sampling(bounds: ModelBounds) -> dict[str, Schema]:
    """The bounds of `novainfer.sampling.params`, in a client's words."""
    token_id = integer(0, bounds.vocab_size - 1)
    fields: dict[str, Schema] = {name: integer(*both) for name, both in INT_BOUNDS.items()}
    for name, (low, high) in FLOAT_BOUNDS.items():
        fields[name] = {"type": "number", "minimum": low, "maximum": high}
    fields["top_k"] = integer(-1, INT_BOUNDS["top_k"][1])
    fields["max_tokens"] = fields["max_completion_tokens"] = fields["max_output_tokens"] = integer(
        1, bounds.max_model_len - 1
    )
    fields["top_logprobs"] = fields["logprobs"]
    fields["allowed_token_ids"] = array(token_id, 1, MAX_ID_LIST)
    fields["banned_token_ids"] = fields["stop_token_ids"] = array(token_id, 0, MAX_ID_LIST)
    stop = string(1, MAX_STOP_LENGTH)
    fields["stop"] = {"anyOf": [stop, array(stop, 0, MAX_STOP_STRINGS)]}
    fields["structured_outputs"] = _OUTPUTS
    fields["bad_words"] = array(string(1, MAX_BAD_WORD_LENGTH), 0, MAX_BAD_WORDS)
    fields["logit_bias"] = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_ID_LIST,
    }
    return fields


def _completion(bounds: ModelBounds) -> dict[str, Schema]:
    ids = array(integer(0, bounds.vocab_size - 1), 1, bounds.max_model_len - 1)
    most = {"max_tokens": integer(0, bounds.max_model_len - 1)}  # 0: an echo alone
    prompts = [string(1), ids, array(string(1), 1, MAX_PROMPTS), array(ids, 1, MAX_PROMPTS)]
    return most | {"prompt": {"anyOf": prompts}, "response_format": _RESPONSE_FORMAT}


# A schema, a regex or a grammar that the server cannot follow is refused: that no schema can tell.
_SCHEMA_FORMAT = object_of(
    type={"const": FORMATS[2]},
    json_schema=object_of(name=_NAME, schema={"type": "object"}),
)
_SCHEMA_FORMAT["properties"]["json_schema"]["properties"]["strict"] = {"type": ["boolean", "null"]}
_SCHEMA_FORMAT["properties"]["json_schema"]["properties"]["description"] = {"type": ["string", "null"]}
_RESPONSE_FORMAT: Schema = {"anyOf": [object_of(type={"enum": [*FORMATS[:2]]}), _SCHEMA_FORMAT]}
_OUTPUTS: Schema = {
    "type": "object",
    "properties": {
        JSON: {"type": ["object", "string", "null"]},
        REGEX: {"type": ["string", "null"]},
        CHOICE: {"anyOf": [array({"type": "string"}, 1), {"type": "null"}]},
        LARK: {"type": ["string", "null"], "maxLength": MAX_GRAMMAR_BYTES},
    },
    "additionalProperties": {"type": "null"},
    "minProperties": 1,
}


def _part(kind: str) -> Schema:
    properties = {"type": {"const": kind}, kind: {"type": "string"}}
    return {"type": "object", "required": list(properties), "properties": properties}


_PART: Schema = {"anyOf": [_part("text"), _part("refusal")]}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": sorted(ROLES)},
        "content": {"anyOf": [{"type": "string"}, array(_PART), {"type": "null"}]},
    },
}
_MESSAGES = array(_MESSAGE, 1, MAX_MESSAGES)
_FUNCTION: Schema = {"type": "object", "required": ["name"], "properties": {"name": string(1)}}
_TOOLS = array({"type": "object", "required": ["function"], "properties": {"function": _FUNCTION}}, 0, MAX_TOOLS)
_CHOSEN = object_of(type={"const": "function"}, function=_FUNCTION)
_TEMPLATE_KWARGS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": KWARG_NAME, "not": {"enum": sorted(OWN_NAMES)}},
    "maxProperties": MAX_TEMPLATE_KWARGS,
}

_RENDERED: dict[str, Schema] = {
    "messages": _MESSAGES,
    "tools": _TOOLS,
    "tool_choice": {"enum": ["auto", "none", None]},
    "chat_template_kwargs": _TEMPLATE_KWARGS,
}


def _chat() -> dict[str, Schema]:
    return {
        **_RENDERED,
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, _CHOSEN]},
        "modalities": array({"const": "text"}, 1, 1),
        "response_format": _RESPONSE_FORMAT,
    }


def _input() -> Schema:
    """What becomes of it as a template is rendered no schema can tell."""
    words = {"anyOf": [STRING, array(object_of(type=STRING))]}
    message = object_of(role={"enum": [*ITEM_ROLES]}, content=words)
    message["properties"]["type"] = {"enum": ["message", None]}
    items = [
        message,
        tagged("function_call", call_id=STRING, name=STRING, arguments=STRING),
        tagged("function_call_output", call_id=STRING, output=words),
        tagged("reasoning"),
    ]
    return {"anyOf": [STRING, array({"anyOf": items}, 1, MAX_MESSAGES)]}


def _response() -> dict[str, Schema]:
    name = string(1)
    function = tagged("function", name=name)
    formats = [object_of(type={"enum": [*FORMATS[:2]]}), tagged("json_schema", name=_NAME, schema={"type": "object"})]
    formats[1]["properties"] |= {"strict": {"type": ["boolean", "null"]}, "description": {"type": ["string", "null"]}}
    summary: Schema = {"enum": [*SUMMARIES]}
    return {
        "input": _input(),
        "tools": array(function, 0, MAX_TOOLS),
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, function]},
        "text": told_object(format={"anyOf": formats}),
        "reasoning": told_object(effort=string(0, MAX_EFFORT), summary=summary, generate_summary=summary),
        "include": array({"enum": [LOGPROBS, ENCRYPTED]}),
        "background": {"enum": [False]},
        "truncation": {"enum": ["disabled"]},
        "modalities": array({"const": "text"}, 1, 1),
        "stream_options": told_object(**{key: {"enum": [False]} for key in sorted(STREAM_OPTIONS)}),
        "chat_template_kwargs": _TEMPLATE_KWARGS,
    }


_MAYBE_STRING: Schema = {"type": ["string", "null"]}
_MAYBE_OBJECT: Schema = {"type": ["object", "null"]}
_USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_END: dict[str, Schema] = {
    "logprobs": _MAYBE_OBJECT,
    "finish_reason": {"enum": ["stop", "length", "cancelled"]},
    "stop_reason": {"type": ["integer", "string", "null"]},
}
_MS: Schema = {"type": "number", "minimum": 0}
_WAITED: Schema = {
    "enum": [WAITED_ROWS, WAITED_BLOCKS, WAITED_TOKENS, WAITED_SHARE, WAITED_GRAMMAR, WAITED_WORKERS, None]
}
_EXPLAIN = object_of(
    summary=STRING,
    **dict.fromkeys(EXPLAINED_TIMES, _MS),
    **dict.fromkeys(EXPLAINED_COUNTS, COUNT),
    waited_for=_WAITED,
) | {
    "description": "Why it took so long. Milliseconds: total_ms is from the request's arrival until its last token, "
    "and the sum of gateway_ms, queue_ms, prefill_ms and decode_ms; longest_gap_ms is between two of its tokens."
}
_CALL = object_of(id=STRING, type={"const": "function"}, function=object_of(name=STRING, arguments=STRING))
_SAID = object_of(role={"const": "assistant"}, content=_MAYBE_STRING, refusal={"type": "null"})
_SAID["properties"] |= {"reasoning_content": STRING, "tool_calls": array(_CALL, 1)}  # where there are any
_CHAT_END = _END | {"finish_reason": {"enum": [*_END["finish_reason"]["enum"], "tool_calls"]}}


def _answer(kind: str, choice: Schema) -> Schema:
    texts = dict.fromkeys(("id", "model", "system_fingerprint"), STRING)
    answer = object_of(object={"const": kind}, created=COUNT, choices=array(choice, 1), usage=_USAGE, **texts)
    answer["properties"]["explain"] = _EXPLAIN  # where it was asked for
    return answer


_RESPONSE = object_of(
    id=STRING,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["completed", "incomplete", "cancelled"]},
    model=STRING,
    output=array({"anyOf": [tagged(kind, id=STRING) for kind in ("message", "reasoning", "function_call")]}),
    usage=object_of(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
    error={"type": "null"},
    incomplete_details=_MAYBE_OBJECT,
)
_MODEL = object_of(
    id=STRING,
    object={"const": "model"},
    created=COUNT,
    owned_by=STRING,
    root=STRING,
    parent=_MAYBE_STRING,
    max_model_len={"type": ["integer", "null"]},
)
_ERROR = object_of(message=STRING, type=STRING, param=_MAYBE_STRING, code=_MAYBE_STRING)

ANSWERS: dict[str, Schema] = MESSAGE_ANSWERS | {
    "Error": object_of(error=_ERROR),
    "ChatCompletion": _answer("chat.completion", object_of(index=COUNT, message=_SAID, **_CHAT_END)),
    "TextCompletion": _answer("text_completion", object_of(index=COUNT, text=STRING, **_END)),
    "Response": _RESPONSE,
    "Embeddings": EMBEDDINGS,
    "Model": _MODEL,
    "ModelList": object_of(object={"const": "list"}, data=array(_MODEL, 1)),
    "Cancelled": object_of(id=STRING, object={"const": "request.cancelled"}, cancelled={"const": True}),
    "Tokens": object_of(
        count=COUNT,
        max_model_len=COUNT,
        tokens=array(COUNT),
        token_strs={"anyOf": [array(_MAYBE_STRING), {"type": "null"}]},
    ),
    "Text": object_of(prompt=STRING),
    STATE: object_of(status={"enum": ["ok", "unavailable"]}),
    "Version": object_of(version=STRING),
    "ServerInfo": SERVER_INFO,
    "Description": object_of(openapi=STRING, info={"type": "object"}, paths={"type": "object"}),
}
