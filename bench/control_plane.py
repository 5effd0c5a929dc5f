"""What gateway and scheduler cost: `python -m bench.control_plane` runs a server whose ranks compute nothing.

CPU time of each process over the tokens that clients got, one event a token; answers of one token; the time to the
first token when idle, and beside it a step of the executor alone (`bench.executor_trip`). Ends by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench import executor_trip, report
from bench.http_stream import Target
from bench.overload import usage
from bench.raw_load import RawJob, RawSeen, run_raw
from bench.server import started_server
from bench.serving import first_model

CASES: dict[str, tuple[int, int, int, bool]] = {  # streams, tokens in, tokens out, streamed
    "stream_256": (256, 32, 64, True),
    "stream_256_long": (256, 32, 512, True),  # next to nothing of the requests' own cost
    "stream_64": (64, 32, 64, True),
    "stream_1": (1, 32, 64, True),
    "whole_256": (256, 32, 64, False),
    "one_token_64": (64, 32, 1, False),
    "idle_first_token": (1, 32, 1, True),
}
IDLE = "idle_first_token"


def measure(job: RawJob, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """One case: rates, and microseconds of CPU per token or, of answers with one token, per request."""
    before = usage()
    seen: RawSeen = pool.submit(run_raw, job).result()
    after = usage()
    if seen.failures:
        raise SystemExit(f"{len(seen.failures)} requests failed, e.g. {seen.failures[0]}")
    tokens = seen.num_answers * job.num_output
    cpu = {name: after[name].cpu_seconds - before[name].cpu_seconds for name in after.keys() & before.keys()}
    firsts = sorted(1000 * first for first in seen.first_bytes)
    return {
        "tokens_per_second": tokens / seen.seconds,
        "requests_per_second": seen.num_answers / seen.seconds,
        "events_per_token": seen.num_events / tokens if job.is_streamed else 0.0,
        "first_ms_p50": statistics.median(firsts),
        "cpu_us_per_token": {name: 1e6 * seconds / tokens for name, seconds in sorted(cpu.items())},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.control_plane", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="by commas")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", help="JSON file for the result")
    parser.add_argument("flags", nargs="*", help="after --: flags of the server that is started")
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {}
    flags = ("--executor", "null", "--max-num-seqs", "256", *arguments.flags)
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
        started_server(arguments.model, *flags) as running,
    ):
        model = first_model(Target(running.base_url, None))
        for number in range(arguments.rounds + 1):
            for name in arguments.cases.split(","):
                streams, num_input, num_output, is_streamed = CASES[name]
                seconds = arguments.seconds if number else 1.0
                job = RawJob(running.base_url, model, streams, num_input, num_output, seconds, is_streamed)
                result = measure(job, pool)
                if number and name == IDLE:
                    result["executor_ms_p50"] = 1000 * executor_trip.median_seconds(num_input)
                if number:  # the first round warms up
                    rounds.setdefault(name, []).append(result)
                    print(time.strftime("%H:%M:%S"), name, _words(result), flush=True)
    report.write({"kind": "control plane", "rounds": rounds, "flags": arguments.flags}, arguments.output)


def _words(result: dict[str, Any]) -> str:
    cpu = ", ".join(f"{name} {value:.1f}" for name, value in result["cpu_us_per_token"].items() if value >= 0.05)
    trip = result.get("executor_ms_p50")
    return (
        f"{result['tokens_per_second']:.0f} tok/s, {result['requests_per_second']:.0f} req/s, "
        f"{result['events_per_token']:.3f} events/token, first {result['first_ms_p50']:.2f} ms"
        f"{'' if trip is None else f' (the executor alone {trip:.2f})'}; us/token: {cpu}"
    )


if __name__ == "__main__":
    main()
