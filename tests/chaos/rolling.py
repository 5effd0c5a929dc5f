"""All replicas of a server restarted one after another, again and again, under constant load.

`python -m tests.chaos.rolling --requests 5000 [--replicas 2] [--streams 12] [--seed 0]`

Every stream must be, event for event, what an undisturbed server says, and none may fail. The report is `kill_loop`'s;
its kills are the restarts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from novainfer.entrypoints.replicas import ask
from novainfer.protocol.supervision import LIST, RESTART, ReplicaCommand
from novainfer.transport.addresses import RunDir
from tests.chaos.kill_loop import Crowd, Kill, make_requests, report
from tests.chaos.streams import read_all
from tests.servers import RunningServer


def restart_all(server: RunningServer, run_dir: RunDir, replicas: int) -> None:
    """Until each replica is another process, and serves."""
    names = [f"replica {number}" for number in range(replicas)]
    old = {name: server.processes()[name] for name in names}
    ask(run_dir, ReplicaCommand(RESTART))
    while True:
        assert server.process.poll() is None, server.errors
        now = server.processes()
        if all(now.get(name, old[name]) != old[name] for name in names) and all(
            state == "serving" for state in ask(run_dir, ReplicaCommand(LIST)).states
        ):
            return
        time.sleep(0.1)  # the server answers at once, and says no more


def main(argv: list[str] | None = None) -> int:
    """Restart until so many requests have been answered; 0 if none was disturbed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds: the server's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    requests = make_requests(random.Random(args.seed), 48)
    restarts = []
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        path = Path(folder)
        undisturbed = RunningServer("--log-level", "warning", log=path / "undisturbed.log")
        oracle = read_all(undisturbed, requests)
        undisturbed.stop()
        flags = ("--replicas", str(args.replicas), "--run-dir", str(path / "run"))
        server = RunningServer(*flags, "--drain-timeout", str(args.drain_timeout), log=path / "server.log")
        crowd = Crowd(server, requests, oracle, args.streams)
        while len(crowd.lives) < args.requests:
            restart = Kill(len(restarts), "restart", "all replicas", "any", time.monotonic())
            restarts.append(restart)
            restart_all(server, RunDir(path / "run"), args.replicas)
            print(f"restart {restart.number}: {time.monotonic() - restart.at:.1f} s, {len(crowd.lives)} streams so far",
                  flush=True)  # fmt: skip
        crowd.stop()
        server.stop()
    return 0 if report(restarts, crowd.lives, None) else 1


if __name__ == "__main__":
    sys.exit(main())
