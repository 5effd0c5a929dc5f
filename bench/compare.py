"""Us and the peers under the same load, in turns: `python -m bench.compare [--rounds 3] [--peers ours vllm ...]`.

Every server is alone on the machine while it is measured: started, warmed up, measured, ended. Each round begins with
another one. Refuses to run on red tests (`bench.gate`). Ends by itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import cases, comparison, gate, ray_start, report, roofline
from bench.comparison import PeerRound
from bench.foreign import Foreign, ForeignCpu
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.peers.base import Peer, Running, folder_of, peers_root
from bench.peers.processes import pss_bytes
from bench.peers.registry import OURS, OURS_INT8, OURS_W8A8, chosen

SHAPE = "qwen3-0.6b"
MIN_ROUNDS = 3  # fewer are a trial, and say so
READING = cases.Figure("memory read by all threads", "GB/s", is_higher_better=True)
MULTIPLYING = cases.Figure("bf16 products of all threads", "GFLOP/s", is_higher_better=True)
RAY_START = cases.Figure("Ray's own start (`ray.init`)", "s")  # beside which ready is to be read
MACHINE = (READING, MULTIPLYING, RAY_START)
CASE_NAMES = (*(case.name for case in cases.cases(1000, 0)), "chat")


@dataclass(frozen=True, slots=True)
class Plan:
    """What every peer gets in every round."""

    checkpoint: Path
    vocab_size: int
    rounds: int
    case_names: tuple[str, ...]


class Measurement:
    """One peer in one round, while it runs."""

    def __init__(self, peer: Peer, number: int, running: Running, plan: Plan) -> None:
        self._running, self._plan, self._number = running, plan, number
        self.result = PeerRound(peer.name, number)

    def all(self) -> None:
        """Warm up, then every case."""
        self._note(cases.READY, self._running.ready_seconds, None)
        for items, concurrency in cases.warm_up(self._plan.vocab_size):
            self._running.driver.run(items, concurrency)
        for case in cases.cases(self._plan.vocab_size, self._number):
            if case.name in self._plan.case_names:
                self._case(case)
        if "chat" in self._plan.case_names:
            self._chat()
        self._note(cases.MEMORY, pss_bytes(self._running.pid) / 1e6, None)

    def _case(self, case: cases.Case) -> None:
        watch = ForeignCpu(self._running.pid)
        results = self._running.driver.run(case.items, case.max_concurrency)
        foreign = watch.end()
        error = cases.wrong(case, results)
        if error:
            self.result.failures[case.name] = error
            return
        for figure, compute in case.figures:
            self._note(figure, compute(results), foreign)

    def _chat(self) -> None:
        watch = ForeignCpu(self._running.pid)
        texts = cases.chats(self._plan.vocab_size, self._number)
        try:
            seconds = [self._running.driver.chat(text) for text in texts]
        except (OSError, ValueError, KeyError) as error:
            self.result.failures["chat"] = f"{type(error).__name__}: {error}"
            return
        known = [one for one in seconds if one is not None]
        if known:
            self._note(cases.CHAT, 1000 * statistics.median(known), watch.end())

    def _note(self, figure: cases.Figure, value: float, foreign: Foreign | None) -> None:
        self.result.values[figure.key] = value
        if foreign is not None:
            self.result.foreign_cores[figure.key] = foreign.cores
            self.result.stolen_cores[figure.key] = foreign.stolen_cores


def measure(peer: Peer, number: int, plan: Plan) -> PeerRound:
    """Start it, warm it up, measure it, end it. One that fails has a failure instead of figures."""
    try:
        with peer.start(folder_of(peer), plan.checkpoint, free_port()) as running:
            measurement = Measurement(peer, number, running, plan)
            measurement.all()
    except SystemExit as error:
        return PeerRound(peer.name, number, failures={"start": str(error)})
    return measurement.result


def measure_limit(number: int, decoder: roofline.Decoder) -> PeerRound:
    """What the machine would allow now, as if it were a server's figures."""
    machine = roofline.measure()
    seen = {READING.key: machine.bytes_per_second / 1e9, MULTIPLYING.key: machine.flops_per_second / 1e9}
    if (ray_seconds := ray_start.seconds()) is not None:
        seen[RAY_START.key] = ray_seconds
    return PeerRound(comparison.LIMIT, number, roofline.limits(decoder, machine) | seen)


def compare(peers: Sequence[Peer], plan: Plan, limit: Callable[[int], PeerRound]) -> list[PeerRound]:
    """All rounds; each begins with another peer, so that none always follows the same one.

    limit: measures in a round what the machine would allow; called after every peer.
    """
    found = []
    for number in range(plan.rounds):
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            began = time.perf_counter()
            result = measure(peer, number, plan)
            found += [result, limit(number)]
            took = time.perf_counter() - began
            failed = "".join(f"\n  {case}: {error}" for case, error in result.failures.items())
            print(
                f"round {number + 1} of {plan.rounds}, {peer.name}: {took:.0f} s{failed}", file=sys.stderr, flush=True
            )
    return found


def figures(vocab_size: int) -> list[cases.Figure]:
    """All that are taken, in the table's order."""
    of_cases = [figure for case in cases.cases(vocab_size, 0) for figure, _ in case.figures]
    return [*of_cases, cases.CHAT, cases.READY, cases.MEMORY, *MACHINE]


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def default_checkpoint() -> Path:
    """Random weights in the shape of the comparison, made when they are not there."""
    folder = peers_root() / "checkpoints" / SHAPE
    if not (folder / "chat_template.jinja").is_file():  # written last
        make_checkpoint(SHAPES[SHAPE], folder)
    return folder


def installed(peers: Sequence[Peer]) -> list[Peer]:
    """Those that are there; says which are not."""
    missing = [peer.name for peer in peers if peer.version(folder_of(peer)) is None]
    if missing:
        print(f"not installed (`make peers`): {', '.join(missing)}", file=sys.stderr)
    return [peer for peer in peers if peer.name not in missing]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME", help="default: all that are installed")
    parser.add_argument("--cases", nargs="*", default=list(CASE_NAMES), choices=CASE_NAMES, metavar="NAME")
    parser.add_argument("--model", type=Path, help=f"checkpoint folder; default: random weights, {SHAPE}'s shape")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser.parse_args()


def main() -> None:
    """The command line."""
    arguments = _arguments()
    if reason := gate.reason_to_refuse():
        raise SystemExit(f"nothing is measured: {reason}")
    checkpoint: Path = arguments.model or default_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    peers = installed(chosen(arguments.peers))
    plan = Plan(checkpoint, vocab_size, arguments.rounds, tuple(arguments.cases))
    decoder = roofline.Decoder.of(config)
    rounds = compare(peers, plan, lambda number: measure_limit(number, decoder))
    precisions = {peer.name: peer.precision for peer in peers} | {comparison.LIMIT: ""}
    table = comparison.rows(figures(vocab_size), rounds, (OURS, OURS_INT8, OURS_W8A8), precisions)
    text = f"{comparison.markdown(table, list(precisions))}\n\n{comparison.ratios_markdown(table)}"
    if arguments.output:
        result: dict[str, Any] = {
            **report.origin(),
            "kind": "comparison",
            "checkpoint": str(checkpoint),
            "peers": {peer.name: peer.version(folder_of(peer)) for peer in peers},
            "command": shlex.join(["python", "-m", "bench.compare", *sys.argv[1:]]),
            "table": comparison.as_json(table),
            "markdown": text,
            "rounds": [asdict(one) for one in rounds],
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.rounds < MIN_ROUNDS:
        print(f"A trial: {arguments.rounds} rounds are not {MIN_ROUNDS}.\n")
    print(text)
    if any(one.failures for one in rounds):
        raise SystemExit("some cases failed")


if __name__ == "__main__":
    main()
