"""Two replicas under load, of which one loses every process at once, again and again.

`python -m tests.chaos.replica_loop --kills 20 [--replicas 2] [--streams 12] [--seed 0]`

Every stream must be, event for event, what an undisturbed server says, and none may fail. The report is `kill_loop`'s.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from novainfer.entrypoints.replicas import ask
from novainfer.protocol.supervision import LIST, ReplicaCommand
from novainfer.transport.addresses import RunDir
from tests.chaos.kill_loop import Crowd, Kill, make_requests, report
from tests.chaos.streams import read_all
from tests.conservation import at_rest
from tests.servers import RunningServer


def kill_replica(server: RunningServer, number: int, rng: random.Random) -> int:
    """SIGKILL to everything of one replica, in any order; how many processes that were."""
    root = server.processes()[f"replica {number}"]
    victims = [root, *root.children(recursive=True)]
    rng.shuffle(victims)
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            pass  # it died with another one
    return len(victims)


def wait_until_all_serve(server: RunningServer, run_dir: RunDir, old: psutil.Process, number: int) -> None:
    """Until another process is this replica, and every replica serves."""
    while server.processes().get(f"replica {number}", old) == old or not _all_serve(run_dir):
        assert server.process.poll() is None, server.errors
        time.sleep(0.05)  # nothing tells of a process that another one starts


def _all_serve(run_dir: RunDir) -> bool:
    return all(state == "serving" for state in ask(run_dir, ReplicaCommand(LIST)).states)


def main(argv: list[str] | None = None) -> int:
    """Run the loop; 0 if no stream was disturbed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", help="file for one line of JSON per stream and kill")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    requests = make_requests(rng, 48)
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        path = Path(folder)
        undisturbed = RunningServer("--log-level", "warning", log=path / "undisturbed.log")
        oracle = read_all(undisturbed, requests)
        undisturbed.stop()
        flags = ("--replicas", str(args.replicas), "--run-dir", str(path / "run"))
        server = RunningServer(*flags, log=path / "server.log")
        crowd = Crowd(server, requests, oracle, args.streams)
        kills = []
        for count in range(args.kills):
            seen = crowd.num_events + rng.randrange(200)
            crowd.wait(lambda seen=seen: crowd.num_events >= seen)  # type: ignore[misc]
            number = rng.randrange(args.replicas)
            old = server.processes()[f"replica {number}"]
            kill = Kill(count, "kill", f"replica {number}", "any", time.monotonic())
            kills.append(kill)
            killed = kill_replica(server, number, rng)
            wait_until_all_serve(server, RunDir(path / "run"), old, number)
            print(f"kill {count}: replica {number}, {killed} processes; all serve again after "
                  f"{time.monotonic() - kill.at:.1f} s", flush=True)  # fmt: skip
        crowd.stop()
        moved = server.errors.count("requests go on elsewhere")
        for figures in at_rest(server):
            figures.check_engines()
            figures.check_gateways()
            assert figures.of("requests_ended_total", "failed") == 0
        print(f"conserved: {figures['requests_begun_total']:.0f} requests begun and ended, none failed; choices of the "
              f"engines as they are now: {figures['choices_accepted_total']:.0f} accepted and finished")  # fmt: skip
        server.stop()
    print(f"moved {moved} times")
    if args.report:
        with open(args.report, "w", encoding="utf-8") as out:
            return 0 if report(kills, crowd.lives, out) else 1
    return 0 if report(kills, crowd.lives, None) else 1


if __name__ == "__main__":
    sys.exit(main())
