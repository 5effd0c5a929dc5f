"""What a JSON schema says by words that llguidance does not know, and can be said by others: rewritten beforehand."""

from __future__ import annotations

import json
from typing import Any

from novainfer.sampling.params import MAX_GRAMMAR_BYTES
from novainfer.sampling.schema_walk import leads_to_schema, schema_at, schemas_in

_NAMES = "propertyNames"
_NOTES = frozenset({
    "$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
})  # fmt: skip
# Formats that pydantic and OpenAPI write and that any text has: what a program shows, or does with it.
_FORMATS_OF_ANY_TEXT = frozenset({"binary", "directory-path", "file-path", "password", "path"})


def rewrite(root: dict[str, Any]) -> None:
    """Change a schema in place to one that says the same. What cannot be said otherwise stays, to be refused.

    It grows by no more than a grammar may have: what is inside comes first, as what is around it repeats that.
    """
    room = MAX_GRAMMAR_BYTES
    for item in reversed(list(schemas_in(root))):
        kind = item.get("format")
        if isinstance(kind, str) and kind in _FORMATS_OF_ANY_TEXT:
            del item["format"]
        if _NAMES in item:
            room -= _rewrite_names(item, root, room)


def _rewrite_names(item: dict[str, Any], root: dict[str, Any], room: int) -> int:
    """That names are texts says nothing; some, or those of a pattern, are listed where the object lists no others.

    Returns how many characters that adds, at most `room`.
    """
    asked = _asked_of_names(item[_NAMES], root)
    values = item.get("additionalProperties", True)
    growth = 0
    if asked is None or (asked and item.keys() & {"properties", "patternProperties"}):
        return 0
    if asked.keys() == {"enum"}:
        names = asked["enum"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return 0
        growth = len(json.dumps(names)) + len(names) * len(json.dumps(values))
        if growth > room:
            return 0
        item["properties"] = dict.fromkeys(names, values)
    elif asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        item["patternProperties"] = {asked["pattern"]: values}
    elif asked:
        return 0
    if asked:
        item["additionalProperties"] = False
    del item[_NAMES]
    return growth


def _asked_of_names(names: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """What is asked of names beside that they are texts, here or where a reference leads. None: that is not simple."""
    if names is True:
        return {}
    if not isinstance(names, dict):
        return None
    asked = {name: value for name, value in names.items() if name not in _NOTES}
    target = asked.get("$ref")
    if isinstance(target, str) and len(asked) == 1 and leads_to_schema(target):
        found = schema_at(root, target) or asked
        asked = {name: value for name, value in found.items() if name not in _NOTES}
    return asked if asked.pop("type", "string") == "string" else None
