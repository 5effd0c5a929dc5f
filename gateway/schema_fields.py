"""Kinds of fields that the request bodies are made of."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from novainfer.text.chat_template import OWN_NAMES

MAX_TOOLS = 256
MAX_TEMPLATE_KWARGS = 16
KWARG_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"

Name = Annotated[str, Field(max_length=1024)]
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # a million complaints would hold the event loop


def at_most(count: int) -> BeforeValidator:
    """Look at a map's size before its entries: each that is wrong would be a complaint of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"more than {count} entries")
        return value

    return BeforeValidator(check)


def _not_ours(name: str) -> str:
    if name in OWN_NAMES:
        raise ValueError("a name that is the server's own")
    return name


TemplateKwargs = Annotated[
    dict[Annotated[str, Field(pattern=KWARG_NAME), AfterValidator(_not_ours)], Any],
    Field(max_length=MAX_TEMPLATE_KWARGS),
    at_most(MAX_TEMPLATE_KWARGS),
]


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]


def _has_a_function(tool: dict[str, Any]) -> dict[str, Any]:
    """All else in it is the caller's and the template's matter."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise PydanticCustomError("tool", "a tool is an object with a function that has a name")
    return tool


Tools = Annotated[Items[Annotated[dict[str, Any], AfterValidator(_has_a_function)]], Field(max_length=MAX_TOOLS)]


def empty(kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Nothing by default. A literal would be checked and copied for each request."""
    return Field(default_factory=kind, json_schema_extra={"default": kind()})
