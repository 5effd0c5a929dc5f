"""The network between a server and its ranks, as bad as can be: `python -m tests.chaos.net_loop --faults 100`.

Streams without end on a real server whose ranks reach it over tcp through proxies (`proxied.py`), on which faults fall
that are drawn from the seed. Every stream must be what an undisturbed server says. A short fault is waited out; of a
longer one the worker group dies, and is replaced. Exit status 1 if a stream was not exact, or something is left held.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.kill_loop import Crowd, make_requests
from tests.chaos.proxied import Proxied, proxied_server
from tests.chaos.proxy import BOTH, DOWN, FAIR, UP, Proxy, Weather
from tests.chaos.streams import read_all

KINDS = ("delay", "throttle", "reset", "fin", "half", "silent", "silent, then reset", "refuse", "spoil")
LINKS = ("steps", "reports", "both")
_SECONDS = (0.1, 0.5, 2.0, 6.0, 12.0)  # the last two are beyond --hang-timeout


@dataclass(frozen=True)
class Fault:
    """One fault. Of those without `seconds` the network recovers at once; connections have to find that out."""

    kind: str
    link: str
    directions: frozenset[str] = BOTH
    seconds: float = 0.0
    delay: float = 0.0  # seconds
    rate: float = 0.0  # bytes a second

    def befall(self, proxied: Proxied) -> None:
        """Do it, and return when the network is well again."""
        proxies = {"steps": [proxied.steps], "reports": [proxied.reports]}.get(
            self.link, [proxied.steps, proxied.reports]
        )
        for proxy in proxies:
            self._begin(proxy)
        threading.Event().wait(self.seconds)
        for proxy in proxies:
            if self.kind == "silent, then reset":
                proxy.cut()
            proxy.set(FAIR)

    def _begin(self, proxy: Proxy) -> None:
        if self.kind == "delay":
            proxy.set(Weather(delay=self.delay))
        elif self.kind == "throttle":
            proxy.set(Weather(rate=self.rate))
        elif self.kind.startswith("silent"):
            proxy.set(Weather(silent=self.directions))
        elif self.kind == "refuse":
            proxy.set(Weather(refuses=True))
            proxy.cut()
        elif self.kind in ("reset", "fin"):
            proxy.cut(orderly=self.kind == "fin")
        else:
            for direction in sorted(self.directions):
                (proxy.close_half if self.kind == "half" else proxy.spoil)(direction)


def draw(rng: random.Random) -> Fault:
    """Any fault."""
    kind = rng.choice(KINDS)
    directions = frozenset({rng.choice([UP, DOWN])}) if kind in ("half", "spoil") else BOTH
    if kind.startswith("silent"):
        directions = rng.choice([BOTH, frozenset({UP}), frozenset({DOWN})])
    lasts = kind in ("delay", "throttle", "refuse") or kind.startswith("silent")
    return Fault(
        kind,
        rng.choice(LINKS),
        directions,
        seconds=rng.choice(_SECONDS) if lasts else 0.0,
        delay=rng.choice([0.005, 0.05, 0.3]) if kind == "delay" else 0.0,
        rate=rng.choice([4_000.0, 20_000.0, 200_000.0]) if kind == "throttle" else 0.0,
    )


def loop(proxied: Proxied, *, faults: int, streams: int, seed: int) -> bool:
    """So many faults; True if every stream was exact."""
    server, rng = proxied.server, random.Random(seed)
    requests = make_requests(rng, 32)
    crowd = Crowd(server, requests, read_all(server, requests), streams)
    try:
        for number in range(faults):
            fault = draw(rng)
            seen = crowd.num_events + rng.randrange(50)
            crowd.wait(lambda seen=seen: crowd.num_events >= seen)
            print(f"{number:4} {_words(fault)}", end="", file=sys.stderr, flush=True)
            fault.befall(proxied)
            mended = time.monotonic()
            server.wait_until_ready()
            seen = crowd.num_events + 100
            crowd.wait(lambda seen=seen: crowd.num_events >= seen)
            bad, took = sum(life.error is not None for life in crowd.lives), time.monotonic() - mended
            print(f": {took:.1f} s, streams {len(crowd.lives)}, bad {bad}", file=sys.stderr, flush=True)
    finally:
        crowd.stop()
    wrong = [life for life in crowd.lives if not life.is_exact]
    num_replaced = server.errors.count("serving again after")
    print(f"faults {faults}, groups replaced {num_replaced}, streams {len(crowd.lives)}, not exact {len(wrong)}")
    for life in wrong[:10]:
        print(f"  NOT EXACT: request {life.request}: {(life.error or '')[:600]}")
    server.wait_until_nothing_is_held()
    return not wrong


def _words(fault: Fault) -> str:
    return json.dumps({name: sorted(v) if isinstance(v, frozenset) else v for name, v in asdict(fault).items() if v})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="net-loop-") as folder:
        log = Path(folder) / "log"
        with proxied_server("--tensor-parallel-size", str(options.ranks), log=log) as proxied:
            is_exact = loop(proxied, faults=options.faults, streams=options.streams, seed=options.seed)
            proxied.server.stop()
    return 0 if is_exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
