"""Hours of everything: `python -m tests.chaos.soak --minutes 60` looks for what grows, is lost, or changes.

Clients of all kinds on a real server, whose worker, scheduler or gateway dies every few minutes. Every stream must be
what the undisturbed server said. Every half minute all is let run out: then nothing may be held, and a fixed set of
greedy requests must be answered as ever. Each process is measured every 10 s (`scales.py`). Exit status 1 if anything
was lost, differed, was held, or grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from novainfer.receipt import token_hash
from tests.chaos import cancels
from tests.chaos.kill_loop import Request, make_requests
from tests.chaos.scales import BOUNDS, NOISE, Scales, growths
from tests.chaos.streams import CHAT, COMPLETIONS, read, read_all, told_nobody
from tests.servers import RunningServer

MIX = {"stream": 60, "plain": 15, "leave": 10, "bad": 5, "slow": 5, "other": 5}  # weights
CLIENTS = 6
MEAN_PAUSE = 0.3  # seconds that a client waits between two requests
SAMPLE_SECONDS = 10.0
QUIET_SECONDS = 30.0
_FLAGS = (
    "--num-blocks",
    "1024",
)  # so few have all been written after a minute: a cache that fills would look like a leak
GATEWAY_EXCUSE = 10.0  # seconds after the death of a gateway in which what is no stream may be lost
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"messages": [{"role": "nobody", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}], "top_p": "much"},
    {"messages": [{"role": "user", "content": "x " * 20_000}]},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 1e9}},
)
CANARIES: tuple[Request, ...] = tuple(
    (CHAT, {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 48, "logprobs": True})
    for text in ("What is NovaInfer?", "What is 23 plus 45?", "Spell the word river.", "Count from 3 to 9.")
)


class Gate:
    """Lets clients in, or, when it is closed, waits until all are out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open, self._num_inside = True, 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Return when nobody is inside."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._num_inside)

    def open(self) -> None:
        """Let them in again."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class Clients:
    """Threads that do one thing after the other, as `MIX` says."""

    def __init__(self, server: RunningServer, gate: Gate, rng: random.Random) -> None:
        self._server, self._gate = server, gate
        self._requests = make_requests(rng, 48)
        answers = read_all(server, [*self._requests, *CANARIES])
        self._oracle, self._canaries = answers[: len(self._requests)], answers[len(self._requests) :]
        self.gateway_died_at = -1e9
        self.done: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        for _ in range(CLIENTS):
            self._pool.submit(self._run, random.Random(rng.random()))

    def stop(self) -> None:
        """Let each end what it does."""
        self._is_over.set()
        self._pool.shutdown()

    def ask_canaries(self) -> None:
        """All of them, one after the other."""
        for request, expected in zip(CANARIES, self._canaries, strict=True):
            answer = read(self._server, *request, told_nobody)
            self.done["canary"] += 1
            if answer != expected:
                self.failures.append(f"canary: {answer} instead of {expected}")

    def _run(self, rng: random.Random) -> None:
        kinds: dict[str, Callable[[random.Random], str | None]] = {
            "stream": self._stream, "plain": self._plain, "leave": self._leave, "bad": self._bad, "slow": self._slow,
            "other": self._other,
        }  # fmt: skip
        while not self._is_over.wait(rng.expovariate(1 / MEAN_PAUSE)):
            with self._gate:
                kind = rng.choices(list(MIX), list(MIX.values()))[0]
                began = time.monotonic()
                try:
                    wrong = kinds[kind](rng)
                except Exception as error:  # whatever it is, it belongs into the report
                    wrong = repr(error)
                self.done[kind] += 1
                if wrong is None:
                    continue
                if kind != "stream" and began - GATEWAY_EXCUSE < self.gateway_died_at:
                    self.excused[kind] += 1
                else:
                    self.failures.append(f"{kind}: {wrong[:1000]}")

    def _stream(self, rng: random.Random) -> str | None:
        number = rng.randrange(len(self._requests))
        answer = read(self._server, *self._requests[number], told_nobody)
        return None if answer == self._oracle[number] else f"{answer} instead of {self._oracle[number]}"

    def _plain(self, rng: random.Random) -> str | None:
        number = rng.randrange(len(self._requests))
        path, body = self._requests[number]
        answer = read(self._server, path, {**body, "stream": False}, told_nobody)
        expected = self._oracle[number]
        same = answer.token_ids == expected.token_ids and answer.finish_reasons == expected.finish_reasons
        return None if same and answer.usage == expected.usage else f"{answer} instead of {expected}"

    def _leave(self, rng: random.Random) -> str | None:
        asyncio.run(cancels.leave(self._server.base_url, cancels.draw(rng), f"soak-{rng.getrandbits(64):x}"))
        return None

    def _bad(self, rng: random.Random) -> str | None:
        with self._server.http() as http:
            reply = http.post(CHAT, json=rng.choice(BAD_BODIES))
        return None if reply.status_code == 400 and "error" in reply.json() else f"{reply.status_code} {reply.text}"

    def _slow(self, rng: random.Random) -> str | None:
        """Reads little by little, over a small buffer; nothing may be lost."""
        address = urlsplit(self._server.base_url)
        body = {"prompt": "Slowly", "max_tokens": 200, "ignore_eos": True, "stream": True, "seed": 1}
        data = json.dumps({**body, "return_token_ids": True}).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        heard = b""
        with socket.socket() as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.settimeout(120)
            end.connect((address.hostname, address.port))
            end.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
            while piece := end.recv(512):
                heard += piece
                self._is_over.wait(rng.random() * 0.01)
        return None if b"data: [DONE]" in heard else heard[-500:].decode(errors="replace")

    def _other(self, rng: random.Random) -> str | None:
        return rng.choice([self._tokens, self._receipt])(rng)

    def _tokens(self, rng: random.Random) -> str | None:
        text = " ".join(f"word{rng.randrange(1000)}" for _ in range(rng.randrange(1, 200)))
        with self._server.http() as http:
            tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
            again = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        return None if again == text else f"{text!r} became {again!r}"

    def _receipt(self, rng: random.Random) -> str | None:
        body = {"prompt": f"Receipt {rng.randrange(100)}", "max_tokens": 20, "receipt": True, "return_token_ids": True}
        with self._server.http() as http:
            answer = http.post(COMPLETIONS, json=body).json()
        said, ids = answer["receipt"]["choices"][0], answer["choices"][0]["token_ids"]
        return None if said["token_hash"] == token_hash(ids) else f"{said} of {ids}"


class Nemesis:
    """Kills one process now and then."""

    def __init__(self, server: RunningServer, clients: Clients, rng: random.Random, every: float) -> None:
        """`every`: seconds; 0 = never."""
        self._server, self._clients, self._every = server, clients, every
        self._order = rng.sample(["worker 0.0", "scheduler 0", "gateway 0"], 3)
        self._next = time.monotonic() + (every or 1e9)
        self.kills: list[str] = []

    def strike_if_due(self) -> None:
        """A worker, the scheduler, or (then streams are resumed) the gateway."""
        if time.monotonic() < self._next:
            return
        self._next += self._every
        title = self._order[len(self.kills) % len(self._order)]
        victim = self._server.processes().get(title)
        if victim is None:
            return
        if title == "gateway 0":
            self._clients.gateway_died_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        self.kills.append(title)
        self._server.wait_until_ready()
        if title == "gateway 0":
            self._clients.gateway_died_at = time.monotonic()


def soak(server: RunningServer, *, minutes: float, kill_every: float, seed: int) -> dict[str, Any]:
    """Run it; the report."""
    rng, gate = random.Random(seed), Gate()
    scales = Scales(server)
    clients = Clients(server, gate, rng)
    nemesis = Nemesis(server, clients, rng, kill_every)
    end, now = time.monotonic() + minutes * 60, time.monotonic()
    next_sample, next_quiet = now + SAMPLE_SECONDS, now + QUIET_SECONDS
    try:
        while now < end:
            threading.Event().wait(max(0.0, min(next_sample, next_quiet, end) - now))
            nemesis.strike_if_due()
            now = time.monotonic()
            if now >= next_sample:
                scales.weigh(is_quiet=False)
                next_sample += SAMPLE_SECONDS
            if now >= next_quiet:
                _look_in_quiet(server, gate, clients, scales)
                next_quiet = time.monotonic() + QUIET_SECONDS
            now = time.monotonic()
    finally:
        gate.open()
        clients.stop()
    _look_in_quiet(server, gate, clients, scales)
    found = growths(scales)
    return {
        "minutes": minutes,
        "seed": seed,
        "done": dict(clients.done),
        "excused": dict(clients.excused),
        "kills": dict(Counter(nemesis.kills)),
        "failures": clients.failures,
        "growths": [asdict(growth) for growth in found],
        "bounds": {"per hour": BOUNDS, "noise": NOISE},
        "samples": [asdict(one) for one in scales.measured],
    }


def _look_in_quiet(server: RunningServer, gate: Gate, clients: Clients, scales: Scales) -> None:
    gate.close()
    try:
        server.wait_until_ready()
        server.wait_until_nothing_is_held()
        scales.weigh(is_quiet=True)
        clients.ask_canaries()
    except AssertionError as error:
        clients.failures.append(f"quiet: {error}")
    finally:
        gate.open()


def show(report: dict[str, Any]) -> bool:
    """Print it; True if all was well."""
    print(f"{report['minutes']:g} minutes, seed {report['seed']}; done {report['done']}; kills {report['kills']}; "
          f"lost with a gateway {report['excused']}; failures {len(report['failures'])}")  # fmt: skip
    print(f"{'process':14} {'what':9} {'typical':>14} {'per hour':>12} {'95 % between':>26} samples")
    for growth in report["growths"]:
        slope = growth["slope"]
        print(f"{growth['process']:14} {growth['what']:9} {growth['typical']:14.0f} {slope['median']:12.1f} "
              f"{slope['low']:12.1f} {slope['high']:13.1f} {slope['num_samples']:7} "
              f"{'GROWS' if growth['is_too_much'] else ''}")  # fmt: skip
    for failure in report["failures"][:20]:
        print(f"  FAILED: {failure[:1000]}")
    return not report["failures"] and not any(growth["is_too_much"] for growth in report["growths"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill-every", type=float, default=240, help="seconds between two deaths (0: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("build/soak.json"))
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        RunningServer(*_FLAGS, log=Path(folder) / "log") as server,
    ):
        report = soak(server, minutes=options.minutes, kill_every=options.kill_every, seed=options.seed)
        server.stop()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if show(report) else 1


if __name__ == "__main__":
    sys.exit(main())
