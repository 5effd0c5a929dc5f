"""Makes one set of metrics of several gateways: each writes its own into the run directory, whoever is scraped adds up.

A scrape of the port that gateways share reaches any of them, and has to say the same. A gateway that dies leaves its
file to its successor, which goes on from there: what was told had been written, so no counter ever goes back.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric

from novainfer.transport.addresses import RunDir

log = logging.getLogger(__name__)

_Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels
_LASTING = ("counter", "histogram")  # what outlives its process
_NOT_ADDED = "_created"  # when a process began to count is nobody's business but its own


@dataclass(slots=True)
class _Family:
    kind: str
    help_text: str
    samples: dict[_Key, float] = field(default_factory=dict)


_Families = dict[str, _Family]


class MetricsFiles:
    """Of one gateway: its own file, and those of the others."""

    def __init__(self, run_dir: RunDir, index: int, *, is_successor: bool) -> None:
        """is_successor: it goes on where one that died has left off; else what lies there is of another server."""
        self._mine = run_dir.metrics_file(index)
        self._all = run_dir
        self._written: _Families = {}
        self._is_failing = False  # the last file could not be written
        self._before = _read(self._mine) if is_successor else {}
        for name in [name for name, family in self._before.items() if family.kind not in _LASTING]:
            del self._before[name]

    def publish(self, mine: Iterable[Metric]) -> None:
        """Write this gateway's file, if there is news. Whoever reads it meanwhile gets the old one.

        One that cannot be written (the disk is full) is logged, and is news until it can.
        """
        self._write(self._own(mine))

    def merged(self, mine: Iterable[Metric]) -> list[Metric]:
        """This gateway's families with those that the others wrote last added to them.

        Its own are written first: a successor goes on from what was told, if this gateway dies in the next moment.
        """
        own = self._own(mine)
        self._write(own)
        families: _Families = {}
        _add(families, own)
        for file in self._all.metrics_files():
            if file != self._mine:
                _add(families, _read(file))
        return [_metric(name, family) for name, family in families.items()]

    def _own(self, mine: Iterable[Metric]) -> _Families:
        """Of this gateway and those whose place it has taken."""
        families = _gathered(mine)
        _add(families, self._before)
        return families

    def _write(self, families: _Families) -> None:
        if families == self._written:
            return
        wire = {
            name: [family.kind, family.help_text, [[*key, value] for key, value in family.samples.items()]]
            for name, family in families.items()
        }
        temporary = self._mine.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(wire), encoding="utf-8")
            os.replace(temporary, self._mine)
        except OSError as error:  # figures are not worth a gateway
            if not self._is_failing:
                log.warning("cannot write %s, and goes on trying: %s", self._mine, error)
            self._is_failing = True
            return
        self._written, self._is_failing = families, False


def _gathered(metrics: Iterable[Metric]) -> _Families:
    families: _Families = {}
    for metric in metrics:
        family = families[metric.name] = _Family(metric.type, metric.documentation)
        for sample in metric.samples:
            if not sample.name.endswith(_NOT_ADDED):
                family.samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return families


def _add(families: _Families, others: _Families) -> None:
    for name, other in others.items():
        family = families.setdefault(name, _Family(other.kind, other.help_text))
        for key, value in other.samples.items():
            family.samples[key] = family.samples.get(key, 0.0) + value


def _metric(name: str, family: _Family) -> Metric:
    metric = Metric(name, family.help_text, family.kind)
    for (sample, labels), value in family.samples.items():
        metric.add_sample(sample, dict(labels), value)
    return metric


def _read(file: Path) -> _Families:
    """Empty if there is none."""
    try:
        wire = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {
        name: _Family(
            kind, help_text, {(sample, tuple((k, v) for k, v in labels)): value for sample, labels, value in samples}
        )
        for name, (kind, help_text, samples) in wire.items()
    }
