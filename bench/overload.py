"""Too much work: `python -m bench.overload` starts a server on the demo model; `--url URL --keys K0,..,K8` takes yours.

Fairness: eight light tenants alone, then beside a heavy one, then nine equal ones with a backlog.
Overload: the most that the server does, before and after ten times as many requests as it can answer. Ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import report
from bench.http_stream import Target
from bench.server import started_server
from bench.serving import DEFAULT_VOCABULARY, first_model
from bench.tenants import Job, LoadProcesses, Seen, Tenant, tokens_per_second

NUM_LIGHT = 8
HEAVY_STREAMS = 64
NUM_LOOKS = 10  # at the memory of the processes, while there is too much work
WARM_SECONDS = 2.0  # of each phase, not counted
# Of a request's output, where all have the same: clients that begin and end together would be another load than others.
SPREAD = 0.5
SIZES = {"light": (64, 32), "heavy": (1500, 256), "equal": (128, 64), "overload": (128, 256)}  # tokens in, tokens out


@dataclass(frozen=True, slots=True)
class Bench:
    """The server under test and how it is loaded."""

    base_url: str
    model: str
    keys: tuple[str, ...]  # the heavy tenant's, then the light ones'
    processes: LoadProcesses
    vocab_size: int

    def job(self, tenants: Sequence[Tenant], seconds: float, seed: int) -> Job:
        """A load on this server."""
        return Job(self.base_url, self.model, tuple(tenants), seconds, self.vocab_size, seed)

    def run(self, tenants: Sequence[Tenant], seconds: float, seed: int) -> list[Seen]:
        """Run it in a process of its own, and wait for it."""
        return self.processes.start(self.job(tenants, seconds, seed)).result()


def fairness(bench: Bench, seconds: float) -> dict[str, Any]:
    """Light tenants alone and beside a heavy one; and nine equal tenants that all want more than there is."""
    lights = [Tenant(key, 1, *SIZES["light"]) for key in bench.keys[1:]]
    alone = bench.run(lights, seconds, 1)
    heavy_load = bench.processes.start(
        bench.job([Tenant(bench.keys[0], HEAVY_STREAMS, *SIZES["heavy"])], 2 * seconds, 2)
    )
    ramp = bench.run(lights, WARM_SECONDS + seconds / 2, 3)  # until the heavy one is there and has its rows
    beside = bench.run(lights, seconds, 4)
    heavy = heavy_load.result()
    equal = bench.run([Tenant(key, 16, *SIZES["equal"]) for key in bench.keys], WARM_SECONDS + seconds, 5)
    counts = [tokens_per_second([one], WARM_SECONDS, WARM_SECONDS + seconds) for one in equal]
    solo, shared = ([t for one in phase for t in one.ttfts] for phase in (alone, beside))
    return {
        **report.spread("light_ttft_alone", [1000 * t for t in solo]),
        **report.spread("light_ttft_beside", [1000 * t for t in shared]),
        "light_ttft_p99_ratio": report.percentile(shared, 99) / max(report.percentile(solo, 99), 1e-9),
        "light_requests_alone": len(solo),
        "light_requests_beside": len(shared),
        "light_refused": sum(len(one.refusals) for one in (*alone, *ramp, *beside)),  # whose waits do not count above
        "heavy_output_throughput": tokens_per_second(heavy, seconds, 2 * seconds),
        "jain_index_equal": jain_index(counts),
        "failed_requests": sum(len(one.failures) for one in (*alone, *ramp, *beside, *heavy, *equal)),
    }


def overload(bench: Bench, seconds: float, factor: float) -> dict[str, Any]:
    """The most that is possible with more streams than rows, before and after `factor` times as many requests."""
    key = bench.keys[0]
    num_input, num_output = SIZES["overload"]
    warm = max(seconds / 6, WARM_SECONDS)

    def most(seed: int) -> tuple[float, list[str], dict[str, float]]:
        watched = UsageOverTime(warm + seconds / 3)
        (seen,) = bench.run([Tenant(key, 96, num_input, num_output, spread=SPREAD)], warm + seconds / 3, seed)
        return tokens_per_second([seen], warm, warm + seconds / 3), seen.failures, watched.end()[1]

    before, failures_before, cores_before = most(6)
    rate = factor * before / num_output
    watched = UsageOverTime(warm + seconds)
    (seen,) = bench.run([Tenant(key, 0, num_input, num_output, rate, SPREAD)], warm + seconds, 7)
    memory, cores = watched.end()
    after, failures_after, _ = most(8)
    good = tokens_per_second([seen], warm, warm + seconds)
    return {
        "max_output_throughput_before": before,
        "max_output_throughput_after": after,
        "offered_requests_per_second": rate,
        "output_throughput": good,
        "goodput_share": good / max((before + after) / 2, 1e-9),
        "requests_sent": seen.sent,
        "requests_resent": seen.resent,
        "completed_overload": seen.completed,
        "refused": len(seen.refusals),
        "refused_with_retry_after": seen.num_retry_after,
        **report.spread("refusal", [1000 * t for t in seen.refusals]),
        "failed_requests": len(seen.failures) + len(failures_before) + len(failures_after),
        "failures": sorted({*seen.failures, *failures_before, *failures_after})[:5],
        **{f"rss_mib_over_time {name}": values for name, values in memory.items()},
        **{f"rss_mib_grown {name}": values[-1] - values[0] for name, values in memory.items()},
        **{f"cores {name}": value for name, value in cores.items()},
        **{f"cores before {name}": value for name, value in cores_before.items()},
    }


def jain_index(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 = all equal, 1/n = one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds, and the time on a core that it has had."""

    rss_mib: float
    cpu_seconds: float


def usage() -> dict[str, Usage]:
    """Of each process of the server that we started, by its title, and of those that make the load ('load')."""
    found: dict[str, Usage] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()).strip()
            if title.startswith("novainfer: ") or "multiprocessing.spawn" in title:
                name = title.removeprefix("novainfer: ") if title.startswith("novainfer: ") else "load"
                times, before = process.cpu_times(), found.get(name, Usage(0.0, 0.0))
                rss = process.memory_info().rss / 2**20
                found[name] = Usage(before.rss_mib + rss, before.cpu_seconds + times.user + times.system)
    return found


class UsageOverTime:
    """Looks at `usage` ten times while a load runs for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._interval = seconds / NUM_LOOKS
        self._looks = [usage()]
        self._is_over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(self._interval):
            self._looks.append(usage())

    def end(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Memory at each look in MiB, and the cores used on average, of each process that was there at both ends."""
        self._is_over.set()
        self._thread.join()
        first, last, took = self._looks[0], usage(), time.monotonic() - self._began
        names = first.keys() & last.keys()
        memory = {name: [round(look[name].rss_mib, 1) for look in self._looks if name in look] for name in names}
        return memory, {name: (last[name].cpu_seconds - first[name].cpu_seconds) / took for name in names}


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Where it is, its model, and the tenants' keys."""
    if arguments.url:
        keys = tuple(arguments.keys.split(","))
        if len(keys) != NUM_LIGHT + 1:
            raise SystemExit(f"--keys needs the heavy tenant's key and {NUM_LIGHT} light ones'")
        url = arguments.url.rstrip("/").removesuffix("/v1")
        yield url, first_model(Target(url, keys[0])), keys
        return
    names = ["heavy", *(f"light{i}" for i in range(NUM_LIGHT))]
    keys = tuple(f"key-{name}" for name in names)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys"
        path.write_text("".join(f"{name}:{key}\n" for name, key in zip(names, keys, strict=True)))
        with started_server("demo", "--api-key-file", str(path), *arguments.flags) as running:
            yield running.base_url, first_model(Target(running.base_url, keys[0])), keys


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--url", help="a server that runs; default: one is started on the demo model")
    parser.add_argument("--keys", default="", help="with --url: the heavy tenant's key and eight others, by commas")
    parser.add_argument("--part", choices=("fairness", "overload", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measured phase")
    parser.add_argument("--factor", type=float, default=10.0, help="requests offered, in terms of the most possible")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCABULARY)
    parser.add_argument("--output", help="JSON file for the result")
    parser.add_argument("flags", nargs="*", help="after --: flags of the server that is started")
    return parser.parse_args()


def main() -> None:
    """The command line."""
    arguments = _arguments()
    figures: dict[str, Any] = {"kind": "overload", "seconds": arguments.seconds, "flags": arguments.flags}
    with _server(arguments) as (url, model, keys), LoadProcesses(2) as processes:
        bench = Bench(url, model, keys, processes, arguments.vocab_size)
        failed = 0
        if arguments.part != "overload":
            figures |= fairness(bench, arguments.seconds)
            failed += figures["failed_requests"]
        if arguments.part != "fairness":
            figures |= overload(bench, arguments.seconds, arguments.factor)
            failed += figures["failed_requests"]
    report.write({**figures, "failed_requests": failed}, arguments.output)
    if failed:
        raise SystemExit(f"{failed} requests neither ended well nor were refused")


if __name__ == "__main__":
    main()
