"""The OpenAPI description of our routes, made from the table of routes and the request models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.routes.endpoint import Handler
from gateway.schemas import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"
_STREAMING = (ChatRequest, CompletionRequest)
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table of routes. `body`: the model of its JSON body, if it takes one."""

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    media_type: str = "application/json"  # of a whole answer


def describe(routes: Iterable[RouteSpec], *, title: str, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    table = list(routes)
    bodies = [(spec.body, "validation") for spec in table if spec.body is not None]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for spec in table:
        paths.setdefault(_plain(spec.path), {})[spec.method.lower()] = _operation(spec)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(spec: RouteSpec) -> dict[str, Any]:
    content: dict[str, Any] = {spec.media_type: {}}
    if spec.body in _STREAMING:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error_content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    error = {"description": "An error", "content": error_content}
    operation: dict[str, Any] = {
        "operationId": spec.handler.__name__,
        "summary": (spec.handler.__doc__ or "").strip().split("\n")[0],
        "responses": {"200": {"description": "The answer", "content": content}, "4XX": error, "5XX": error},
    }
    names = re.findall(r"{(\w+)(?::\w+)?}", spec.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if spec.body is not None:
        schema = {"$ref": _REF.format(model=spec.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _plain(path: str) -> str:
    """`{model_id:path}` is `{model_id}` to OpenAPI."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
