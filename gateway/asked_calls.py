"""Calls as grammars: those that a `tool_choice` demands, and those that may come in place of an answer of a form."""

from __future__ import annotations

import json
from typing import Any

from gateway.asked_grammar import FORMAT, Asked, may_fit, to_json, too_large
from gateway.schemas import ChatRequest
from novainfer.errors import InvalidRequestError
from novainfer.sampling.grammars import CALLS, INSTEAD
from novainfer.sampling.params import MAX_GRAMMAR_BYTES
from novainfer.sampling.schema_walk import leads_to_schema, schemas_in
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.tool_calls import CALL_FORMS

FORM = "hermes"  # the form whose calls can be demanded
_PARAM, _TOOLS = "tool_choice", "tools"
_MOST_BYTES = 16 * MAX_GRAMMAR_BYTES  # of functions: definitions that several of them have count once in their grammar
_DEFINITIONS = ("$defs", "definitions")


def asked_calls(request: ChatRequest, form: str, tokenizer: Tokenizer) -> Asked | None:
    """None: a call is not demanded. form: how the model's calls are written. Raises `InvalidRequestError`."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if form != FORM:
        words = "Only tool_choice 'auto' and 'none' are supported with this model."
        raise InvalidRequestError(words, param=_PARAM)
    chosen = [tool["function"] for tool in request.tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        is_function = choice.get("type") in (None, "function")  # TGI's clients write no type
        name = function.get("name") if is_function and isinstance(function, dict) else None
        chosen = [function for function in chosen if function["name"] == name]
    elif choice != "required":
        words = "tool_choice must be 'auto', 'none', 'required' or a function."
        raise InvalidRequestError(words, param=_PARAM)
    if not chosen:
        raise InvalidRequestError("tool_choice demands a call, and tools has no such function.", param=_PARAM)
    if not may_fit(chosen, _MOST_BYTES):
        raise too_large(_TOOLS)
    source = _source_of(schema_of(chosen), tokenizer, is_many=request.parallel_tool_calls and choice == "required")
    return Asked(_TOOLS, CALLS, to_json(source, _TOOLS))


def calls_or(request: ChatRequest, answer: Asked, form: str, tokenizer: Tokenizer) -> Asked | None:
    """Calls, or the answer that `response_format` asks for, as OpenAI has it; None: the model has nothing to call.

    Nobody demands these calls. So as without an answer's form their arguments need not follow the functions' schemas,
    which may hold what no grammar can say. Raises `InvalidRequestError`.
    """
    is_free = bool(request.tools) and request.tool_choice in (None, "auto") and not request.continue_final_message
    if not is_free or form != FORM or answer.param != FORMAT:
        return None
    names = list(dict.fromkeys(tool["function"]["name"] for tool in request.tools))
    call = {"name": {"enum": names}, "arguments": {"type": "object"}}
    schema = {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
    source = _source_of(schema, tokenizer, is_many=request.parallel_tool_calls)
    return Asked(FORMAT, CALLS, to_json(source | {INSTEAD: json.loads(answer.source)}, FORMAT))


def _source_of(schema: dict[str, Any], tokenizer: Tokenizer, *, is_many: bool) -> dict[str, Any]:
    marks = CALL_FORMS[FORM].marks
    are_special = len(tokenizer.special_ids_of(marks)) == len(marks)
    return {"schema": schema, "marks": marks, "are_special": are_special, "is_many": is_many}


def schema_of(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a call of one of these functions: an object with its name and its arguments.

    What their parameters define is defined for all of them. Raises `InvalidRequestError` where that cannot be.
    """
    found: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = {"type": "object", **_parameters_of(function)}
        parameters.pop("$schema", None)
        for name in _DEFINITIONS:
            for key, value in (parameters.pop(name, None) or {}).items():
                if found.setdefault(name, {}).setdefault(key, value) != value:
                    raise InvalidRequestError("tools: two functions define different schemas alike.", param=_TOOLS)
        call = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": call, "required": [*call], "additionalProperties": False})
    return {"anyOf": calls, **found}


def _parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Its schema: of any object where it has none. Raises `InvalidRequestError`."""
    parameters = function.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not _has_named_definitions(parameters):
        raise InvalidRequestError("tools: parameters must be a JSON schema.", param=_TOOLS)
    if parameters.get("type", "object") not in ("object", ["object"]):
        raise InvalidRequestError("tools: parameters must be a schema of type 'object'.", param=_TOOLS)
    if not _points_into_definitions(parameters):
        raise InvalidRequestError("tools: references in parameters must point into their $defs.", param=_TOOLS)
    return parameters


def _has_named_definitions(schema: dict[str, Any]) -> bool:
    return all(isinstance(schema.get(name), dict | None) for name in _DEFINITIONS)


def _points_into_definitions(schema: dict[str, Any]) -> bool:
    targets = [item.get("$ref") for item in schemas_in(schema)]
    inside = tuple(f"#/{name}/" for name in _DEFINITIONS)
    texts = [target for target in targets if isinstance(target, str)]
    return all(target.startswith(inside) and leads_to_schema(target) for target in texts)
