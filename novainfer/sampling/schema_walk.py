"""Where in a JSON schema there are schemas, and where references lead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are no schemas


def schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all those inside it. What stands where a keyword has a value is none."""
    left: list[Any] = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            yield item
            for name, value in item.items():
                if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif name not in _DATA:
                    left.append(value)


def leads_to_schema(target: str) -> bool:
    """Whether a reference goes from keyword to keyword that holds schemas: so it leads to one of `schemas_in`."""
    steps = iter(steps_of(target))
    if target not in ("", "#") and not target.startswith("#/"):
        return False
    is_list = False  # or may be
    for step in steps:
        if is_list and step.isdecimal():
            is_list = False
        elif step in _SCHEMAS_BY_NAME or (step in _LISTS and step not in _SCHEMAS):
            name = next(steps, None)
            if name is None or (step in _LISTS and not name.isdecimal()):
                return False
            is_list = False
        elif step in _SCHEMAS:
            is_list = step in _LISTS
        else:
            return False
    return True


def schema_at(root: dict[str, Any], target: str) -> dict[str, Any] | None:
    """What a reference leads to. None: there is no schema."""
    item: Any = root
    for step in steps_of(target):
        if isinstance(item, list) and step.isdecimal() and len(step) < 9 and int(step) < len(item):
            item = item[int(step)]
        elif isinstance(item, dict):
            item = item.get(step)
        else:
            return None
    return item if isinstance(item, dict) else None


def steps_of(target: str) -> list[str]:
    """Of the JSON pointer that a reference's fragment is."""
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(target).split("/")[1:]]
