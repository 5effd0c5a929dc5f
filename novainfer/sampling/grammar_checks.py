"""What llguidance would misread in a schema, a regex or Lark, would ignore, or could not stand: refused beforehand."""

from __future__ import annotations

import json
import re
from typing import Any

from novainfer.errors import InvalidRequestError
from novainfer.sampling.schema_bounds import check_excluded
from novainfer.sampling.schema_walk import leads_to_schema, schemas_in

MAX_REPEATS = 20_000  # of one thing; each of a repetition may be states of the lexer
# Each name may lead to the next, and llguidance goes there by recursion. How deep brackets may be it bounds itself.
MAX_NAMES = 1_000
_MAX_WORDS = 400  # characters
_PLACE = re.compile(r"(?:at )?(?:\d+\(\d+\): )+(failed to compile JSON schema: )?")
_DRAWING = re.compile(r"\n *\d+ \| |<non-verbose/>")
_BOUNDS = frozenset({"maxItems", "maxLength", "minItems", "minLength"})
_REPEATS = re.compile(r"\\.|(\{[\d\s,+]*\})", re.DOTALL)  # a backslash takes what follows, also another one
_TIMES = re.compile(r"~[\d\s.+]*")  # the same in Lark
_COUNTS = re.compile(r"\d+")
_SPACE = re.compile(r"\s+")  # in a regex that says so it parts no digits
_ATTRIBUTES = re.compile(r"\[[^\[\]]*\b(max_tokens|temperature)\s*=")  # of Lark rules: these would do nothing
# What in Lark is no such thing: a comment, a text, a regex (closed or not: else it would be looked at again and again),
# or where a schema begins.
_QUOTED = re.compile(r"""(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|%json\s*(?=\{)""")
# llguidance reads over these, though they say what an answer has to be.
_UNREAD_KEYWORDS = frozenset({
    "contentEncoding", "contentMediaType", "contentSchema", "dependencies", "disallow", "divisibleBy", "extends",
    "nullable",
})  # fmt: skip
_NUMBERS = frozenset({"const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_REFERENCES = (
    "A $ref must be # or lead to a schema of the same document by keywords that hold schemas (as #/$defs/name does), "
    "not by another name, nor into const, default, enum or examples."
)
_MAX_INTEGER = 2**53  # llguidance reads numbers as floats


def words_for(message: str) -> str:
    """What llguidance says, as one line, without the place and the text that it draws below."""
    text = _DRAWING.split(message, maxsplit=1)[0]
    return " ".join(_PLACE.sub("", text, count=1).split())[:_MAX_WORDS].rstrip(".")


def no_schema(error: Exception) -> InvalidRequestError:
    """Of a text that is not even JSON."""
    return InvalidRequestError(f"This is no JSON schema: {words_for(str(error))}.")


def check_lark(source: str) -> None:
    """Raise `InvalidRequestError` for Lark that is refused, or a schema in it like any other."""
    check_regex(source)
    rules = check_names(source)
    _check_counts(_REPEATS.findall(rules) + _TIMES.findall(rules))
    if found := _ATTRIBUTES.search(rules):
        raise InvalidRequestError(f"The attribute '{found[1]}' is not supported in a grammar.")


def check_names(source: str) -> str:
    """The rules of Lark alone, without what is written in them. Raises `InvalidRequestError` where there are too many,
    or for a schema in it.
    """
    parts, end = list[str](), 0
    while found := _QUOTED.search(source, end):
        parts.append(source[end : found.start()])
        end = found.end()
        if found[0].startswith("%json"):
            try:
                schema, end = json.JSONDecoder().raw_decode(source, end)
            except (ValueError, RecursionError) as error:
                raise no_schema(error) from None
            check_schema({name: value for name, value in schema.items() if name != "x-guidance"})
    rules = " ".join([*parts, source[end:]])
    if "<[" in rules:  # of which vocabulary? The one that a grammar is tried with is another
        raise InvalidRequestError("Tokens by their ids are not supported in a grammar.")
    if rules.count(":") > MAX_NAMES:
        raise InvalidRequestError(f"A grammar defines at most {MAX_NAMES} names.")
    return rules


def check_schema(schema: Any) -> None:
    """Raise `InvalidRequestError` for what would be ignored in a schema, or anywhere inside it; or too many names."""
    if not isinstance(schema, dict):
        raise InvalidRequestError("A JSON schema must be an object.")
    targets = set[str]()
    for item in schemas_in(schema):
        _check_keywords(item)
        if isinstance(target := item.get("$ref"), str):
            if not leads_to_schema(target):  # what stands there has not been looked at
                raise InvalidRequestError(_REFERENCES)
            targets.add(target)
    if len(targets) > MAX_NAMES:
        raise InvalidRequestError(f"A JSON schema refers to at most {MAX_NAMES} others.")
    check_excluded(schema)


def _check_keywords(item: dict[str, Any]) -> None:
    names = item.keys() & {"x-guidance", *_UNREAD_KEYWORDS}
    if item.get("nullable") is False:  # as if it were not there
        names.remove("nullable")
    if names:
        raise InvalidRequestError(f"The keyword '{min(names)}' is not supported in a JSON schema.")
    for name, value in item.items():
        _check_bounds(name, value)


def _check_bounds(keyword: str, value: Any) -> None:
    """Raise `InvalidRequestError` for one of a schema's keywords with what llguidance would take too long, or wrong."""
    if keyword in _NUMBERS and _has_large_integer(value):
        raise InvalidRequestError(f"{keyword} holds an integer beyond 2**53.")
    if keyword in _BOUNDS and isinstance(value, int | float) and value > MAX_REPEATS:
        raise InvalidRequestError(f"{keyword} is more than {MAX_REPEATS}.")
    if keyword == "pattern" and isinstance(value, str):
        check_regex(value)
    elif keyword == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            check_regex(pattern)


def _has_large_integer(value: Any) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, int) and abs(item) > _MAX_INTEGER:
            return True
        if isinstance(item, list | dict):
            left += item.values() if isinstance(item, dict) else item
    return False


def check_regex(text: str) -> None:
    """The same of a regex, or of Lark."""
    _check_counts(_REPEATS.findall(text))


def _check_counts(repeats: list[str]) -> None:
    for repeat in repeats:
        counts = _COUNTS.findall(_SPACE.sub("", repeat))
        if any(len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS for count in counts):
            raise InvalidRequestError(f"Something is repeated more than {MAX_REPEATS} times.")
