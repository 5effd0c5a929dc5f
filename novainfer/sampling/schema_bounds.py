"""Bounds of numbers that llguidance would misread: some that exclude themselves, it allows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from novainfer.errors import InvalidRequestError
from novainfer.sampling.schema_walk import schema_at, schemas_in

# What bounds a schema has, as bits. Above, below: an integer that it excludes, on the side of 0 where that matters.
_LOW, _HIGH, _ABOVE, _BELOW = 1, 2, 4, 8


def check_excluded(root: dict[str, Any]) -> None:
    """Raise `InvalidRequestError` where an excluded bound would be allowed, or where that is hard to tell.

    llguidance allows an integer that is excluded if the other bound is less than 1 away from it.
    """
    items = [item for item in schemas_in(root) if _may_be_number(item)]
    held = _held(root, items)
    for item in items:
        if _allows_excluded(item):
            raise InvalidRequestError(
                "An exclusive bound that is an integer is not supported where the other bound is less than 1 away from "
                "it."
            )
        if _are_apart(_places(root, item), item, root, held):
            raise InvalidRequestError(
                "An exclusive bound that is an integer is not supported where the other bound is behind $ref, anyOf, "
                "oneOf or nested allOf, or it is itself: write the bounds in one place."
            )


def _allows_excluded(schema: dict[str, Any]) -> bool:
    """By its own bounds and those of what is in its `allOf`."""
    parts = [schema, *_dicts(schema.get("allOf"))]
    if not all(_may_be_number(part) for part in parts):
        return False
    lows = [number for part in parts for number in _numbers(part, "minimum", "exclusiveMinimum")]
    highs = [number for part in parts for number in _numbers(part, "maximum", "exclusiveMaximum")]
    if not lows or not highs:
        return False
    low, high = max(lows), min(highs)
    if low >= 0 and any(low in _numbers(part, "exclusiveMinimum") for part in parts):
        return low % 1 == 0 and low < high < low + 1
    is_excluded = any(high in _numbers(part, "exclusiveMaximum") for part in parts)
    return high <= 0 and is_excluded and high % 1 == 0 and high - 1 < low < high


def _are_apart(
    places: list[list[dict[str, Any]]], item: dict[str, Any], root: dict[str, Any], held: dict[int, int]
) -> bool:
    """Whether an excluded integer and the other bound are at different places, and not both in sight."""
    # For each place: what it may hold, and what of that is not in sight.
    found = [(_own(item), 0)]
    num_parts = len(_dicts(item.get("allOf")))
    for i, place in enumerate(places):
        kinds = _union(place, held)
        if i < num_parts:
            inner = [schema for part in place if _may_be_number(part) for at in _places(root, part) for schema in at]
            found.append((kinds, _union(inner, held)))
        else:
            found.append((kinds, kinds))

    def at(kind: int, column: int) -> set[int]:
        return {i for i, kinds in enumerate(found) if kinds[column] & kind}

    for excluded, other in ((_ABOVE, _HIGH), (_BELOW, _LOW)):
        for ones, others in ((at(excluded, 1), at(other, 0)), (at(excluded, 0), at(other, 1))):
            if ones and others and len(ones | others) > 1:
                return True
    return False


def _places(root: dict[str, Any], item: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """All of which hold for the same value: each of its `allOf`, first; then lists of which one does."""
    places = [[part] for part in _dicts(item.get("allOf"))]
    places += [found for name in ("anyOf", "oneOf") if (found := _dicts(item.get(name)))]
    target = item.get("$ref")
    found_at = schema_at(root, target) if isinstance(target, str) else None
    return places if found_at is None else [*places, [found_at]]


def _held(root: dict[str, Any], items: list[dict[str, Any]]) -> dict[int, int]:
    """What bounds the value of a schema may have, wherever those are written, by the schema's `id`."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for item in items:
        for place in _places(root, item):
            for part in place:
                users[id(part)].append(id(item))
    held = {id(item): _own(item) for item in items}
    left = [at for at, kinds in held.items() if kinds]
    while left:
        at = left.pop()
        for user in users[at]:
            if held[at] & ~held[user]:
                held[user] |= held[at]
                left.append(user)
    return held


def _union(schemas: list[dict[str, Any]], held: dict[int, int]) -> int:
    kinds = 0
    for schema in schemas:
        kinds |= held.get(id(schema), 0)
    return kinds


def _own(schema: dict[str, Any]) -> int:
    above, below = _numbers(schema, "exclusiveMinimum"), _numbers(schema, "exclusiveMaximum")
    kinds = _LOW if above or _numbers(schema, "minimum") else 0
    kinds |= _HIGH if below or _numbers(schema, "maximum") else 0
    kinds |= _ABOVE if any(number >= 0 and number % 1 == 0 for number in above) else 0
    return kinds | (_BELOW if any(number <= 0 and number % 1 == 0 for number in below) else 0)


def _may_be_number(schema: dict[str, Any]) -> bool:
    """And no integer: with those all is well."""
    kinds = schema.get("type", "number")
    return "number" in (kinds if isinstance(kinds, list) else [kinds])


def _numbers(schema: dict[str, Any], *keywords: str) -> list[float]:
    found = [schema.get(keyword) for keyword in keywords]
    return [number for number in found if isinstance(number, int | float) and not isinstance(number, bool)]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict)]
