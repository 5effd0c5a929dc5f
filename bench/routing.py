"""What it costs to choose a replica, and how often that finds a prompt's beginning: `python -m bench.routing`.

In one process and without engines: the CPU time of `Router.route` for prompts of 576 tokens, and the share of requests
that come to a replica which has seen their 512-token beginning, beside a choice at random, while the replicas' loads
change at random. One of 200 beginnings each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from bench import report
from novainfer.client.router import Load, Router
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams

NUM_PREFIXES = 200
PREFIX_TOKENS, SUFFIX_TOKENS = 512, 64
MOST_SEQUENCES = 8  # that a replica has besides
ROUNDS = 3


def make_requests(count: int, rng: random.Random) -> list[tuple[int, AddRequest]]:
    """(which beginning, the request)."""
    params = SamplingParams(max_tokens=1)
    prefixes = [[rng.randrange(50_000) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    chosen = [rng.randrange(NUM_PREFIXES) for _ in range(count)]
    return [
        (number, AddRequest(f"r{i}", prefixes[number] + [rng.randrange(50_000) for _ in range(SUFFIX_TOKENS)], params))
        for i, number in enumerate(chosen)
    ]


def measure(replicas: int, requests: list[tuple[int, AddRequest]]) -> dict[str, float]:
    """Microseconds of CPU time per request (median of the rounds), and both shares."""
    rng = random.Random(replicas)
    loads = [[Load(n, rng.randrange(MOST_SEQUENCES)) for n in range(replicas)] for _ in requests]
    costs = []
    for _ in range(ROUNDS):
        router, begun = Router(), time.process_time()
        chosen = [router.route(request, load).replica for (_, request), load in zip(requests, loads, strict=True)]
        costs.append((time.process_time() - begun) / len(requests) * 1e6)
    return {
        "replicas": replicas,
        "us_per_request": statistics.median(costs),
        "us_spread": max(costs) - min(costs),
        "found": share_found(requests, chosen),
        "found_at_random": share_found(requests, [rng.randrange(replicas) for _ in requests]),
    }


def share_found(requests: list[tuple[int, AddRequest]], chosen: list[int]) -> float:
    """Of the requests that came to a replica which had their beginning."""
    seen: set[tuple[int, int]] = set()
    found = 0
    for (prefix, _), replica in zip(requests, chosen, strict=True):
        found += (replica, prefix) in seen
        seen.add((replica, prefix))
    return found / len(requests)


def main() -> None:
    """Print a table; with --output write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--output", help="JSON file for the result")
    options = parser.parse_args()
    requests = make_requests(options.requests, random.Random(0))
    rows = [measure(replicas, requests) for replicas in options.replicas]
    print("replicas  us/request (spread)  beginning found  at random")
    for row in rows:
        cost = f"{row['us_per_request']:.1f} ({row['us_spread']:.1f})"
        print(f"{row['replicas']:8}  {cost:>19}  {row['found']:15.1%}  {row['found_at_random']:9.1%}")
    report.write({"kind": "routing", "results": rows}, options.output)


if __name__ == "__main__":
    main()
