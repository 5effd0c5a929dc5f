"""What a JSON schema says by words that llguidance does not know, and can be said by others: rewritten beforehand."""

from __future__ import annotations

import json
from typing import Any

from novainfer.sampling.params import MAX_GRAMMAR_BYTES
from novainfer.sampling.schema_walk import leads_to_schema, schema_at, schemas_in, steps_of

_NAMES, _VALUES = "propertyNames", "additionalProperties"
_REFERENCE = "$ref"
_NOTES = frozenset({
    "$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
})  # fmt: skip
# Formats that pydantic and OpenAPI write and that any text has: what a program shows, or does with it.
_FORMATS_OF_ANY_TEXT = frozenset({"binary", "directory-path", "file-path", "password", "path"})


def rewrite(root: dict[str, Any]) -> None:
    """Change a schema in place to one that says the same. What cannot be said otherwise stays, to be refused.

    It grows, and looks at, no more than a grammar may have.
    """
    schemas = list(schemas_in(root))
    for item in schemas:
        kind = item.get("format")
        if isinstance(kind, str) and kind in _FORMATS_OF_ANY_TEXT:
            del item["format"]
    named = [item for item in schemas if _NAMES in item]
    if not named or _are_pointed_into(schemas):
        return
    is_whole = not any(isinstance(item.get(name), str) for item in schemas[1:] for name in ("$id", "id"))
    # Names first: what they refer to is as it was. Then what is inside before what is around it, which repeats that.
    asked_of = [_asked_of_names(item[_NAMES], root if is_whole else {}) for item in named]
    room = MAX_GRAMMAR_BYTES
    for item, asked in reversed(list(zip(named, asked_of, strict=True))):
        room = _rewrite_names(item, asked, room)
        if room < 0:
            return  # it will be refused for this one, whatever becomes of the others


def _are_pointed_into(schemas: list[dict[str, Any]]) -> bool:
    """Whether a reference leads through what may be rewritten."""
    targets = [item[_REFERENCE] for item in schemas if isinstance(item.get(_REFERENCE), str)]
    return any({_NAMES, _VALUES} & set(steps_of(target)) for target in targets)


def _rewrite_names(item: dict[str, Any], asked: dict[str, Any] | None, room: int) -> int:
    """That names are texts says nothing; some, or those of a pattern, are listed where the object lists no others.

    Returns what is left of `room`, in characters; below zero, it stays as it was.
    """
    if asked is None or (asked and item.keys() & {"properties", "patternProperties"}):
        return -1
    values = item.get(_VALUES, True)
    if asked.keys() == {"enum"}:
        names = asked["enum"]
        if not isinstance(names, list) or len(names) > room or not all(isinstance(name, str) for name in names):
            return -1
        room -= len(json.dumps(names)) + (1 + len(names)) * len(json.dumps(values))
        if room >= 0:
            item["properties"] = dict.fromkeys(names, values)
    elif asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        room -= len(asked["pattern"])
        if room >= 0:
            item["patternProperties"] = {asked["pattern"]: values}
    elif asked:
        return -1
    if room >= 0:
        if asked:
            item[_VALUES] = False
        del item[_NAMES]
    return room


def _asked_of_names(names: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """What is asked of names beside that they are texts, here or where a reference leads. None: that is not simple.

    root: where references begin; empty: not everywhere in the same place, so that none is followed.
    """
    if names is True:
        return {}
    if not isinstance(names, dict):
        return None
    asked = {name: value for name, value in names.items() if name not in _NOTES}
    target = asked.get(_REFERENCE)
    if isinstance(target, str) and len(asked) == 1 and leads_to_schema(target):
        found = schema_at(root, target) or asked
        asked = {name: value for name, value in found.items() if name not in _NOTES}
    return asked if asked.pop("type", "string") == "string" else None
