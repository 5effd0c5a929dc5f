"""How long a step will take, learnt from those before: one tenant's rows shall not slow everybody's steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add, attrgetter, mul

from novainfer.scheduler.batch import StepRecord

# Tenants far above their share may make a step so many times as long; steps of up to so many seconds disturb nobody.
MOST_GROWTH = 1.5
UNDISTURBED_SECONDS = 0.02
_KEPT = 0.99  # of what earlier steps said, after each step
_RIDGE = 1e-3
_TELLING = 0.1  # sizes of steps (in units) that differ less, squared and summed, say nothing of a token's price
_NOTABLE = 0.1  # units; what differs more from the usual size is worth an answer at once
_MIN_STEPS = 20
_LEARNT_EVERY = 8  # steps: to note one down takes less time than to take it in, and than to solve
_UNKNOWN_COST = 0.3  # of one more token, before anything was measured
_CONTEXT_UNIT = 1000.0  # tokens; keeps the numbers of one size
_TOKEN_UNIT = 100.0
_SIZE = 4  # numbers to learn
_DIAGONAL = (0, 4, 7, 9)  # of a symmetric matrix of that size, whose upper half is one list, row by row
_HALF = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))  # where each of its items is there
_DECAY = (_KEPT,) * 10
_RIDGES = tuple(_RIDGE * (1 - _KEPT) if i in _DIAGONAL else 0.0 for i in range(10))
_FEW_DRAFTS = 2.0  # steps with drafts that are assumed until there were some
_DRAFTS_PART = 0.25  # of a step's time: what drafts added to those
_IS_FINISHED = attrgetter("finished")


class StepPace:
    """Least squares, forgetting: seconds = a + b * tokens computed + c * tokens of context that they attend to + d, if
    there are drafts among them.

    Drafts have a price of their own: with them the ranks look for them, and a few rows become more than kernels take in
    one pass.
    """

    def __init__(self) -> None:
        self._moments = [_RIDGE if i in _DIAGONAL else 0.0 for i in range(_DIAGONAL[-1] + 1)]
        self._sums = [0.0] * _SIZE
        self._last_result = 0.0  # when it came
        self._num_steps = 0
        self._price: float | None = None  # of a token unit, when steps last differed enough in size to tell
        self._untaken: list[tuple[float, int, int, int]] = []  # steps that wait to be taken together
        self._weights: tuple[float, ...] | None = None

    def measure(self, record: StepRecord, now: float, num_drafted: int) -> None:
        """A step's result is here. How long it took, from the result before it or its submission, which is known; one
        that nobody needs may have been left.
        """
        began = max(self._last_result, record.submitted or 0.0)
        self._last_result = now
        if now > began and not all(map(_IS_FINISHED, record.sequences)):
            self.observe(now - began, record.num_tokens, record.context, num_drafted)

    def observe(self, seconds: float, num_tokens: int, context: int, num_drafted: int = 0) -> None:
        """A step with so many tokens, and drafts besides, took so long."""
        self._untaken.append((seconds, num_tokens, context, num_drafted))
        self._num_steps += 1
        if self._num_steps % _LEARNT_EVERY == 0 or self._num_steps <= _MIN_STEPS:
            for step in self._untaken:
                self._take(*step)
            self._weights = None
            usual = self._moments[1] / self._moments[0]
            if any(abs(size / _TOKEN_UNIT - usual) > _NOTABLE for _, size, _, _ in self._untaken):
                self._learnt()  # a token's price can be told now, and not for ever
            self._untaken.clear()

    def _take(self, seconds: float, num_tokens: int, context: int, num_drafted: int) -> None:
        t, c, d = (num_tokens + num_drafted) / _TOKEN_UNIT, context / _CONTEXT_UNIT, float(num_drafted > 0)
        products = (1.0, t, c, d, t * t, t * c, t * d, c * c, c * d, d * d)
        moments = [*map(add, map(add, map(mul, self._moments, _DECAY), products), _RIDGES)]
        sums = [*map(add, map(mul, self._sums, _DECAY), (seconds, t * seconds, c * seconds, d * seconds))]
        # Few steps have drafts: as long as no more is known, they count as so much dearer.
        moments[-1] += _FEW_DRAFTS * (1 - _KEPT)
        sums[-1] += _FEW_DRAFTS * (1 - _KEPT) * _DRAFTS_PART * seconds
        self._moments, self._sums = moments, sums

    def rows_allowed(self, base: Sequence[int], others: Sequence[int]) -> int:
        """How many of `others` a step with the rows `base` may hold too; each row is given by its context in tokens."""
        if self._num_steps < _MIN_STEPS:
            return len(others)
        allowed = max(MOST_GROWTH * self._predict(len(base), sum(base)), UNDISTURBED_SECONDS)
        context = sum(base)
        for count, length in enumerate(others):
            context += length
            if self._predict(len(base) + count + 1, context) > allowed:
                return count
        return len(others)

    def more_tokens(self, seconds: float, num_tokens: int, context: int) -> float:
        """How many more tokens such a step may have to take no longer, below 0 where it takes longer already; infinite
        as long as that is not known.

        Steps of one size, as of decodes alone, do not tell what a token takes: then it is what it took before them.
        """
        if self._num_steps < _MIN_STEPS:
            return math.inf
        left, price = seconds - self._predict(num_tokens, context), self._price
        return _TOKEN_UNIT * left / price if price else math.inf

    def is_long(self, num_tokens: int, context: int) -> bool:
        """Whether such a step disturbs who waits for its end."""
        return self._num_steps >= _MIN_STEPS and self._predict(num_tokens, context) > UNDISTURBED_SECONDS

    def step_seconds(self, num_tokens: int, context: int) -> float:
        """Of such a step; 0: not known yet."""
        return self._predict(num_tokens, context) if self._num_steps >= _MIN_STEPS else 0.0

    def cost_of_token(self, num_tokens: int, context: int) -> float:
        """What one more token adds to such a step, over the time of each of its tokens."""
        if self._num_steps < _MIN_STEPS:
            return _UNKNOWN_COST
        seconds = self._predict(num_tokens, context)
        one_more = self._predict(num_tokens + 1, context) - seconds
        return one_more * num_tokens / seconds if seconds > 0 else _UNKNOWN_COST

    def cost_of_drafts(self, num_tokens: int, context: int) -> float:
        """What drafts add to such a step, however few, over the time of each of its tokens; 0: not known yet."""
        seconds = self.step_seconds(num_tokens, context)
        return self._learnt()[3] * num_tokens / seconds if seconds > 0 else 0.0

    def _predict(self, num_tokens: int, context: int) -> float:
        a, b, c, _ = self._learnt()
        return a + b * num_tokens / _TOKEN_UNIT + c * context / _CONTEXT_UNIT

    def _learnt(self) -> tuple[float, ...]:
        if self._weights is None:
            matrix = [[self._moments[i] for i in row] for row in _HALF]
            self._weights = tuple(max(value, 0.0) for value in _solve(matrix, self._sums))
            count, tokens, squares = matrix[0][0], matrix[0][1], matrix[1][1]
            if squares - tokens * tokens / count > _TELLING and self._weights[1] > 0.0:
                self._price = self._weights[1]
        return self._weights


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution of a small positive definite system, by elimination."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [below - factor * above for below, above in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
