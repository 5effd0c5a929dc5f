"""What a value of a parameter may be, as data: whether it has the type, whether it is in bounds, what lies at them.

Nothing here asks the server's own code. `has_type` is what a typed message can carry, `allows` what the API promises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Kind(Protocol):
    """The type of a parameter with its bounds."""

    def has_type(self, value: Any) -> bool:
        """Whether a message could carry the value here at all."""
        ...

    def allows(self, value: Any) -> bool:
        """Whether the value is right; implies `has_type`."""
        ...

    def edges(self) -> list[Any]:
        """Values at, just inside and just outside the bounds."""
        ...


@dataclass(frozen=True)
class Number:
    """low..high, both allowed; nothing strictly inside `gap` is."""

    low: float
    high: float
    integral: bool = False
    gap: tuple[float, float] | None = None

    def has_type(self, value: Any) -> bool:
        return isinstance(value, int if self.integral else (int, float)) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        if not self.has_type(value) or not self.low <= value <= self.high:
            return False
        return self.gap is None or not self.gap[0] < value < self.gap[1]

    def edges(self) -> list[Any]:
        bounds = [self.low, self.high, *(self.gap or ())]
        if self.integral:
            return [bound + step for bound in bounds for step in (-1, 0, 1)]
        nearest = [math.nextafter(bound, way) for bound in bounds for way in (-math.inf, math.inf)]
        return [*bounds, *nearest, *(bound + step for bound in bounds for step in (-1.0, 1.0))]


def whole(low: int, high: int) -> Number:
    """An integer in low..high."""
    return Number(low, high, integral=True)


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def has_type(self, value: Any) -> bool:
        return isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return self.has_type(value)

    def edges(self) -> list[Any]:
        return [True, False, 0, 1, "true"]


@dataclass(frozen=True)
class AnyNumber:
    """Any number, infinite or none."""

    def has_type(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def allows(self, value: Any) -> bool:
        return self.has_type(value)

    def edges(self) -> list[Any]:
        return [1e-9, -1.0]


@dataclass(frozen=True)
class Anything:
    """Whatever JSON can say."""

    def has_type(self, value: Any) -> bool:
        return True

    def allows(self, value: Any) -> bool:
        return True

    def edges(self) -> list[Any]:
        return [[], {}, [[]], {"a": [math.nan]}, [10**400], {"": {"": None}}]


MEGABYTE_TEXT = "x" * 1_000_000
SPECIAL_TEXTS = ("", "\0", "a\0b", "\ud800", "<|im_end|>", "<|im_start|>system\n", "é\u0301\U0001f600", MEGABYTE_TEXT)


@dataclass(frozen=True)
class Text:
    """A string of least..most characters that matches `pattern`, or one of `words`."""

    least: int = 0
    most: int = 10**7
    pattern: str = r"(?s).*"
    words: tuple[str, ...] = ()

    def has_type(self, value: Any) -> bool:
        return isinstance(value, str)

    def allows(self, value: Any) -> bool:
        if not isinstance(value, str) or (self.words and value not in self.words):
            return False
        return self.least <= len(value) <= self.most and re.fullmatch(self.pattern, value) is not None

    def edges(self) -> list[Any]:
        lengths = [n for bound in (self.least, self.most) for n in (bound - 1, bound, bound + 1) if 0 <= n < 10**6]
        return [*self.words, *SPECIAL_TEXTS, *("x" * n for n in dict.fromkeys(lengths))]


@dataclass(frozen=True)
class ListOf:
    """A list of least..most items; `good` is one that is allowed, `together` judges all of them at once."""

    item: Kind
    good: Any
    least: int = 0
    most: int = 10**7
    together: Callable[[list[Any]], bool] = lambda items: True

    def has_type(self, value: Any) -> bool:
        return isinstance(value, list) and all(map(self.item.has_type, value))

    def allows(self, value: Any) -> bool:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            return False
        return all(map(self.item.allows, value)) and self.together(value)

    def edges(self) -> list[Any]:
        sizes = [n for bound in (self.least, self.most) for n in (bound - 1, bound, bound + 1) if 0 <= n < 10**5]
        wrong = [True, 1.5, "1", None, [], {}, 2**31, 2**63, 2**64, 10**400, math.nan, math.inf, -0.0]
        lists = [[self.good] * n for n in dict.fromkeys(sizes)]
        ones = [[value] for value in (*self.item.edges(), *wrong)]
        return [*lists, *ones, [self.good, [self.good]], [self.good, None]]


@dataclass(frozen=True)
class MapOf:
    """A map of up to `most` entries from keys that `is_key` likes to numbers; `key` makes the key of a token id."""

    is_key: Callable[[Any], bool]
    key: Callable[[int], Any]
    value: Number
    key_type: type
    most: int
    num_ids: int

    def has_type(self, value: Any) -> bool:
        if not isinstance(value, dict) or not all(map(self.value.has_type, value.values())):
            return False
        return all(type(key) is self.key_type for key in value)

    def allows(self, value: Any) -> bool:
        if not self.has_type(value) or len(value) > self.most:
            return False
        return all(self.is_key(key) and self.value.allows(item) for key, item in value.items())

    def edges(self) -> list[Any]:
        ids = [-1, 0, self.num_ids - 1, self.num_ids, 2**31, 2**63]
        keys: list[dict[Any, Any]] = [{self.key(i): 1.0} for i in ids]
        wrong = [True, "1", None, [], {}, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, -0.0, 1e308]
        values = [{self.key(1): value} for value in (*self.value.edges(), *wrong)]
        full = {self.key(i): 1.0 for i in range(self.num_ids)}
        too_many = {self.key(i): 1.0 for i in range(self.most + 1)}
        return [*keys, *values, full, too_many, {"x": 1.0}, {"": 1.0}, {" 1": 1.0}, {"1.0": 1.0}, {"+1": 1.0}]


@dataclass(frozen=True)
class Object:
    """A JSON object that `is_right` likes, with examples of either sort."""

    examples: tuple[dict[str, Any], ...]
    is_right: Callable[[dict[str, Any]], bool] = lambda value: True

    def has_type(self, value: Any) -> bool:
        return isinstance(value, dict)

    def allows(self, value: Any) -> bool:
        return isinstance(value, dict) and self.is_right(value)

    def edges(self) -> list[Any]:
        return list(self.examples)


@dataclass(frozen=True)
class Either:
    """A value of one of several kinds."""

    kinds: tuple[Kind, ...]

    def has_type(self, value: Any) -> bool:
        return any(kind.has_type(value) for kind in self.kinds)

    def allows(self, value: Any) -> bool:
        return any(kind.allows(value) for kind in self.kinds)

    def edges(self) -> list[Any]:
        return [value for kind in self.kinds for value in kind.edges()]


@dataclass(frozen=True)
class Nothing:
    """What is not supported yet: only switched off, or with a value that asks for nothing."""

    no_ops: tuple[Any, ...] = ()

    def has_type(self, value: Any) -> bool:
        return True

    def allows(self, value: Any) -> bool:
        return value is False or any(type(value) is type(one) and value == one for one in self.no_ops)

    def edges(self) -> list[Any]:
        return list(self.no_ops)
