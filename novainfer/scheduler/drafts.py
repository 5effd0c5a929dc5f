"""How many drafts a sequence may have: prompt lookup that must pay. Pure; in the scheduler.

The ranks look for the last tokens earlier in the same text, and guess that what followed them there follows again. A
guess costs the time of one more token in the step, and is worth the time of a token if it comes true. Together those of
a step must also pay for its being one with drafts, whose price the scheduler learns (`pace`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DRAFTS = 15  # with the token before them two passes of the CPU kernels over the weights
_MEMORY = 0.9  # of what earlier drafts came to, after each new one
_FOUND_MEMORY = 0.7  # of whether earlier looks found any
_LONGEST_PAUSE = 64  # steps
# After so many looks in vain, made, or not made since they would not have paid, a row looks in every second step only,
# after twice as many in every fourth, and so on, until looks take no more than this share of the time. Rows that look
# in the same steps leave all others undisturbed.
_VAIN_LOOKS = 2
_LOOKS_SHARE = 0.02
_LONGEST_PERIOD = 32
# Of scheduler and ranks, for a step in which some row looks, and for each that does; measured on a slow core.
_LOOK_SECONDS, _ROW_SECONDS = 100e-6, 10e-6
_LEAST_HITS, _MOST_HITS = 0.05, 0.98
_DEAR = 0.9  # a draft that costs so much of a token's time cannot pay


def look_seconds(num_rows: int) -> float:
    """Of a step in which so many rows look, whether or not they find any."""
    return _LOOK_SECONDS + num_rows * _ROW_SECONDS


def look_period(num_rows: int, step_seconds: float) -> int:
    """How seldom so many rows may have to look once they did so in vain, by the time that a step takes: a power of two
    of steps. 1 while that is unknown: 0.
    """
    if not step_seconds:
        return 1
    least = look_seconds(num_rows) / (_LOOKS_SHARE * step_seconds)
    return min(1 << math.ceil(math.log2(max(least, 1.0))), _LONGEST_PERIOD)


@dataclass(slots=True)
class DraftPace:
    """What one sequence's drafts came to."""

    hits: float = 1.4  # drafts that came true, forgetting
    trials: float = 2.0  # those, and the first of each row that did not
    pause: int = 0  # steps without drafts after the last ones, none of which came true
    left: int = 0  # of them
    found: float = 0.3  # share of looks that found drafts, forgetting
    is_tried: bool = False  # it had drafts once, whether or not that was expected to pay
    vain: int = 2 * _VAIN_LOOKS  # looks in vain since drafts came true one after another: at first in every fourth step

    def looks(self, step: int, longest_period: int) -> bool:
        """Whether it may have drafts in this step at all. longest_period: see `look_period`."""
        return not step % self.period(longest_period)

    def period(self, longest: int) -> int:
        """In every how many steps it looks: a power of two."""
        return min(1 << min(self.vain // _VAIN_LOOKS, _LONGEST_PERIOD.bit_length()), longest)

    def wanted(self, cost: float) -> int:
        """Drafts for the next step. cost: the time that one adds to it, over the time of each token that it yields."""
        if self.left:
            self.left -= 1
            return 0
        if cost >= _DEAR:
            return 0
        chance = self._chance
        # The n-th comes true if all before it do: chance ** n, and pays as long as that is above its cost.
        count = int(math.log(max(cost, 1e-3)) / math.log(chance))
        return min(max(count, 1), MAX_DRAFTS)  # one now and then, to see whether the text repeats itself by now

    def gain(self, count: int, cost: float) -> float:
        """What a look for so many drafts is expected to yield, over the time of a token. cost: as in `wanted`."""
        chance = self._chance
        return self.found * (chance * (1.0 - chance**count) / (1.0 - chance) - count * cost)

    @property
    def _chance(self) -> float:
        return min(max(self.hits / self.trials, _LEAST_HITS), _MOST_HITS)

    def observe(self, drafted: int, true: int) -> None:
        """Of so many drafts so many came true. To look is not free either, least of all where a step is short."""
        self.found = self.found * _FOUND_MEMORY + (1.0 - _FOUND_MEMORY) * (drafted > 0)
        if not drafted:
            self.vain += 1
            return
        if true > 1:  # one alone is chance
            self.vain = 0
        self.hits = self.hits * _MEMORY + true
        self.trials = self.trials * _MEMORY + true + (true < drafted)
        self.pause = 0 if true else min(2 * self.pause + 1, _LONGEST_PAUSE)
        self.left = self.pause
