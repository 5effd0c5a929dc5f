"""What the rounds of a comparison come to: medians, spreads, ratios, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cases import Figure

LIMIT = "limit"  # what the machine allows, as if it were a peer
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


@dataclass(slots=True)
class Row:
    """One figure of all peers, and how ours stands to the best of the others."""

    figure: Figure
    spreads: dict[str, Spread]  # by peer; only those that have the figure
    best: str = ""  # of the peers that do the same work as ours
    ratio: float | None = None  # above 1: ours is better
    ratios: dict[str, float] = field(default_factory=dict)  # of each of ours to each peer of its precision: "OURS/PEER"
    of_limit: float | None = None  # ours; 1 is what the machine allows


def rows(
    figures: Sequence[Figure], rounds: Sequence[PeerRound], own: Sequence[str], precisions: Mapping[str, str]
) -> list[Row]:
    """A row for each figure that any peer has; only peers of the same precision are compared.

    own: our servers; the first is the one that `best` and `ratio` are about.
    """
    found, ours = [], own[0]
    for figure in figures:
        spreads = {peer: spread for peer in precisions if (spread := _spread(figure, peer, rounds)) is not None}
        if not spreads:
            continue
        medians = {peer: spread.median for peer, spread in spreads.items()}
        pairs = [
            (mine, peer)
            for mine in own
            for peer in medians
            if mine in medians and peer not in own and precisions[peer] == precisions[mine]
        ]
        ratios = {pair: _ratio(figure, medians[pair[0]], medians[pair[1]]) for pair in pairs}
        row = Row(
            figure, spreads, ratios={"/".join(pair): ratio for pair, ratio in ratios.items() if ratio is not None}
        )
        rivals = [peer for mine, peer in pairs if mine == ours]
        if rivals:
            row.best = (max if figure.is_higher_better else min)(rivals, key=lambda peer: medians[peer])
            row.ratio = ratios[ours, row.best]
        if ours in medians and LIMIT in medians:
            row.of_limit = _ratio(figure, medians[ours], medians[LIMIT])
        found.append(row)
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
    lines = ["| case | " + " | ".join(peers) + " | best peer | ours to it | ours to the limit |"]
    lines.append("|---" * (len(peers) + 4) + "|")
    for row in table:
        cells = [str(row.spreads[peer]) if peer in row.spreads else "-" for peer in peers]
        cells += [row.best or "-", "-" if row.ratio is None else f"{row.ratio:.2f}x"]
        cells.append("-" if row.of_limit is None else f"{row.of_limit:.0%}")
        lines.append(f"| {row.figure.name}, {row.figure.unit} | " + " | ".join(cells) + " |")
    lines += ["", "Median (min-max) of the rounds; a ratio above 1 means that ours is better."]
    if any(spread.foreign_cores > NOTABLE_CORES for row in table for spread in row.spreads.values()):
        lines.append(f"\\* other processes used more than {NOTABLE_CORES} cores beside it in some round.")
    return "\n".join(lines)


def ratios_markdown(table: Sequence[Row]) -> str:
    """How each of our servers stands to each peer of its precision, a line for each figure."""
    pairs = list(dict.fromkeys(pair for row in table for pair in row.ratios))
    if not pairs:
        return ""
    lines = [
        "| case | " + " | ".join(pair.replace("/", " to ") for pair in pairs) + " |",
        "|---" * (len(pairs) + 1) + "|",
    ]
    for row in table:
        if row.ratios:
            cells = [f"{row.ratios[pair]:.2f}x" if pair in row.ratios else "-" for pair in pairs]
            lines.append(f"| {row.figure.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for a file."""
    return [
        {
            "figure": row.figure.key,
            "is_higher_better": row.figure.is_higher_better,
            "best_peer": row.best,
            "ratio": row.ratio,
            "ratios": row.ratios,
            "of_limit": row.of_limit,
            "peers": {
                peer: {"median": one.median, "min": one.low, "max": one.high, "rounds": one.num}
                for peer, one in row.spreads.items()
            },
        }
        for row in table
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
