"""What the description's JSON schemas are made of, and the bounds that depend on the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What depends on the model. `num_texts`: ids that are taken for text; `vocab_size`: width of the logits."""

    num_texts: int
    vocab_size: int = 2**31
    max_model_len: int = 2**31  # tokens
    hidden_size: int = 2**31  # numbers of an embedding


def or_null(schema: Schema) -> Schema:
    """The same, or null; title and default stay outside."""
    null = {"type": "null"}
    branches = schema.get("anyOf")
    if branches is None:
        about: Schema = {key: schema[key] for key in ("title", "default") if key in schema}
        return {**about, "anyOf": [{key: value for key, value in schema.items() if key not in about}, null]}
    return schema if null in branches else {**schema, "anyOf": [*branches, null]}


def any_of(*schemas: Schema) -> Schema:
    """One of them at least."""
    return {"anyOf": [*schemas]}


def integer(low: int, high: int) -> Schema:
    """From `low` to `high`, both included."""
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """Of so many items."""
    return {"type": "array", "items": items, "minItems": least} | ({} if most is None else {"maxItems": most})


def string(least: int, most: int | None = None) -> Schema:
    """Of so many characters."""
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


def object_of(**properties: Schema) -> Schema:
    """All of these are there; there may be more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def told_object(**properties: Schema) -> Schema:
    """These may be there, or null; of all else nothing is said."""
    return {"type": "object", "properties": {name: or_null(schema) for name, schema in properties.items()}}


def tagged(kind: str, **properties: Schema) -> Schema:
    """An object that says in its `type` what it is."""
    return object_of(type={"const": kind}, **properties)
