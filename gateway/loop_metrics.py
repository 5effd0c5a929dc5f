"""Histograms and counters for what happens with every token or request: prometheus-client's own take a lock or two for
each value. Of one event loop: they are filled and read by the same thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """A family with one series."""

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


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add so much."""
        self.value += amount


class LoopCounter(Collector):
    """A family. Without label names it has its one series at once, else those that were asked for."""

    def __init__(self, name: str, help_text: str, label_names: Sequence[str] = ()) -> None:
        self._name = name
        self._help = help_text
        self._label_names = label_names
        self._series: dict[tuple[str, ...], Count] = {} if label_names else {(): Count()}

    def labels(self, *values: str) -> Count:
        """The series with these."""
        count = self._series.get(values)
        if count is None:
            count = self._series[values] = Count()
        return count

    def collect(self) -> Iterator[Metric]:
        """The family, for a scrape."""
        family = CounterMetricFamily(self._name, self._help, labels=self._label_names)
        for values, count in self._series.items():
            family.add_metric(values, count.value)
        yield family
