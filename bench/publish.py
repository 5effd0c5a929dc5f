"""A comparison's table and plot in a document: `python -m bench.publish build/comparison.json docs/performance.md`.

What stands between the document's two marks is replaced; the plot goes into a folder `images` beside it. Needs the
extra `plots`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.comparison import LIMIT

BEGIN, END = "<!-- comparison: begin -->", "<!-- comparison: end -->"
PLOT = "comparison.svg"
_PLOTTED = (
    "c1_output_tok_per_s", "c4_output_tok_per_s", "c16_output_tok_per_s", "c1_inter-token_p50_ms",
    "c16_inter-token_p50_ms", "c16_TTFT_p50_ms", "prompt_of_1024_TTFT_ms", "16_suffixes_at_once_TTFT_ms",
)  # fmt: skip
_COLORS = {"ours": "#c0392b", "ours-int8": "#e08a7d", "ours-w8a8": "#edb8b0", LIMIT: "#cccccc"}
_OTHER = "#5b7fa6"


def block(comparison: dict[str, Any]) -> str:
    """What is written between the marks."""
    machine, date = comparison["machine"], comparison["date"]
    versions = ", ".join(f"{name} {version}" for name, version in comparison["peers"].items() if version)
    modified = " with changes" if comparison["modified"] else ""
    return "\n".join(
        [
            f"{date[:4]}-{date[4:6]}-{date[6:8]}, commit {comparison['commit'][:10]}{modified}; {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}; "
            f"{versions}; `{comparison['command']}`.",
            "",
            comparison["markdown"],
            "",
            f"![the same as bars](images/{PLOT})",
        ]
    )


def insert(document: str, text: str) -> str:
    """The document with `text` between its marks. Raises ValueError if it has none."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def plot(comparison: dict[str, Any], path: Path) -> None:
    """Bars of each peer's median, with its least and its largest, one chart for each figure."""
    from matplotlib.figure import Figure  # an extra of its own

    table = {row["figure"]: row for row in comparison["table"]}
    keys = [key for key in _PLOTTED if key in table]
    columns = 4
    figure = Figure(figsize=(3.2 * columns, 2.6 * -(-len(keys) // columns)), layout="constrained")
    for number, key in enumerate(keys):
        axes = figure.add_subplot(-(-len(keys) // columns), columns, number + 1)
        peers = table[key]["peers"]
        medians = [one["median"] for one in peers.values()]
        below = [one["median"] - one["min"] for one in peers.values()]
        above = [one["max"] - one["median"] for one in peers.values()]
        colors = [_COLORS.get(name, _OTHER) for name in peers]
        axes.barh(list(peers), medians, xerr=[below, above], color=colors, ecolor="#333333", capsize=2)
        axes.invert_yaxis()
        better = "more" if table[key]["is_higher_better"] else "less"
        axes.set_title(f"{key.replace('_per_', '/').replace('_', ' ')} ({better} is better)", fontsize=8)
        axes.tick_params(labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("document", type=Path)
    arguments = parser.parse_args()
    comparison = json.loads(arguments.comparison.read_text(encoding="utf-8"))
    text = insert(arguments.document.read_text(encoding="utf-8"), block(comparison))
    plot(comparison, arguments.document.parent / "images" / PLOT)
    arguments.document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
