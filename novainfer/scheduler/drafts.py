"""How many drafts a sequence may have: prompt lookup that must pay. Pure; in the scheduler.

The ranks look for the last tokens earlier in the same text, and guess that what followed them there follows again. A
guess costs the time of one more token in the step, and is worth the time of a token if it comes true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DRAFTS = 15  # with the token before them two passes of the CPU kernels over the weights
_MEMORY = 0.9  # of what earlier drafts came to, after each new one
_LONGEST_PAUSE = 64  # steps
_LEAST_HITS, _MOST_HITS = 0.05, 0.98
_DEAR = 0.9  # a draft that costs so much of a token's time cannot pay


@dataclass(slots=True)
class DraftPace:
    """What one sequence's drafts came to."""

    hits: float = 1.4  # drafts that came true, forgetting
    trials: float = 2.0  # those, and the first of each row that did not
    pause: int = 0  # steps without drafts after the last ones, none of which came true
    left: int = 0  # of them

    def wanted(self, cost: float) -> int:
        """Drafts for the next step. cost: the time that one adds to it, over the time of each token that it yields."""
        if self.left:
            self.left -= 1
            return 0
        if cost >= _DEAR:
            return 0
        chance = min(max(self.hits / self.trials, _LEAST_HITS), _MOST_HITS)
        # The n-th comes true if all before it do: chance ** n, and pays as long as that is above its cost.
        count = int(math.log(max(cost, 1e-3)) / math.log(chance))
        return min(max(count, 1), MAX_DRAFTS)  # one now and then, to see whether the text repeats itself by now

    def observe(self, drafted: int, true: int) -> None:
        """Of so many drafts so many came true."""
        if not drafted:
            return
        self.hits = self.hits * _MEMORY + true
        self.trials = self.trials * _MEMORY + true + (true < drafted)
        self.pause = 0 if true else min(2 * self.pause + 1, _LONGEST_PAUSE)
        self.left = self.pause
