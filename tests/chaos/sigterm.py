"""Servers that are told to stop: `python -m tests.chaos.sigterm --rounds 50`.

Each round starts a server, and while it starts, or in the middle of its streams, tells it to stop: it alone or its
whole process group. Every accepted stream must be what an undisturbed server says, new requests get 503 and
`Retry-After`, `/livez` says 200 and `/readyz` 503 meanwhile, the exit status is 0, and nothing is left. At the end one
server whose workers cannot come back: `end_without_workers`. Exit status 1 if anything was otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from novainfer.checkpoint import resolve_checkpoint
from novainfer.config import DEMO_MODEL
from tests.chaos.kill_loop import Request, make_requests
from tests.chaos.streams import COMPLETIONS, Answer, Streams, read, read_all, run
from tests.servers import RunningServer, assert_gone

MOMENTS = ("starting", "sending", "streaming", "streaming", "ending")
TARGETS = ("server", "group")
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STREAMS = 16
START_SECONDS = 6.0  # about what a start takes
END_PATIENCE = 90.0


@dataclass(frozen=True)
class Order:
    """When and how one server is told. `when`: seconds of a start, else tokens that the streams have got."""

    moment: str
    target: str
    number: signal.Signals
    when: float


@dataclass
class Round:
    """What came of it. Times in seconds."""

    order: Order
    num_finished: int = 0  # streams, as undisturbed
    num_refused: int = 0  # requests, after the signal
    num_let_in: int = 0  # requests after the signal that were still answered
    took: float = 0.0  # from the signal to the end
    wrong: list[str] = field(default_factory=list)


def draw(rng: random.Random) -> Order:
    """Any order."""
    moment = rng.choice(MOMENTS)
    when = {
        "starting": rng.uniform(0.05, START_SECONDS),
        "sending": 0.0,
        "streaming": rng.randrange(1, 600),
        "ending": 1000.0,  # most of them
    }[moment]
    return Order(moment, rng.choice(TARGETS), rng.choice(SIGNALS), when)


def tell(process: subprocess.Popen[str], order: Order) -> None:
    """Send the signal; the process leads a group."""
    if order.target == "group":
        os.killpg(process.pid, order.number)
    else:
        process.send_signal(order.number)


# -- while it starts ------------------------------------------------------------------------------------------------


def stop_a_start(order: Order, folder: Path) -> Round:
    """One server that is told before it has ever been ready (or just then)."""
    run_dir, log = folder / "run", folder / "log"
    command = [sys.executable, "-m", "novainfer.entrypoints.cli", "serve", "--port", "0", "--run-dir", str(run_dir)]
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, text=True, process_group=0
        )
    threading.Event().wait(order.when)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    has_handlers = any(" ".join(child.cmdline()).startswith("novainfer: ") for child in tree[1:])
    began, result = time.monotonic(), Round(order)
    tell(process, order)
    status = process.wait(END_PATIENCE)
    result.took = time.monotonic() - began
    by_signal = -order.number if order.number != signal.SIGINT else 130
    if status != 0 and (has_handlers or status not in (by_signal, -order.number)):
        result.wrong.append(f"exit status {status}: {log.read_text()[-2000:]}")
    _look_for_rest(result, tree, run_dir)
    return result


def _look_for_rest(result: Round, tree: list[psutil.Process], run_dir: Path) -> None:
    # What was started after the tree was looked at; most of Ray's processes are told of the directory.
    late = [one for one in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(one.info["cmdline"] or ())]
    try:
        assert_gone([*tree, *late])
    except AssertionError as error:
        result.wrong.append(str(error))
    if run_dir.exists():
        result.wrong.append(f"left in the run directory: {sorted(path.name for path in run_dir.iterdir())}")
        shutil.rmtree(run_dir)


# -- in the middle of streams ---------------------------------------------------------------------------------------


class Knocker:
    """Sends requests of one token, one after the other, from its start until nobody listens any more."""

    def __init__(self, server: RunningServer, result: Round) -> None:
        self._server, self._result = server, result
        self._thread = threading.Thread(target=self._run, name="knocker")

    def __enter__(self) -> Knocker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        with self._server.http() as http, contextlib.suppress(httpx.TransportError):
            while True:
                reply = http.post(COMPLETIONS, json={"prompt": "Knock", "max_tokens": 1})
                if reply.status_code == 200:
                    self._result.num_let_in += 1
                    continue
                self._result.num_refused += 1
                if reply.status_code != 503 or int(reply.headers.get("retry-after", 0)) < 1:
                    self._result.wrong.append(f"refused with {reply.status_code} and {dict(reply.headers)}")
                states = [http.get(path).status_code for path in ("/livez", "/readyz")]
                if states != [200, 503]:
                    self._result.wrong.append(f"/livez, /readyz: {states}")


class Readers:
    """Each of these requests once, all at the same time, and how many tokens have come of them."""

    def __init__(self, server: RunningServer, requests: list[Request]) -> None:
        self._changed = threading.Condition()
        self._num_sent = self._num_tokens = self._num_ended = 0
        self._num_requests = len(requests)
        self.accepted: set[int] = set()  # numbers of the requests whose answer has begun
        self._pool = ThreadPoolExecutor(len(requests))
        self._answers = [self._pool.submit(self._read, server, *item) for item in enumerate(requests)]

    def wait(self, num_tokens: float) -> None:
        """Until all have been sent, and so many tokens have come, or all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_sent >= self._num_requests)
            self._changed.wait_for(lambda: self._num_tokens >= num_tokens or self._num_ended >= self._num_requests)

    def wait_until_accepted(self, server: RunningServer) -> None:
        """Until the scheduler has had all of them; nobody else asks this server for anything."""
        num_accepted = 0.0
        while num_accepted < self._num_requests:
            with contextlib.suppress(AssertionError):  # the gateway has not heard of it yet
                num_accepted = server.metric("novainfer_requests_accepted_total")

    def answers(self) -> list[Answer]:
        """What came, in the order of the requests."""
        with self._pool:
            return [answer.result() for answer in self._answers]

    def _read(self, server: RunningServer, number: int, request: Request) -> Answer:
        try:
            return read(server, *request, lambda what, tokens: self._told(number, what, tokens))
        except AssertionError as error:  # the server has ended before the stream
            return Answer(error=f"the server has ended: {error}")
        finally:
            with self._changed:
                self._num_ended += 1
                self._changed.notify_all()

    def _told(self, number: int, what: str, tokens: int) -> None:
        with self._changed:
            if what == "accepted":
                self.accepted.add(number)
            self._num_sent += what == "sent"
            self._num_tokens += tokens
            self._changed.notify_all()


def stop_a_server(order: Order, folder: Path, requests: list[Request], oracle: list[Answer]) -> Round:
    """One server that is told while these streams run."""
    run_dir, result = folder / "run", Round(order)
    flags = ("--drain-timeout", "300", "--run-dir", str(run_dir))
    with RunningServer(*flags, log=folder / "log", leads_group=True) as server:
        tree = server.tree()
        readers = Readers(server, requests)
        readers.wait(order.when)
        if order.moment != "sending":
            readers.wait_until_accepted(server)
        began = time.monotonic()
        tell(server.process, order)
        with Knocker(server, result):
            answers = readers.answers()
        status = server.wait()
        result.took = time.monotonic() - began
    if status != 0:
        result.wrong.append(f"exit status {status}: {server.errors[-2000:]}")
    if "ERROR" in server.errors or "did not stop" in server.errors:
        result.wrong.append(server.errors[-2000:])
    for number, (request, answer, expected) in enumerate(zip(requests, answers, oracle, strict=True)):
        if answer == expected:
            result.num_finished += 1
        elif number in readers.accepted or order.moment != "sending":  # else nobody may have accepted it
            result.wrong.append(f"{request}: {answer} instead of {expected}")
    _look_for_rest(result, tree, run_dir)
    return result


# -- workers that cannot come back ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastDays:
    """What a server did whose workers could not come back. Times in seconds, from the death of the first one."""

    until_unready: float
    until_end: float
    status: int
    answers: list[Answer]


def end_without_workers(folder: Path) -> LastDays:
    """Move the checkpoint of a server away while streams of every kind run, and kill its rank."""
    model = folder / "model"
    shutil.copytree(resolve_checkpoint(DEMO_MODEL), model)
    died_at = unready_at = 0.0

    def disturb(streams: Streams) -> None:
        nonlocal died_at, unready_at
        model.rename(folder / "moved")
        with server.http() as http:
            http.get("/readyz")  # connects
            died_at = time.monotonic()
            server.processes()["worker 0.0"].kill()
            while http.get("/readyz").status_code != 503:
                pass
            unready_at = time.monotonic()

    with RunningServer("--model", str(model), "--max-restarts", "1", log=folder / "log") as server:
        tree = server.tree()
        answers = run(server, disturb)
        status = server.wait()
        ended_at = time.monotonic()
        assert_gone(tree)
    return LastDays(unready_at - died_at, ended_at - died_at, status, answers)


# -- many rounds ----------------------------------------------------------------------------------------------------


def summary(rounds: list[Round]) -> bool:
    """Print it; True if nothing was wrong."""
    wrong = [one for one in rounds if one.wrong]
    print(f"rounds {len(rounds)}, wrong {len(wrong)}; streams finished {sum(one.num_finished for one in rounds)}; "
          f"requests after the signal: refused with 503 {sum(one.num_refused for one in rounds)}, "
          f"still let in {sum(one.num_let_in for one in rounds)}")  # fmt: skip
    for moment in dict.fromkeys(MOMENTS):
        took = [one.took for one in rounds if one.order.moment == moment]
        if took:
            print(f"  {moment:10} {len(took):3}  signal to end: median {statistics.median(took):5.2f} s, "
                  f"longest {max(took):5.2f} s")  # fmt: skip
    print(f"  {dict(Counter(f'{one.order.number.name} to the {one.order.target}' for one in rounds))}")
    for one in wrong:
        print(f"  WRONG: {one.order}: {'; '.join(one.wrong)[:3000]}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    requests = make_requests(rng, STREAMS)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="nova-") as name:
        folder = Path(name)
        with RunningServer(log=folder / "log") as server:
            oracle = read_all(server, requests)
            server.stop()
        for number in range(options.rounds):
            order = draw(rng)
            if order.moment == "starting":
                rounds.append(stop_a_start(order, folder))
            else:
                rounds.append(stop_a_server(order, folder, requests, oracle))
            print(f"{number:4} {order}: {rounds[-1].wrong or 'well'}"[:300], file=sys.stderr, flush=True)
        days = end_without_workers(folder)
    is_well = summary(rounds)
    print(f"no worker can come back: /readyz says 503 after {days.until_unready:.2f} s, the end comes after "
          f"{days.until_end:.1f} s with status {days.status}; streams told of it: "
          f"{sum(answer.error is not None for answer in days.answers)} of {len(days.answers)}")  # fmt: skip
    is_told = days.status != 0 and all(answer.error is not None for answer in days.answers)
    return 0 if is_well and is_told else 1


if __name__ == "__main__":
    raise SystemExit(main())
