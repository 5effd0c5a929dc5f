"""A histogram for what happens with every token: prometheus-client's own takes a lock or two for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """Of one event loop: it is filled and read by the same thread."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], labels: dict[str, str]) -> None:
        """buckets: their upper bounds, ascending; what is above the last is counted, too."""
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """The family, for a scrape."""
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        below = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), below, self._sum)
        yield family
