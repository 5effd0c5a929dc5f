"""The kill loop: streams without end on a real server, whose processes are killed and stopped again and again.

`python -m tests.chaos.kill_loop --kills 200 [--streams 16] [--ranks 2] [--spare-workers 1 [--rested]]
[--speculation prompt-lookup] [--seed 0]`

Every stream must be, event for event, what an undisturbed server says: text, ids, log-probabilities, finish reasons,
usage. The report has one line of JSON per stream and per kill; the summary gives the longest pause of a stream around
each kill. Exit status 1 if any stream was not exact, or had a pause of more than `LONGEST_PAUSE`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil

from tests.chaos.blows import STRANGE, wait_replaced
from tests.chaos.streams import CHAT, COMPLETIONS, Answer, read
from tests.servers import RunningServer

Request = tuple[str, dict[str, Any]]
QUESTIONS = (
    "What is NovaInfer?", "Hello!", "Spell the word river.", "Count from 3 to 9.", "What is 23 plus 45?",
    "Who are you?", "What is 9 minus 4?", "Name a color.",
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "n": 2, "top_p": 0.95},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.2, "stop": ["zq", "ion"], "top_k": 50},
    {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.1, "min_tokens": 10},
)
TEXT = "gateway 0 text "  # its processes, and their zygote
STANDS_BY = "spare workers stand by"  # the supervisor says
HOST = "ray::RankHost"  # the actor that a rank's processes are below
EPOCH, ACCEPTED, LIVE = (
    f"novainfer_{name}" for name in ("engine_epoch", "requests_accepted_total", "gateway_live_requests")
)
PAUSE_AROUND = 30.0  # seconds after a kill in which a pause counts as its doing
LONGEST_PAUSE = 30.0  # seconds: whoever waits longer has gone


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """Short and long ones, of every kind of parameter."""
    requests: list[Request] = []
    for number in range(count):
        options = {**OPTIONS[number % len(OPTIONS)], "seed": number, "max_tokens": rng.choice([12, 20, 40, 80, 160])}
        options["ignore_eos"] = rng.random() < 0.8
        if number % 4 == 3:
            options["logprobs"] = 1 if options.pop("logprobs", False) else None
            options.pop("top_logprobs", None)
            prompt = " ".join(rng.choice(QUESTIONS) for _ in range(rng.choice([1, 20])))
            requests.append((COMPLETIONS, {"prompt": prompt, **options}))
        else:
            message = {"role": "user", "content": rng.choice(QUESTIONS)}
            requests.append((CHAT, {"messages": [message], **options}))
    return requests


@dataclass
class Kill:
    """One blow. `at`: seconds on the monotonic clock."""

    number: int
    what: str
    title: str
    moment: str
    at: float = 0.0
    pause: float = 0.0
    num_live: int = 0


@dataclass
class Life:
    """One stream, for the report. `times`: of its events, seconds on the monotonic clock."""

    request: int
    times: list[float] = field(default_factory=list)
    accepted: float = 0.0  # when a gateway did so last
    num_resumed: int = 0
    is_over: bool = False
    is_exact: bool = False
    error: str | None = None

    def waits_since(self, at: float) -> bool:
        """It was live then, and has had no event since."""
        return not self.is_over and bool(self.times) and self.times[-1] <= at

    def is_of_before(self, at: float) -> bool:
        """It is live with the gateway that it had then, dead or alive."""
        return not self.is_over and 0.0 < self.accepted <= at


class Crowd:
    """Threads that read one stream after the other until told to stop."""

    def __init__(self, server: RunningServer, requests: list[Request], oracle: list[Answer], size: int) -> None:
        self._server, self._requests, self._oracle = server, requests, oracle
        self._size = size
        self._changed = threading.Condition()
        self._stop = False
        self.num_events = 0
        self.num_sent = 0
        self.lives: list[Life] = []
        self._pool = ThreadPoolExecutor(size)
        self._readers = [self._pool.submit(self._run, random.Random(number)) for number in range(size)]

    def stop(self) -> None:
        """Let every stream end, then return."""
        self._stop = True
        self._pool.shutdown()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Block until it holds after some event; the readers must be alive."""
        with self._changed:
            while not condition():
                assert not any(reader.done() for reader in self._readers), "a reader has failed"
                self._changed.wait(1.0)

    def _run(self, rng: random.Random) -> None:
        while not self._stop:
            number = rng.randrange(len(self._requests))
            life = Life(number)
            with self._changed:
                self.lives.append(life)
            try:
                answer = read(self._server, *self._requests[number], lambda what, _, life=life: self._told(life, what))
            except Exception as error:  # whatever it is, it belongs into the report
                life.error = repr(error)
                raise
            life.is_exact = answer == self._oracle[number]
            life.error = answer.error or (None if life.is_exact else _difference(answer, self._oracle[number]))
            life.is_over = True
            if life.error is not None:
                print(f"NOT EXACT: request {number}: {life.error[:600]}", file=sys.stderr, flush=True)

    def _told(self, life: Life, what: str) -> None:
        with self._changed:
            if what in ("sent", "event"):
                life.times.append(time.monotonic())
            if what == "accepted":
                life.accepted = time.monotonic()
            life.num_resumed += what == "resumed"
            self.num_events += what == "event"
            self.num_sent += what == "sent"
            self._changed.notify_all()


def _difference(answer: Answer, expected: Answer) -> str:
    have, want = asdict(answer), asdict(expected)
    return "; ".join(f"{name}: {have[name]!r} != {want[name]!r}" for name in want if have[name] != want[name])


class Nemesis:
    """Strikes at chosen moments, and waits until the server has got over it."""

    BLOWS = (
        ("kill", "worker", 6), ("stop", "worker", 2), ("kill", "scheduler", 5), ("stop", "scheduler", 1),
        ("kill", "raylet", 1), ("kill", "gcs_server", 1), ("kill", "gateway", 3),
        ("stop", "gateway", 1), ("kill", TEXT, 1), ("kill", "rank zygote", 1), ("stop", "rank zygote", 1),
        ("kill", HOST, 1),
    )  # fmt: skip
    MOMENTS = ("any", "any", "request sent", "while loading", "just back")

    def __init__(self, server: RunningServer, crowd: Crowd, rng: random.Random, victims: str, is_rested: bool) -> None:
        """`victims`: those whose name begins so; "" = all kinds. `is_rested`: each blow finds spare workers ready."""
        self._server, self._crowd, self._rng, self._is_rested = server, crowd, rng, is_rested
        self._blows = [blow for blow in self.BLOWS if blow[1].startswith(victims)]
        self._is_whole = True
        self._schedulers: list[psutil.Process] = []  # struck, and not yet replaced as far as we know
        self._epoch = 0.0  # when the first of those was struck
        self.kills: list[Kill] = []
        if is_rested:
            self._wait_for_spares(0)

    def strike(self) -> Kill:
        """One blow at one moment; the second of two falls while the first is being mended, or just after it."""
        # Gateway and scheduler dead at once: then nobody has the streams.
        blows = [blow for blow in self._blows if self._is_whole or not blow[1].startswith("gateway")] or self._blows
        what, title, _ = self._rng.choices(blows, [weight for *_, weight in blows])[0]
        kill = Kill(len(self.kills), what, title, self._rng.choice(self.MOMENTS))
        if kill.moment == "request sent":
            sent = self._crowd.num_sent
            self._crowd.wait(lambda: self._crowd.num_sent > sent)
        elif kill.moment == "any":
            seen = self._crowd.num_events + self._rng.randrange(50)
            self._crowd.wait(lambda: self._crowd.num_events >= seen)
        if kill.moment == "just back":
            self._server.wait_until_ready()
        self.kills.append(kill)
        stood, ranks = self._server.errors.count(STANDS_BY), self._ranks()
        self._blow(kill)
        # Now and then the next blow meets what this one has left.
        self._is_whole = self._is_rested or kill.title == "gateway" or self._rng.random() < 0.85
        if self._is_whole:
            self._recover()
        if self._is_rested and self._ranks() != ranks:
            self._wait_for_spares(stood)
        return kill

    def _wait_for_spares(self, stood: int) -> None:
        while self._server.errors.count(STANDS_BY) == stood:
            assert self._server.process.poll() is None, self._server.errors
            time.sleep(0.01)  # nothing tells of a line in a log

    def _ranks(self) -> set[psutil.Process]:
        return {process for name, process in self._server.processes().items() if name.startswith("worker")}

    def _blow(self, kill: Kill) -> None:
        number = signal.SIGKILL if kill.what == "kill" else signal.SIGSTOP
        victims = self._victims(kill.title)
        while not victims:  # it is just being replaced
            assert self._server.process.poll() is None, self._server.errors
            victims = self._victims(kill.title)
        victim = self._rng.choice(victims)
        if kill.title == "scheduler" and not self._schedulers:
            self._epoch = self._server.metric(EPOCH)
        kill.at = time.monotonic()
        try:
            victim.send_signal(number)
        except psutil.NoSuchProcess:
            kill.what += " (too late)"
            return
        if kill.title == "scheduler":
            self._schedulers.append(victim)

    def _victims(self, title: str) -> list[psutil.Process]:
        if title in ("raylet", "gcs_server"):
            return [process for process in self._server.tree() if _name(process) == title]
        if title == HOST:
            return [process for process in self._server.tree() if _command(process).startswith(HOST)]
        found = sorted(self._server.processes().items())
        found = [(name, process) for name, process in found if process not in self._schedulers]
        return [process for name, process in found if name.startswith(title) and (" text " in name) == (title == TEXT)]

    def _recover(self) -> None:
        """Until every stream that was live at the blow has had an event since, or its end.

        What a gateway had from a scheduler before it died, or a client from a gateway, is still told after the blow,
        and tells nothing: until the new one has the stream, the other of the two is all that has it.
        """
        struck = self.kills[-1].at
        if self.kills[-1].title == "gateway":
            self._crowd.wait(lambda: not any(life.is_of_before(struck) for life in self._crowd.lives))
        if self._schedulers:
            for old in self._schedulers:
                wait_replaced(self._server, "scheduler 0", old)
            struck = time.monotonic()
        self._server.wait_until_ready()
        self._crowd.wait(lambda: not any(life.waits_since(struck) for life in self._crowd.lives))
        if self._schedulers:
            self._wait_for_copies(self._epoch + len(self._schedulers))
            self._schedulers.clear()

    def _wait_for_copies(self, epoch: float) -> None:
        """Until the scheduler of this epoch, or a later one, has as many requests from the gateway as are live there.

        The gateway sends a new scheduler all that it has before anything else.
        """
        live = self._server.metric(LIVE)
        while self._server.metric(EPOCH) < epoch or self._server.metric(ACCEPTED) < live:
            assert self._server.process.poll() is None, self._server.errors


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


def measure(kills: list[Kill], lives: list[Life]) -> None:
    """The longest time without an event of any stream that was live at the kill."""
    for kill in kills:
        for life in lives:
            if life.times and life.times[0] < kill.at < life.times[-1]:
                kill.num_live += 1
                gaps = zip(life.times, life.times[1:], strict=False)
                pauses = [
                    b - a for a, b in gaps if b > kill.at and a < kill.at + PAUSE_AROUND and a < _next(kill, kills)
                ]
                kill.pause = max([kill.pause, *pauses])


def _next(kill: Kill, kills: list[Kill]) -> float:
    return kills[kill.number + 1].at if kill.number + 1 < len(kills) else float("inf")


def report(kills: list[Kill], lives: list[Life], out: TextIO | None) -> bool:
    """Print the summary; True if every stream was exact and went on in time."""
    measure(kills, lives)
    wrong = [life for life in lives if not life.is_exact]
    for record in (*kills, *lives) if out is not None else ():
        print(json.dumps(asdict(record)), file=out)
    hit = [
        kill
        for kill in kills
        if kill.pause > LONGEST_PAUSE or any(life.times[0] < kill.at < life.times[-1] for life in wrong)
    ]
    print(f"kills {len(kills)}, survived {len(kills) - len(hit)}; streams {len(lives)}, not exact {len(wrong)}, "
          f"taken over from a dead gateway {sum(life.num_resumed > 0 for life in lives)}")  # fmt: skip
    for name, group in sorted(_groups(kills).items()):
        pauses = sorted(kill.pause for kill in group)
        p99 = pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
        print(f"  {name:20} {len(group):4}  pause p50 {statistics.median(pauses):6.2f} s  p99 {p99:6.2f} s")
    print(f"  moments: {dict(Counter(kill.moment for kill in kills))}")
    for life in wrong[:10]:
        print(f"  NOT EXACT: request {life.request}: {(life.error or '')[:600]}")
    return not wrong and not hit


def _groups(kills: list[Kill]) -> dict[str, list[Kill]]:
    groups: dict[str, list[Kill]] = {"all": kills}
    for kill in kills:
        groups.setdefault(f"{kill.what} {kill.title}", []).append(kill)
    return groups


def loop(
    server: RunningServer,
    *,
    kills: int,
    streams: int,
    seed: int,
    out: TextIO | None = None,
    victims: str = "",
    is_rested: bool = False,
) -> bool:
    """Strike so often; True if every stream was exact and nothing is held in the end."""
    requests = make_requests(random.Random(seed), 48)
    with ThreadPoolExecutor(16) as pool:
        oracle = list(pool.map(lambda request: read(server, *request, lambda what, tokens: None), requests))
    failed = [answer.error for answer in oracle if not answer.is_done or answer.error]
    if failed:
        raise RuntimeError(f"the undisturbed server failed: {failed[0]}")
    crowd = Crowd(server, requests, oracle, streams)
    nemesis = Nemesis(server, crowd, random.Random(seed + 1), victims, is_rested)
    try:
        for _ in range(kills):
            kill = nemesis.strike()
            bad = sum(1 for life in crowd.lives if life.error)
            print(f"{kill.number:4} {kill.what} {kill.title} ({kill.moment}), streams {len(crowd.lives)}, bad {bad}",
                  file=sys.stderr, flush=True)  # fmt: skip
        server.wait_until_ready()
    finally:
        crowd.stop()
        is_exact = report(nemesis.kills, crowd.lives, out)
    server.wait_until_nothing_is_held()
    return is_exact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spare-workers", type=int, default=0, help="the server's")
    parser.add_argument("--speculation", default="none", help="the server's")
    parser.add_argument("--rested", action="store_true", help="strike only when spare workers stand by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--victims", default="", help="only those whose name begins so: worker, scheduler, raylet, ...")
    parser.add_argument("--report", type=Path, help="file for one line of JSON per kill and stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as folder:
        flags = ("--tensor-parallel-size", str(options.ranks), "--spare-workers", str(options.spare_workers))
        flags += ("--speculation", options.speculation)
        server = RunningServer(*flags, log=Path(folder) / "log")
        try:
            with open(options.report or "/dev/null", "w", encoding="utf-8") as out:
                is_exact = loop(
                    server,
                    kills=options.kills,
                    streams=options.streams,
                    seed=options.seed,
                    out=out,
                    victims=options.victims,
                    is_rested=options.rested,
                )
            server.stop()
            if STRANGE in server.errors:
                print("a group of ranks was refused: it computed otherwise")
                is_exact = False
        finally:
            if server.process.poll() is None:
                server.kill()
    return 0 if is_exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
