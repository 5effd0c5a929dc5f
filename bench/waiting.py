"""A turn of the scheduler while many wait: `python -m bench.waiting`.

The scheduler process's machine (`Replica`) in this process, with ranks that compute nothing: every row decodes, and
behind them wait as many requests as are asked for. CPU time of a turn, apart from the ranks'. Ends by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from dataclasses import replace
from typing import Any

from bench import report
from novainfer.config import ServeConfig
from novainfer.engine.replica import Replica, ReplicaLinks
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import AddRequest, Heartbeat, Hello
from novainfer.protocol.step import WORKER_SCHEMA, IndexedBlock, StepPlan, StepResult
from novainfer.sampling.params import SamplingParams
from workers.null_runner import NullRunner

ROWS = 256
NUM_INPUT = 32
_NEVER = 1_000_000  # tokens that no row reaches here
_TURN_S = 0.005  # on the machine's clock
_GATEWAY = b"gateway"


class _Ranks:
    """A rank in this process: what it computes, and packs, is not the scheduler's time."""

    def __init__(self) -> None:
        self._runner = NullRunner(ROWS, 600, is_first=True)
        self._plans: deque[bytes] = deque()
        self.seconds = 0.0
        self.held: list[IndexedBlock] = []
        self.info = ExecutorInfo(
            epoch=1,
            num_blocks=ROWS * (_NEVER // 256),
            block_size=256,
            vocab_size=600,
            max_model_len=_NEVER + NUM_INPUT,
            max_num_seqs=ROWS,
            max_num_batched_tokens=2048,
            mode="null",
        )

    def expect(self, epoch: int, *, group: int) -> None:
        """Nobody else."""

    def try_ready(self) -> ExecutorInfo:
        """At once."""
        return self.info

    def check(self) -> None:
        """Ranks that are idle say nothing."""

    def submit(self, plan: StepPlan) -> None:
        """Packed as for a socket."""
        self._plans.append(WORKER_SCHEMA.encode(plan))

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest plan's result."""
        if not self._plans:
            return None
        began = time.process_time()
        step = self._runner.launch(WORKER_SCHEMA.decode(self._plans.popleft()))
        assert step is not None
        packed = WORKER_SCHEMA.encode(step.finish())
        self.seconds += time.process_time() - began
        result: StepResult = WORKER_SCHEMA.decode(packed)
        return result

    def close(self) -> None:
        """Nothing is open."""


class Crowd:
    """A scheduler whose rows are all in use, with `num_waiting` requests behind them."""

    def __init__(self, num_waiting: int) -> None:
        self._ranks = _Ranks()
        config = ServeConfig()
        scheduler = replace(config.scheduler, max_num_seqs=ROWS, max_waiting=num_waiting)
        links = ReplicaLinks(lambda identity, packet: True, lambda message: None)
        self._now = 0.0
        self._number = 0
        config = replace(config, scheduler=scheduler)
        self._replica = Replica(config, self._ranks, links, number=0, epoch=1, now=0.0, window=1 << 40)
        self._replica.turn(0.0)
        self._say(Hello("gateway"))
        params = SamplingParams(max_tokens=_NEVER, temperature=0, ignore_eos=True, seed=1)
        for number in range(ROWS + num_waiting):
            ids = [5 + number % 500, 5 + number // 500, *[7] * (NUM_INPUT - 2)]
            self._say(AddRequest(f"r{number}", ids, params, ref=number))

    def _say(self, message: Any) -> None:
        packet = Packet(7, self._number, message)
        self._number += 1
        self._replica.handle(_GATEWAY, Packet.of(packet.frames()), self._now)

    def turns(self, num: int) -> float:
        """Mean CPU seconds of one."""
        began, ranks = time.process_time(), self._ranks.seconds
        for number in range(num):
            self._now += _TURN_S
            self._replica.turn(self._now)
            if number % 50 == 0:
                self._say(Heartbeat(0))
        return (time.process_time() - began - (self._ranks.seconds - ranks)) / num

    @property
    def num_waiting(self) -> int:
        """As the scheduler sees it."""
        engine = self._replica.engine
        assert engine is not None
        return len(engine.scheduler.waiting)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.waiting", description=__doc__)
    parser.add_argument("--waiting", default="1000,10000,100000", help="by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=200, help="in each round")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    crowds = {int(num): Crowd(int(num)) for num in arguments.waiting.split(",")}
    turns: dict[int, list[float]] = {num: [] for num in crowds}
    for round_number in range(arguments.rounds + 1):
        for num, crowd in crowds.items():
            seconds = crowd.turns(arguments.turns)
            if round_number:  # the first one admits the rows
                turns[num].append(1e6 * seconds)
    least = statistics.median(turns[min(crowds)])
    for num, found in turns.items():
        median = statistics.median(found)
        waiting = crowds[num].num_waiting
        print(
            f"{waiting:7} waiting: {median:.0f} us per step of {ROWS} rows ({min(found):.0f}-{max(found):.0f}), "
            f"{median / ROWS:.2f} us per token, {median / least:.2f}x"
        )
    report.write(
        {"kind": "waiting", "us_per_turn": {str(num): found for num, found in turns.items()}}, arguments.output
    )


if __name__ == "__main__":
    main()
