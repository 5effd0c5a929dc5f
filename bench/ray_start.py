"""How long Ray takes to start on this machine now: an ordinary program that imports it and calls `ray.init`, no more.

What starts on Ray is ready later than without by that, unless it starts less of it, as our server does.
`python -m bench.ray_start [--starts 5]`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

_PROGRAM = """
import sys
import ray
ray.init(
    num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1]
)
print("there", flush=True)
ray.shutdown()
"""


def seconds() -> float | None:
    """From the start of the program's process until `ray.init` has returned; None if it fails."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path: sockets lie in it
        environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        environ.pop("RAY_ADDRESS", None)  # of a cluster that runs
        began = time.perf_counter()
        command = [sys.executable, "-c", _PROGRAM, folder]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as program:
            assert program.stdout is not None
            is_there = any(line.strip() == "there" for line in program.stdout)
            took = time.perf_counter() - began
            program.stdout.read()  # to its end
    return took if is_there else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_start", description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    found = sorted(took for _ in range(parser.parse_args().starts) if (took := seconds()) is not None)
    if not found:
        raise SystemExit("Ray does not start")
    print(f"{statistics.median(found):.1f} s ({found[0]:.1f}-{found[-1]:.1f})")


if __name__ == "__main__":
    main()
