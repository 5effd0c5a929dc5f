"""The OpenAPI description of our routes, made from the table of routes and the request models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.auth import OPEN_PATHS
from gateway.errors import MESSAGE_PATHS
from gateway.message_schemas import MessagesRequest
from gateway.openapi_messages import MESSAGE_ERROR
from gateway.openapi_parts import ModelBounds
from gateway.openapi_schemas import ANSWERS, STATE, complete_bodies
from gateway.routes.endpoint import RECEIPT_HEADER, Handler, plain_path
from gateway.schemas import ChatRequest, CompletionRequest, ResponseRequest

_REF = "#/components/schemas/{model}"
EVENTS = "events"  # for `RouteSpec.answer`: no JSON but a stream
_STREAMING = (ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest)
_WITH_RECEIPTS = (ChatRequest, CompletionRequest)
# What of one operation's answer another one takes: handler -> (operation, its parameter, where in the answer).
_LINKS = {
    "chat_completions": ("cancel", "request_id", "/id"),
    "completions": ("cancel", "request_id", "/id"),
    "responses": ("cancel", "request_id", "/id"),
    "messages": ("cancel", "request_id", "/id"),
    "list_models": ("get_model", "model_id", "/data/0/id"),
}


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table. `answer`: the schema of a whole one, EVENTS, None for plain text; `body`: of its JSON."""

    method: str
    path: str
    handler: Handler
    answer: str | None
    body: type[BaseModel] | None = None


def describe(routes: Iterable[RouteSpec], bounds: ModelBounds, *, title: str, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    table = list(routes)
    bodies = [(spec.body, "validation") for spec in table if spec.body is not None]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    schemas = definitions.get("$defs", {})
    complete_bodies(schemas, bounds)
    paths: dict[str, Any] = {}
    named = set()
    for spec in table:
        operation = paths.setdefault(plain_path(spec.path), {})[spec.method.lower()] = _operation(spec)
        if spec.handler in named:  # it answers several paths, but an operation's id is its own
            operation["operationId"] += spec.path.replace("/", "_")
        named.add(spec.handler)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(spec: RouteSpec) -> dict[str, Any]:
    content = {"text/plain": {}} if spec.answer is None else _json(spec.answer)
    if spec.answer == EVENTS:
        content = {"text/event-stream": {}}
    if spec.body in _STREAMING:
        # With "stream": true; chunks as OpenAI's, then [DONE], or events of a response or message.
        content["text/event-stream"] = {}
    error = {"description": "An error", "content": _json(MESSAGE_ERROR if spec.path in MESSAGE_PATHS else "Error")}
    operation: dict[str, Any] = {
        "operationId": spec.handler.__name__,
        "summary": (spec.handler.__doc__ or "").strip().split("\n")[0],
        "responses": {"200": {"description": "The answer", "content": content}, "4XX": error, "5XX": error},
    }
    if spec.handler.__name__ in _LINKS:
        target, name, where = _LINKS[spec.handler.__name__]
        link = {"operationId": target, "parameters": {name: f"$response.body#{where}"}}
        operation["responses"]["200"]["links"] = {target: link}
    if spec.answer == STATE:
        operation["responses"]["503"] = {"description": "Not now, and why", "content": _json(STATE)}
    if spec.path in OPEN_PATHS:
        operation["security"] = []
    names = re.findall(r"{(\w+)(?::\w+)?}", spec.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if spec.body in _WITH_RECEIPTS:
        parameters.append({"name": RECEIPT_HEADER, "in": "header", "schema": {"enum": ["true", "false"]}})
    if spec.answer == EVENTS:
        parameters.append({"name": "after", "in": "query", "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    if spec.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(spec.body.__name__)}
    return operation


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}
