"""The processes of ranks: `python -m workers.rank_zygote`, started by a rank's host (`workers.rank_host`).

The zygote imports everything that a rank needs, once; a rank's process is forked from it and begins with its weights.
Its host sends it orders, and hears lines: `HERE`, or else its last words.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from setproctitle import setproctitle

from novainfer.logs import configure
from novainfer.transport.zygote import Zygote
from workers.kept_config import is_transformers_wanted
from workers.launch import RankLaunch

if TYPE_CHECKING:
    from workers.worker import Worker

HERE = "here"  # a spare rank stands by
# On CPUs a rank computes with all of them: the gateway, whose work is little, gets its turn at once all the same.
_NICENESS = 3
_SPARE_NICENESS = 8


@dataclass(frozen=True, slots=True)
class Order:
    """A line of JSON.

    The first order has a `RankLaunch` as JSON, and variables that the environment shall have; the process is then a
    rank, or stands by as a spare one. Later orders are for a spare: serve in this epoch; without one, only answer.
    """

    launch: str = ""
    is_spare: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    epoch: int | None = None

    def to_line(self) -> str:
        """For `from_line`."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Order:
        """Undo `to_line`."""
        return cls(**json.loads(line))


def import_all() -> None:
    """What a rank imports on its way, and no thread: numpy's linear algebra would start one for each core."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401

    del os.environ["OPENBLAS_NUM_THREADS"]
    if is_transformers_wanted():
        import transformers.models.auto.configuration_auto  # noqa: F401

    import workers.step_loop
    import workers.worker  # noqa: F401


def be_rank(connection: socket.socket) -> None:
    """The life of a rank's process, from its first order on. Raises what made the rank fail, after telling its host."""
    from workers.step_loop import run_rank
    from workers.worker import choose_device

    with connection.makefile("rw", encoding="utf-8") as talk:
        try:
            order = Order.from_line(talk.readline())
            os.environ.update(order.environ)
            launch, worker = RankLaunch.from_json(order.launch), None
            if choose_device(launch.config.parallel, launch.place.rank).type == "cpu":
                os.nice(_NICENESS)
            configure(f"worker {launch.replica}.{launch.place.rank}", launch.config.server)
            if order.is_spare:
                launch, worker = _stand_by(launch, talk)
            _set_title(launch)
            run_rank(launch, worker)
        except Exception as error:
            _say(talk, " ".join(f"{type(error).__name__}: {error}".split()))
            raise


def _stand_by(launch: RankLaunch, talk: TextIO) -> tuple[RankLaunch, Worker]:
    """Do all that a rank does before its first word, then answer each order, until one says to serve."""
    from workers.fingerprint import check_fingerprint
    from workers.worker import Worker

    _set_title(launch, " spare")
    with ThreadPoolExecutor(1, initializer=_yield_to_others) as pool:
        worker = pool.submit(Worker.build, launch.config, launch.place, _no_progress).result()
    check_fingerprint(worker.fingerprint, launch.place.known)
    epoch = None
    while epoch is None:
        _say(talk, HERE)
        epoch = Order.from_line(talk.readline()).epoch
    return replace(launch, place=replace(launch.place, epoch=epoch)), worker


def _say(talk: TextIO, line: str) -> None:
    talk.write(line + "\n")
    talk.flush()


def _yield_to_others() -> None:
    """Niceness is a thread's own on Linux, and cannot be taken back: so a thread of its own loads a spare rank."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_SPARE_NICENESS, os.nice(0)))


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody waits."""


def _set_title(launch: RankLaunch, more: str = "") -> None:
    setproctitle(f"novainfer: worker {launch.replica}.{launch.place.rank}{more}")


def main(argv: list[str] | None = None) -> int:
    """Run the zygote to its end."""
    parser = argparse.ArgumentParser(prog="rank_zygote", description="Rank processes of a NovaInfer server.")
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the host's orders")
    options = parser.parse_args(argv)
    setproctitle("novainfer: rank zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the supervisor decides
    import_all()
    control = socket.socket(fileno=options.control)
    return Zygote(control, lambda _, connection: be_rank(connection), tell_end=True).run()


if __name__ == "__main__":
    sys.exit(main())
