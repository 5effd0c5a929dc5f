"""Time from `novainfer serve` to ready, and from a request to its first token on an idle server, as medians.

`python -m bench.startup [--model DIR] [--starts 5] [--requests 20]`. Ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from bench import report, workloads
from bench.http_stream import Target
from bench.server import started_server
from bench.serving import Load, first_model, send

_ONE_AT_A_TIME = Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=1)
_PROMPT_TOKENS = 32


def run(model: str, starts: int, requests: int) -> dict[str, Any]:
    """Start the server `starts` times; ask each one `requests` times, one after the other, after one warm-up."""
    ready: list[float] = []
    first_tokens: list[float] = []
    for number in range(starts):
        with started_server(model) as server:
            ready.append(server.seconds)
            first_tokens += asyncio.run(_first_tokens(Target(server.base_url), requests, seed=number))
    return {
        "kind": "startup",
        "model_id": model,
        "starts": starts,
        "median_ready_s": statistics.median(ready),
        "ready_s": ready,
        **report.spread("ttft", [1000 * seconds for seconds in first_tokens]),
    }


async def _first_tokens(target: Target, requests: int, seed: int) -> list[float]:
    model = first_model(target)
    items = workloads.fixed(600, num_seqs=requests + 1, num_input=_PROMPT_TOKENS, num_output=4, seed=seed)
    results = [await send(target, model, item, _ONE_AT_A_TIME) for item in items]
    failed = [result.error for result in results if result.error]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return [result.ttft for result in results[1:]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    report.write(run(arguments.model, arguments.starts, arguments.requests), arguments.output)


if __name__ == "__main__":
    main()
