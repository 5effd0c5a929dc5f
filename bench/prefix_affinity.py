"""How often a replica has a prompt's beginning cached, by our routing and at random: `python -m bench.prefix_affinity`.

Real servers with the demo model: one of two replicas, and two of one engine each between which the client chooses at
random, in turns, each started anew for each round. Prompts with one of many shared beginnings, several at once. Prints
the share of prompt tokens that were found cached and the time to the first token. Ends by itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from bench import report
from bench.server import started_server

NUM_PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, NUM_OUTPUT = 50, 448, 32, 8
NUM_REQUESTS, AT_ONCE = 400, 8
FLAGS = ("--log-level", "warning")
QUERIES, HITS = "novainfer_prefix_cache_queries_total", "novainfer_prefix_cache_hits_total"
TOKENS = range(5, 500)  # any of the demo model's


def make_prompts(seed: int) -> list[list[int]]:
    """Token ids: a beginning that others share, and an end of its own."""
    rng = random.Random(seed)
    prefixes = [rng.choices(TOKENS, k=PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [rng.choice(prefixes) + rng.choices(TOKENS, k=SUFFIX_TOKENS) for _ in range(NUM_REQUESTS)]


def first_token_seconds(client: httpx.Client, url: str, prompt: list[int]) -> float:
    """Of a stream that is read to its end."""
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT, "stream": True, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line and not first:
                first = time.perf_counter() - began
    return first


def metric(url: str, name: str) -> float:
    """Summed over engines, once they are idle."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def run(urls: Sequence[str], prompts: list[list[int]], seed: int) -> dict[str, float]:
    """All prompts, each to one of the servers at random."""
    rng = random.Random(seed)
    chosen = [rng.choice(urls) for _ in prompts]
    with httpx.Client(trust_env=False, timeout=120) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        firsts = list(pool.map(lambda one: first_token_seconds(client, *one), zip(chosen, prompts, strict=True)))
    wanted = sum(map(len, prompts))
    while sum(metric(url, QUERIES) for url in urls) < wanted:
        time.sleep(0.1)  # the last report of the engines is on its way
    found = sum(metric(url, HITS) for url in urls)
    return {"cached": found / wanted, "first_ms_p50": 1000 * statistics.median(firsts)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_affinity", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    ways: dict[str, list[tuple[str, ...]]] = {
        "by prefix (--replicas 2)": [("--replicas", "2")],
        "at random (two servers)": [("--threads-per-worker", "1"), ("--threads-per-worker", "1")],
    }
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        prompts = make_prompts(number)
        for way, servers in ways.items():
            with ExitStack() as stack:
                started = [stack.enter_context(started_server("demo", *FLAGS, *flags)) for flags in servers]
                rounds.append({"way": way, **run([one.base_url for one in started], prompts, number)})
            print(rounds[-1], flush=True)
    for way in ways:
        chosen = [one for one in rounds if one["way"] == way]
        for what in ("cached", "first_ms_p50"):
            values = [one[what] for one in chosen]
            print(f"{way}: {what} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    best = (NUM_REQUESTS - NUM_PREFIXES) / NUM_REQUESTS * PREFIX_TOKENS / (PREFIX_TOKENS + SUFFIX_TOKENS)
    print(f"at best (one engine that keeps everything): {best:.3f}")
    report.write({"kind": "prefix affinity", "rounds": rounds}, arguments.output)


if __name__ == "__main__":
    main()
