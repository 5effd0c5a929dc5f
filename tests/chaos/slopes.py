"""Whether something grows: the robust slope of samples over time (Theil and Sen), and how sure it is. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Sample = tuple[float, float]  # (time, value)
_Z95 = 1.959964


@dataclass(frozen=True)
class Slope:
    """Units of the value per unit of time, with 95 % confidence between `low` and `high` if samples are independent."""

    median: float
    low: float
    high: float
    num_samples: int


def after_warm_up(samples: Sequence[Sample], share: float, at_least: float) -> list[Sample]:
    """Without those of the first `share` of their time, or of the first `at_least` units of it."""
    if not samples:
        return []
    first, last = samples[0][0], samples[-1][0]
    begin = first + max(share * (last - first), at_least)
    return [sample for sample in samples if sample[0] >= begin]


def theil_sen(runs: Sequence[Sequence[Sample]]) -> Slope | None:
    """The median slope over all pairs of samples of the same run; None if there are fewer than two such samples.

    A run is what one process has been measured at; its successor begins another one, at a level of its own. The bounds
    are Sen's (1968), from the variance of Kendall's statistic, summed over the runs.
    """
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for run in runs
        for number, later in enumerate(run)
        for earlier in run[:number]
        if later[0] > earlier[0]
    )
    if not slopes:
        return None
    sizes = [len(run) for run in runs]
    variance = sum(size * (size - 1) * (2 * size + 5) / 18 for size in sizes)
    reach = _Z95 * math.sqrt(variance) / 2
    low = max(0, math.floor(len(slopes) / 2 - reach))
    high = min(len(slopes) - 1, math.ceil(len(slopes) / 2 + reach))
    return Slope(statistics.median(slopes), slopes[low], slopes[high], sum(sizes))
