"""What the rounds of a comparison come to: medians, spreads, ratios, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cases import Figure

NOTABLE_CORES = 0.1  # foreign CPU use that puts a figure in doubt


@dataclass(slots=True)
class PeerRound:
    """One peer in one round: its figures by key, and what went on beside them."""

    peer: str
    round: int
    values: dict[str, float] = field(default_factory=dict)
    foreign_cores: dict[str, float] = field(default_factory=dict)  # by the figure's key
    stolen_cores: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by case


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure of one peer over all rounds."""

    median: float
    low: float
    high: float
    num: int
    foreign_cores: float  # the most in any round

    def __str__(self) -> str:
        text = (
            f"{_short(self.median)} ({_short(self.low)}-{_short(self.high)})" if self.num > 1 else _short(self.median)
        )
        return f"{text} *" if self.foreign_cores > NOTABLE_CORES else text


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all peers, and how ours stands to the best of the others."""

    figure: Figure
    spreads: dict[str, Spread]  # by peer; only those that have the figure
    best: str = ""  # of the peers that do the same work as ours
    ratio: float | None = None  # above 1: ours is better


def rows(figures: Sequence[Figure], rounds: Sequence[PeerRound], ours: str, precisions: Mapping[str, str]) -> list[Row]:
    """A row for each figure that any peer has; peers of another precision than ours are shown, not compared."""
    found = []
    for figure in figures:
        spreads = {peer: spread for peer in precisions if (spread := _spread(figure, peer, rounds)) is not None}
        if not spreads:
            continue
        rivals = [peer for peer in spreads if peer != ours and precisions[peer] == precisions.get(ours)]
        if ours not in spreads or not rivals:
            found.append(Row(figure, spreads))
            continue
        choose = max if figure.is_higher_better else min
        best = choose(rivals, key=lambda peer: spreads[peer].median)
        found.append(Row(figure, spreads, best, _ratio(figure, spreads[ours].median, spreads[best].median)))
    return found


def _spread(figure: Figure, peer: str, rounds: Sequence[PeerRound]) -> Spread | None:
    mine = [one for one in rounds if one.peer == peer and figure.key in one.values]
    if not mine:
        return None
    values = [one.values[figure.key] for one in mine]
    foreign = max(one.foreign_cores.get(figure.key, 0.0) for one in mine)
    return Spread(statistics.median(values), min(values), max(values), len(values), foreign)


def _ratio(figure: Figure, ours: float, best: float) -> float | None:
    above, below = (ours, best) if figure.is_higher_better else (best, ours)
    return above / below if below > 0 else None


def markdown(table: Sequence[Row], peers: Sequence[str]) -> str:
    """The table, a line for each figure. A star marks what ran beside notable foreign CPU use."""
    lines = ["| case | " + " | ".join(peers) + " | best peer | ours to it |", "|---" * (len(peers) + 3) + "|"]
    for row in table:
        cells = [str(row.spreads[peer]) if peer in row.spreads else "-" for peer in peers]
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else "-"
        lines.append(f"| {row.figure.name}, {row.figure.unit} | " + " | ".join([*cells, row.best or "-", ratio]) + " |")
    lines += ["", "Median (min-max) of the rounds; a ratio above 1 means that ours is better."]
    if any(spread.foreign_cores > NOTABLE_CORES for row in table for spread in row.spreads.values()):
        lines.append(f"\\* other processes used more than {NOTABLE_CORES} cores beside it in some round.")
    return "\n".join(lines)


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for a file."""
    return [
        {
            "figure": row.figure.key,
            "is_higher_better": row.figure.is_higher_better,
            "best_peer": row.best,
            "ratio": row.ratio,
            "peers": {
                peer: {"median": one.median, "min": one.low, "max": one.high, "rounds": one.num}
                for peer, one in row.spreads.items()
            },
        }
        for row in table
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
