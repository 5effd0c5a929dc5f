"""What a request costs gateway and schedulers as replicas get more: `python -m bench.growth`.

Servers whose ranks compute nothing and take 10 ms a step for it, with 1, 2, 4 and 8 replicas behind one gateway, and as
many streams for each: CPU time of the gateway, of all schedulers together and of the supervisors, per request of 64
streamed tokens and per request of one token. Each round measures all numbers of replicas in another order; medians,
and the spread between rounds. Ends by itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench import report
from bench.http_stream import Target
from bench.overload import usage
from bench.raw_load import RawJob, RawSeen, run_raw
from bench.server import started_server
from bench.serving import first_model

REPLICAS = (1, 2, 4, 8)
NUM_INPUT = 128
# Streams of each replica, tokens out, whether they are streamed.
CASES: dict[str, tuple[int, int, bool]] = {"stream": (32, 64, True), "one token": (16, 1, False)}
PARTS = ("gateway", "scheduler", "supervisor", "replica")
WARM_SECONDS = 1.0
FLAGS = ("--executor", "null", "--null-step-ms", "10", "--max-num-seqs", "128", "--log-level", "warning")


def cpu_seconds() -> dict[str, float]:
    """Of our processes so far, by the first word of their titles."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, used in usage().items():
        part = name.split()[0]
        if part in found:
            found[part] += used.cpu_seconds
    return found


def measure(job: RawJob, pool: ProcessPoolExecutor) -> dict[str, float]:
    """Microseconds of CPU per request, by part; and how many requests a second there were."""
    before = cpu_seconds()
    seen: RawSeen = pool.submit(run_raw, job).result()
    after = cpu_seconds()
    if seen.failures:
        raise SystemExit(f"{len(seen.failures)} requests failed, e.g. {seen.failures[0]}")
    costs = {part: 1e6 * (after[part] - before[part]) / seen.num_answers for part in PARTS}
    return {**costs, "requests_per_second": seen.num_answers / seen.seconds}


def run_server(replicas: int, seconds: float, pool: ProcessPoolExecutor) -> dict[str, dict[str, float]]:
    """All cases with so many replicas."""
    found = {}
    with started_server("demo", *FLAGS, "--replicas", str(replicas)) as running:
        model = first_model(Target(running.base_url, None))
        for name, (streams, num_output, is_streamed) in CASES.items():
            for length in (WARM_SECONDS, seconds):
                job = RawJob(running.base_url, model, streams * replicas, NUM_INPUT, num_output, length, is_streamed)
                found[name] = measure(job, pool)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)), help="by commas")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.replicas.split(",")]
    rounds: list[dict[str, Any]] = []
    order = random.Random(0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(arguments.rounds):
            order.shuffle(numbers)
            for replicas in numbers:
                found = run_server(replicas, arguments.seconds, pool)
                rounds += [{"replicas": replicas, "case": case, **costs} for case, costs in found.items()]
                print(rounds[-len(CASES) :], flush=True)
    print(table(rounds))
    report.write({"kind": "growth", "rounds": rounds}, arguments.output)


def table(rounds: list[dict[str, Any]]) -> str:
    """Markdown: medians, and in brackets the spread (largest - smallest)."""
    lines = [
        "| case | replicas | gateway us | schedulers us | supervisors us | requests/s |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for replicas in sorted({one["replicas"] for one in rounds}):
            chosen = [one for one in rounds if one["case"] == case and one["replicas"] == replicas]
            supervisors = [one["supervisor"] + one["replica"] for one in chosen]
            columns = [[one["gateway"] for one in chosen], [one["scheduler"] for one in chosen], supervisors]
            cells = [f"{statistics.median(column):.0f} ({max(column) - min(column):.0f})" for column in columns]
            rate = statistics.median(one["requests_per_second"] for one in chosen)
            lines.append(f"| {case} | {replicas} | {' | '.join(cells)} | {rate:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
