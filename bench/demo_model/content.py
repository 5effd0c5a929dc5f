"""The raw material of the demo corpus: names, cities, words, and who may see them.

Every drawn thing has a key, and a hash of the key decides whether it belongs to the training half or to the held-out
half. No list of test items is kept anywhere, so no task can leak one by accident: it has to go through `Draw`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Split = Literal["train", "test"]
Item = TypeVar("Item")

HELD_OUT_PERCENT = 10

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Quinn Rosa Sam Tom
Uma Victor Wendy Xena Yara Zoe Adam Bella Carl Diana Eric Fiona George Hanna Ivan Julia Kevin Laura Mark Nina Oscar
Petra Ralf Sarah Tina Ursula Vera Walter Alice Bob Carol Dan Eva Frank Gina Hugo Ines Jonas Karin Lucas Mia Nora Otto
Pia Robert Sofia Theo Ulrich Vincent Willa Amir Bianca Cora Dora Elias Finn Greta Hans Ida Jan Klara Lena Max Nils
Olga Peter Ruth Simon Tara Urs Viktor Wanda Aisha Bruno Chen Daria Emil Farid Gita Hiro Indira Jorge Kira Lars Mei
Nadia Omar Priya Ravi Sven Tariq Ute Viola Wei Yuki Zara John Mary James Linda Susan Nancy Lisa Karen Steven Brian
Edward Ronald Jason Jeff Ryan Gary Eve Larry Scott Helen Amy Angela""".split()

CITIES = """Paris London Berlin Rome Madrid Vienna Zurich Geneva Lisbon Dublin Oslo Stockholm Helsinki Copenhagen
Warsaw Prague Budapest Athens Istanbul Cairo Nairobi Lagos Tokyo Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai
Bangkok Hanoi Singapore Sydney Melbourne Auckland Toronto Montreal Boston Chicago Denver Seattle Austin Dallas Miami
Lima Bogota Santiago Munich Hamburg Cologne Milan Naples Venice Florence Lyon Nice Porto Seville Valencia Bern Basel
Lausanne Lucerne Graz Bergen Gothenburg Riga Tallinn Vilnius Sofia Bucharest Belgrade Zagreb Ankara Dubai Doha Tunis
Rabat Accra Dakar Quito Havana Houston Phoenix Portland Atlanta Detroit Manila Jakarta Perth""".split()

WORDS = """apple river stone lamp house garden window table chair bread water fire cloud rain snow storm light dark
green paper pencil book letter music song dance party friend family mother father sister brother child baby doctor
teacher farmer baker driver sailor pilot king queen prince castle tower bridge road street city village forest tree
leaf flower grass field mountain hill valley lake ocean beach island sand shell fish whale shark bird eagle owl duck
goose chicken horse cow sheep goat pig dog cat mouse rabbit fox wolf bear tiger lion monkey snake frog spider bee
butter cheese milk honey sugar salt pepper soup salad pasta rice potato tomato onion carrot lemon orange banana grape
cherry peach plum berry melon coffee tea juice cake cookie candy plate cup glass bottle knife fork spoon kitchen
bedroom door key lock clock watch phone camera radio train plane boat ship car truck bike wheel engine hammer nail
rope box bag hat coat shirt shoe sock glove scarf ring crown gold silver iron copper metal wood cotton wool silk
morning evening night summer winter spring autumn month year minute hour second monday friday sunday happy sad angry
brave quick slow small large short long young old warm cold hot sweet sour soft hard loud quiet clean dirty empty full
early late north south east west left right circle square line point number planet star moon sun earth space rocket
robot server model token cache memory block queue page batch worker kernel tensor matrix vector signal sample python
magic dragon giant pirate treasure map sword shield arrow hunter camp tent picnic holiday travel ticket hotel museum
market shop money coin bank office school pupil lesson question answer story poem puzzle game ball goal team winner
doll toy kite drum violin piano guitar flute paint brush color picture frame mirror candle basket blanket pillow bed
strawberry elephant giraffe penguin dolphin turtle lizard beetle panda zebra camel donkey otter badger squirrel""".split()

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white")
ANIMALS = ("dog", "cat", "horse", "cow", "sheep", "bird", "fish", "lion", "bear", "fox")
JOBS = ("baker", "doctor", "teacher", "farmer", "pilot", "driver", "painter", "singer", "writer", "nurse")

_ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl gr pl pr qu sh sk sl sm sn sp st sw th tr".split()
_VOWELS = "a e i o u a e i o u ai ea ee oa oo ou".split()
_CODAS = "b ck d g l ll m n nd ng nt p r rd rt s sh ss st t th x ve ze".split()


def is_held_out(key: str) -> bool:
    """Whether `key` belongs to the test half; about `HELD_OUT_PERCENT` in a hundred keys do."""
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Draw:
    """A seeded source of content that never crosses the border between the two halves."""

    rng: random.Random
    split: Split

    def allows(self, key: str) -> bool:
        """Whether this half may use the thing named `key`."""
        return is_held_out(key) == (self.split == "test")

    def choice(self, items: Sequence[Item]) -> Item:
        """Any item; for phrasing and other things that both halves share."""
        return items[self.rng.randrange(len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high], shared by both halves."""
        return self.rng.randint(low, high)

    def _own(self, items: Sequence[str]) -> str:
        while True:
            item = self.choice(items)
            if self.allows(item.lower()):
                return item

    def pseudo_word(self, syllables: int) -> str:
        """A word nobody knows, so that letters and copying are learnt rather than words."""
        while True:
            parts = [self.choice(_ONSETS) + self.choice(_VOWELS) for _ in range(syllables)]
            word = "".join(parts) + (self.choice(_CODAS) if self.chance(0.6) else "")
            if self.allows(word):
                return word

    def word(self, longest: int = 10) -> str:
        """A lower-case word of at most `longest` letters; in training often an invented one."""
        invent = 0.45 if self.split == "train" else 0.0
        while True:
            word = self.pseudo_word(self.number(1, 3)) if self.chance(invent) else self._own(WORDS)
            if len(word) <= longest:
                return word

    def name(self) -> str:
        """A first name; in training sometimes an invented one, so that unknown names are copied too."""
        if self.split == "train" and self.chance(0.4):
            return self.pseudo_word(2).capitalize()
        return self._own(NAMES)

    def city(self) -> str:
        """A city; in training sometimes an invented one."""
        if self.split == "train" and self.chance(0.4):
            return self.pseudo_word(self.number(2, 3)).capitalize()
        return self._own(CITIES)

    def words(self, count: int) -> list[str]:
        """`count` different words."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.word()] = None
        return list(found)
