"""What it costs to say no: `python -m bench.refusals` keeps a server full and, in every second window, also sends it
requests that it has no room for.

Windows with and without lie side by side, so that a machine that changes from minute to minute says little of it.
The load takes cores too: what each side takes more in the windows with refusals tells whose cost it is.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.http_stream import Target
from bench.overload import SIZES, SPREAD, usage
from bench.server import started_server
from bench.serving import DEFAULT_VOCABULARY, first_model
from bench.tenants import Job, LoadProcesses, Seen, Tenant

CLIENTS = 64 + 1024  # as many as the server has rows and places to wait: all are taken
WINDOW, SETTLE = 10.0, 1.5  # seconds measured; before that, with the load as it then is
LEAD = 12.0  # seconds until the first window: the load is drawn, every place taken


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of the load."""

    has_refusals: bool
    tokens_per_second: float
    cores: dict[str, float]  # by process


def run(url: str, model: str, pairs: int, rate: float) -> tuple[Seen, list[Window], list[Seen]]:
    """The load that keeps the server full, its windows, and what came of the requests without room."""
    num_input, num_output = SIZES["overload"]
    total = LEAD + pairs * 2 * (SETTLE + WINDOW + 1.0)
    windows, refused = [], []
    with LoadProcesses(2) as processes:
        full = Tenant(None, CLIENTS, num_input, num_output, spread=SPREAD)
        load = processes.start(Job(url, model, (full,), total, DEFAULT_VOCABULARY, 1))
        time.sleep(LEAD)
        more = Tenant(None, 0, num_input, num_output, rate, SPREAD)
        for number in range(2 * pairs):
            has_refusals = number % 4 in (1, 2)
            job = Job(url, model, (more,), SETTLE + WINDOW, DEFAULT_VOCABULARY, 2 + number)
            sent = processes.start(job) if has_refusals else None
            time.sleep(SETTLE)
            windows.append(_watch(url, has_refusals))
            if sent is not None:
                refused += sent.result()
        if load.done():
            raise SystemExit("the load ended before the last window did")
        (seen,) = load.result()
    return seen, windows, refused


def _watch(url: str, has_refusals: bool) -> Window:
    before, tokens_before, start = usage(), _generated_tokens(url), time.monotonic()
    time.sleep(WINDOW)
    after, tokens_after, took = usage(), _generated_tokens(url), time.monotonic() - start
    names = before.keys() & after.keys()
    cores = {name: (after[name].cpu_seconds - before[name].cpu_seconds) / took for name in names}
    return Window(has_refusals, (tokens_after - tokens_before) / took, cores)


def _generated_tokens(url: str) -> float:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("novainfer_generation_tokens_total"))


def figures_of(seen: Seen, windows: Sequence[Window], refused: Sequence[Seen]) -> dict[str, Any]:
    """Tokens a second with refusals in terms of those without, pair by pair, and each process's cores in both."""
    rates = [[w.tokens_per_second for w in windows if w.has_refusals is kind] for kind in (True, False)]
    pairs = list(zip(*rates, strict=True))
    ratios = [with_refusals / without for with_refusals, without in pairs]
    found: dict[str, Any] = {
        "goodput_ratio_median": statistics.median(ratios),
        "goodput_ratio_least": min(ratios),
        "goodput_ratio_most": max(ratios),
        "goodput_ratio_of_sums": sum(a for a, _ in pairs) / sum(b for _, b in pairs),
        "output_throughput_without": statistics.median(b for _, b in pairs),
        "refused": sum(len(one.refusals) for one in refused),
        "let_in": sum(one.sent - len(one.refusals) for one in refused),  # where one of the clients had just ended
        "failed_requests": len(seen.failures) + sum(len(one.failures) for one in refused),
        **report.spread("refusal", [1000 * t for one in refused for t in one.refusals]),
    }
    for name in sorted(set.intersection(*(set(window.cores) for window in windows))):
        on, off = (
            statistics.median(w.cores[name] for w in windows if w.has_refusals is kind) for kind in (True, False)
        )
        if max(on, off) >= 0.01:
            found |= {f"cores {name}, with refusals": on, f"cores {name}, without": off}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.refusals", description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="of windows, one with refusals and one without")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second that there is no room for")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    with started_server("demo") as running:
        model = first_model(Target(running.base_url, None))
        figures = figures_of(*run(running.base_url, model, arguments.pairs, arguments.rate))
    report.write({"kind": "refusals", "rate": arguments.rate, **figures}, arguments.output)
    if figures["failed_requests"]:
        raise SystemExit("some requests neither ended well nor were refused")


if __name__ == "__main__":
    main()
