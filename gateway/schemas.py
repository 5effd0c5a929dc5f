"""The request bodies, field by field. Strict: no number from a string or a bool, no infinity.

`null` counts as absent everywhere. Unknown fields are kept apart, to be named in an answer's header or refused; fields
of features that do not exist yet are refused by name, because to ignore them would answer another question.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.foreign_fields import NO_OPS, UNSUPPORTED, UNSUPPORTED_PREFIX, changes_nothing, is_off, rename
from gateway.nested import CHAT, RESPONSE, unknown_inside, without_effect
from gateway.schema_fields import (
    MAX_TOOLS,
    Int,
    Items,
    Metadata,
    Name,
    TemplateKwargs,
    TokenId,
    Tools,
    at_most,
    empty,
)
from novainfer.errors import InvalidRequestError
from novainfer.sampling.grammars import LARK
from novainfer.sampling.params import MAX_ID_LIST

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # of an embedding request, as with OpenAI
MAX_MESSAGES = 8192


class Part(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())


_UNIONS = {
    "input": f"it is a string or a list of 1 to {MAX_MESSAGES} objects",
    "prompt": "it is a string, a list of strings, a list of token ids (whole numbers from 0), or a list of such lists",
    "stop": "it is a string or a list of strings",
    "system": "it is a string or a list of objects",
    "tool_choice": "it is a string or an object",
}


class RequestBody(Part):
    """All of one. unsupported: fields that it cannot have yet. unions: what may stand in those of several types.

    form: see `nested`.
    """

    unsupported: ClassVar[frozenset[str]] = frozenset()
    unions: ClassVar[dict[str, str]] = _UNIONS
    form: ClassVar[str] = CHAT


class StreamOptions(Part):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_event_ids: bool = False  # not by default: there are clients that take each line for data


class EngineRequest(RequestBody):
    """What all share that an engine works on."""

    model: Name | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,128}$")] = ""
    prefix_cache: bool = True
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    user: str | None = None


class GenerationRequest(EngineRequest):
    """What all generations share: sampling, stops, and how to answer."""

    stream: bool = False
    min_tokens: Int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: Int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_ID_LIST), at_most(MAX_ID_LIST)] = empty(dict)
    allowed_token_ids: Items[TokenId] | None = None
    banned_token_ids: Items[TokenId] = empty(list)
    bad_words: Items[str] = empty(list)
    stop: str | Items[str] = empty(list)
    stop_token_ids: Items[TokenId] = empty(list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None


class ChoicesRequest(GenerationRequest):
    """What chat and text completions share beside that: choices, and what is told of them and of their prompts."""

    n: Int = 1
    max_tokens: Int | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    receipt: bool = False
    explain: bool = False


class ChatRequest(ChoicesRequest):
    """`POST /v1/chat/completions`."""

    unsupported = frozenset({"echo", "functions", "function_call", "audio", "web_search_options"})

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    tools: Tools = empty(list)
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: Items[str] = ["text"]
    reasoning_effort: str | None = None
    documents: Items[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs = empty(dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True


class CompletionRequest(ChoicesRequest):
    """`POST /v1/completions`."""

    unsupported = frozenset({"suffix", "best_of", "think", "thinking"})

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    echo: bool = False
    logprobs: Int | None = None
    response_format: dict[str, Any] | None = None


class EmbeddingRequest(EngineRequest):
    """`POST /v1/embeddings`. normalize: None: as the checkpoint does."""

    unsupported = frozenset({"messages", "embed_dtype", "endianness", "input_type", "instruction", "prompt_name"})
    unions = _UNIONS | {"input": _UNIONS["prompt"]}

    input: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None
    normalize: bool | None = None


class ResponseRequest(GenerationRequest):
    """`POST /v1/responses`. What its objects mean is said where they become those of a chat (`response_chat`)."""

    unsupported = frozenset(
        {
            "max_new_tokens", "n_predict",
            "messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "prompt_logprobs", "return_token_ids",
            "return_tokens_as_token_ids", "receipt", "response_format", "reasoning_effort", "echo", "functions",
            "function_call", "context_management", "prompt", "previous_response_id", "conversation", "explain",
        }
    )  # fmt: skip
    form = RESPONSE

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    stream_options: dict[str, Any] | None = None
    include: Items[str] = empty(list)
    top_logprobs: Int | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] = empty(list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: Metadata = empty(dict)
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    modalities: Items[str] = ["text"]
    service_tier: str | None = None
    truncation: str | None = None
    store: bool = False
    background: bool = False
    documents: Items[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs = empty(dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    include_reasoning: bool = True
    separate_reasoning: bool = True


class _RenderedRequest(RequestBody):
    """What a chat tells its template beside the messages, of which only the prompt is wanted."""

    unsupported = frozenset({"chat_template"})

    model: Name | None = None
    add_generation_prompt: bool | None = None  # by default, where no message is to be continued
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = empty(dict)
    tools: Tools = empty(list)
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: Items[dict[str, Any]] | None = None


class TokenizeRequest(_RenderedRequest):
    """`POST /tokenize`: a text, or a chat as the template renders it."""

    prompt: str | None = None
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TemplateRequest(_RenderedRequest):
    """`POST /apply-template`."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Items[TokenId]


Body = TypeVar("Body", bound=RequestBody)

MAX_FIELDS = 256
_CONVERSATIONS = frozenset({"previous_response_id", "conversation", "prompt"})
_PRINTABLE = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMES = 32


def parse(kind: type[Body], body: dict[str, Any], *, strict_params: bool) -> tuple[Body, list[str]]:
    """The request, and the unknown fields that will have no effect, fit for a header.

    Raises `InvalidRequestError` for the first field that is wrong, not supported yet or (strict_params) unknown.
    """
    _check_size(kind, body)
    present = {name: value for name, value in body.items() if value is not None}
    for name in NO_OPS.keys() & present.keys() & kind.unsupported:
        if changes_nothing(name, present):
            del present[name]
    fields = _fields_of(kind)
    strange = [name for name in present if name not in fields]
    for name in rename(present, strange, fields, kind.unsupported) if strange else ():
        if name in kind.unsupported or name in UNSUPPORTED or name.startswith(UNSUPPORTED_PREFIX):
            if is_off(name, present[name]):
                continue
            why = "is not supported yet"
            if kind.form == RESPONSE and name in _CONVERSATIONS:
                why = "is not supported: this server keeps no conversations. Send their items again, as input"
            raise InvalidRequestError(f"{_shown(name)} {why}.", param=_shown(name))
    if isinstance(present.get("stream_options"), dict):
        options = present["stream_options"]
        present["stream_options"] = {name: value for name, value in options.items() if value is not None}
    try:
        request = kind.model_validate(present)
    except ValidationError as error:
        raise _invalid(error, kind.unions) from None
    unknown = [] if kind.form == CHAT else without_effect(present, kind.form)
    unknown += [_shown(name) for name in (request.model_extra or {})]
    if unknown and strict_params:
        raise _unknown_field(unknown[0])
    inside = unknown_inside(present, kind.form) if strict_params else None
    if inside is not None:
        where, name = inside
        raise _unknown_field(f"{where}.{_shown(name)}")
    return request, unknown[:_MAX_NAMES]


# What nothing looks at once the prompt is made, and what stands there then.
_SPENT: dict[str, Any] = {
    "messages": [],
    "tools": [],
    "tool_choice": None,
    "documents": None,
    "chat_template_kwargs": {},
    "response_format": None,
    "reasoning_effort": None,
    "prompt": "",
    "user": None,
}
AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def without_prompt(request: AnyRequest, grammar: str = "") -> AnyRequest:
    """The same request, in which nothing is left but what says how it is answered, however much was sent.

    grammar: in place of what was said of the answer's form.
    """
    fields = vars(request)  # they are not checked again
    fields.update(_spent_of(type(request)))
    fields["structured_outputs"] = {LARK: grammar} if grammar else None
    for part in (request, request.stream_options):
        if part is not None and part.model_extra:
            part.model_extra.clear()
    return request


@cache
def _spent_of(kind: type[BaseModel]) -> dict[str, Any]:
    return {name: value for name, value in _SPENT.items() if name in kind.model_fields}


@cache
def _fields_of(kind: type[BaseModel]) -> frozenset[str]:
    """Their names: to ask the class itself takes two calls, for each request."""
    return frozenset(kind.model_fields)


def _check_size(kind: type[Body], body: dict[str, Any]) -> None:
    """Of what takes the schema long: whatever is wrong with it, others must not wait for that."""
    if len(body) > MAX_FIELDS:
        raise InvalidRequestError(f"The request body has more than {MAX_FIELDS} fields.")
    prompts = body.get("input" if kind is EmbeddingRequest else "prompt")
    most = MAX_INPUTS if kind is EmbeddingRequest else MAX_PROMPTS
    if isinstance(prompts, list) and len(prompts) > most and not isinstance(prompts[0], int):
        raise too_many_inputs() if kind is EmbeddingRequest else too_many_prompts()


def too_many_prompts() -> InvalidRequestError:
    """Or none at all."""
    return InvalidRequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts.", param="prompt")


def too_many_inputs() -> InvalidRequestError:
    """The same of an embedding request."""
    return InvalidRequestError(f"input must hold 1 to {MAX_INPUTS} texts or lists of token ids.", param="input")


def _unknown_field(path: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unknown field: {path}.", param=path, code="unknown_parameter")


def _shown(name: str) -> str:
    return name if _PRINTABLE.fullmatch(name) else "(unprintable)"


def _invalid(error: ValidationError, unions: dict[str, str]) -> InvalidRequestError:
    """The first complaint, without the value that caused it. A union complains once per member: the field counts."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = [str(part) for part in first["loc"]]
    param = _shown(where[0]) if where else None
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is missing.", param=param, code="missing_required_parameter")
    message = unions.get(param or "", first["msg"])
    place = f"{param}[{where[1]}]" if first["type"] == "tool" else param
    return InvalidRequestError(f"Invalid value for {place}: {message}.", param=param)
