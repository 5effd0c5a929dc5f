"""The raw material of the demo corpus: names, cities, words, and who may see them.

Every drawn thing has a key, and a hash of the key decides whether it belongs to the training part or to the
held-out part. No list of test items is kept anywhere, so no task can leak one by accident.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from bench.demo_model.texts import load_text

Split = Literal["train", "test"]
Item = TypeVar("Item")

HELD_OUT_PERCENT = 10
_LISTS = {name: str(text).split() for name, text in load_text("lists").items()}
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white")
ANIMALS = ("dog", "cat", "horse", "cow", "sheep", "bird", "fish", "lion", "bear", "fox")
JOBS = ("baker", "doctor", "teacher", "farmer", "pilot", "driver", "painter", "singer", "writer", "nurse")


def is_held_out(key: str) -> bool:
    """Whether `key` belongs to the held-out part; about `HELD_OUT_PERCENT` in a hundred keys do."""
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Draw:
    """A seeded source of content that never crosses the border between the two parts."""

    rng: random.Random
    split: Split

    def allows(self, key: str) -> bool:
        """Whether this part may use the thing named `key`."""
        return is_held_out(key) == (self.split == "test")

    def choice(self, items: Sequence[Item]) -> Item:
        """Any item; for phrasing and other things that both parts share."""
        return items[self.rng.randrange(len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high], shared by both parts."""
        return self.rng.randint(low, high)

    def _own(self, items: Sequence[str]) -> str:
        while True:
            item = self.choice(items)
            if self.allows(item.lower()):
                return item

    def pseudo_word(self, syllables: int) -> str:
        """A word nobody knows, so that letters and copying are learnt rather than words."""
        while True:
            parts = [self.choice(_LISTS["onsets"]) + self.choice(_LISTS["vowels"]) for _ in range(syllables)]
            word = "".join(parts) + (self.choice(_LISTS["codas"]) if self.chance(0.6) else "")
            if self.allows(word):
                return word

    def word(self, longest: int = 10) -> str:
        """A lower-case word of at most `longest` letters; in training often an invented one."""
        invent = 0.6 if self.split == "train" else 0.0
        while True:
            word = self.pseudo_word(self.number(1, 3)) if self.chance(invent) else self._own(_LISTS["words"])
            if len(word) <= longest:
                return word

    def name(self) -> str:
        """A first name; in training sometimes an invented one, so that unknown names are copied too."""
        if self.split == "train" and self.chance(0.5):
            return self.pseudo_word(2).capitalize()
        return self._own(_LISTS["names"])

    def city(self) -> str:
        """A city; in training sometimes an invented one."""
        if self.split == "train" and self.chance(0.5):
            return self.pseudo_word(self.number(2, 3)).capitalize()
        return self._own(_LISTS["cities"])

    def words(self, count: int) -> list[str]:
        """`count` different words."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.word()] = None
        return list(found)
