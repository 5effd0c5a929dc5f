"""What it costs to say no: `python -m bench.refusals` keeps a server full and sends it, in every third window, requests
that it has no room for; in every other third the same requests to a server that does nothing but say no.

Windows lie side by side, so that a machine that changes from minute to minute says little of it. The load takes cores
too: what each side takes more in the windows with refusals tells whose cost it is, and the bare server's windows what
no server on these cores would get around.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from setproctitle import setproctitle

from bench import report
from bench.http_stream import Target
from bench.overload import SIZES, SPREAD, usage
from bench.server import started_server
from bench.serving import DEFAULT_VOCABULARY, first_model
from bench.tenants import Job, LoadProcesses, Seen, Tenant, give_way

CLIENTS = 64 + 1024  # as many as the server has rows and places to wait: all are taken
WINDOW, SETTLE = 10.0, 1.5  # seconds measured; before that, with the load as it then is
LEAD = 12.0  # seconds until the first window: the load is drawn, every place taken


NONE, BARE, GATEWAY = "none", "bare", "gateway"  # who refuses in a window
ORDER = (NONE, BARE, GATEWAY, GATEWAY, BARE, NONE)


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of the load."""

    refuses: str
    tokens_per_second: float
    cores: dict[str, float]  # by process


class BareServer(asyncio.Protocol):
    """Answers whatever comes with the same refusal, unread."""

    ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.ANSWER)

    @classmethod
    def serve(cls, port: Connection) -> None:
        """Until the process is ended; tells its port."""

        async def main() -> None:
            server = await asyncio.get_running_loop().create_server(cls, "127.0.0.1", 0)
            port.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

        setproctitle("novainfer: bare server")  # as `usage` looks for
        give_way()
        uvloop.run(main())


def run(url: str, bare_url: str, model: str, rounds: int, rate: float) -> tuple[Seen, list[Window], list[Seen]]:
    """The load that keeps the server full, its windows, and what came of the requests that the gateway refused."""
    num_input, num_output = SIZES["overload"]
    total = LEAD + rounds * 3 * (SETTLE + WINDOW + 1.0)
    windows, refused = [], []
    with LoadProcesses(2) as processes:
        full = Tenant(None, CLIENTS, num_input, num_output, spread=SPREAD)
        load = processes.start(Job(url, model, (full,), total, DEFAULT_VOCABULARY, 1))
        time.sleep(LEAD)
        more = Tenant(None, 0, num_input, num_output, rate, SPREAD)
        for number in range(3 * rounds):
            refuses = ORDER[number % len(ORDER)]
            to = url if refuses == GATEWAY else bare_url
            job = Job(to, model, (more,), SETTLE + WINDOW, DEFAULT_VOCABULARY, 2 + number)
            sent = None if refuses == NONE else processes.start(job)
            time.sleep(SETTLE)
            windows.append(_watch(url, refuses))
            if sent is not None:
                found = sent.result()
                refused += found if refuses == GATEWAY else []
        if load.done():
            raise SystemExit("the load ended before the last window did")
        (seen,) = load.result()
    return seen, windows, refused


def _watch(url: str, refuses: str) -> Window:
    before, tokens_before, start = usage(), _generated_tokens(url), time.monotonic()
    time.sleep(WINDOW)
    after, tokens_after, took = usage(), _generated_tokens(url), time.monotonic() - start
    names = before.keys() & after.keys()
    cores = {name: (after[name].cpu_seconds - before[name].cpu_seconds) / took for name in names}
    return Window(refuses, (tokens_after - tokens_before) / took, cores)


def _generated_tokens(url: str) -> float:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("novainfer_generation_tokens_total"))


def figures_of(seen: Seen, windows: Sequence[Window], refused: Sequence[Seen]) -> dict[str, Any]:
    """Tokens a second with refusals in terms of those without, round by round, and each process's cores in all."""
    rates = {kind: [w.tokens_per_second for w in windows if w.refuses == kind] for kind in ORDER}
    found: dict[str, Any] = {
        "output_throughput_without": statistics.median(rates[NONE]),
        "refused": sum(len(one.refusals) for one in refused),
        "let_in": sum(one.sent - len(one.refusals) for one in refused),  # where one of the clients had just ended
        "failed_requests": len(seen.failures) + sum(len(one.failures) for one in refused),
        **report.spread("refusal", [1000 * t for one in refused for t in one.refusals]),
    }
    for name, kind, base in (("gateway", GATEWAY, NONE), ("bare", BARE, NONE), ("gateway_of_bare", GATEWAY, BARE)):
        ratios = [a / b for a, b in zip(rates[kind], rates[base], strict=True)]
        found |= {
            f"goodput_ratio_{name}_median": statistics.median(ratios),
            f"goodput_ratio_{name}_least": min(ratios),
            f"goodput_ratio_{name}_most": max(ratios),
            f"goodput_ratio_{name}_of_sums": sum(rates[kind]) / sum(rates[base]),
        }
    for name in sorted(set.intersection(*(set(window.cores) for window in windows))):
        medians = {
            k: statistics.median(w.cores[name] for w in windows if w.refuses == k) for k in (NONE, BARE, GATEWAY)
        }
        if max(medians.values()) >= 0.01:
            found |= {f"cores {name}, refusals by {kind}": value for kind, value in medians.items()}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.refusals", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="of three windows, two of them with refusals")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second that there is no room for")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    with started_server("demo") as running:
        model = first_model(Target(running.base_url, None))
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        bare = context.Process(target=BareServer.serve, args=(sender,), daemon=True)
        bare.start()
        try:
            bare_url = f"http://127.0.0.1:{receiver.recv()}"
            figures = figures_of(*run(running.base_url, bare_url, model, arguments.rounds, arguments.rate))
        finally:
            bare.terminate()
            bare.join()
    report.write({"kind": "refusals", "rate": arguments.rate, **figures}, arguments.output)
    if figures["failed_requests"]:
        raise SystemExit("some requests neither ended well nor were refused")


if __name__ == "__main__":
    main()
