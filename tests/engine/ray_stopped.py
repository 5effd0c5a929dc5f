"""A process of its own for the tests of Ray: a server of its Ray instance is stopped while ranks run, and at the end.

argv: a folder for the run directory; the server's name; what else is stopped at the end, if anything: the watch.
Prints what became of it, line by line.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from novainfer.transport.addresses import RunDir
from tests.engine.ray_driver import config
from workers.ray_group import RayWorkerGroup


def stop(name: str) -> None:
    """The child with this name, or the one that runs a program from its command line."""
    for child in psutil.Process().children():
        if child.name() == name or (name == "watch" and "-c" in child.cmdline()[1:2]):
            os.kill(child.pid, signal.SIGSTOP)
            while child.status() != psutil.STATUS_STOPPED:
                pass


def temporary() -> list[str]:
    """What lies in the temporary directory, without the numbers."""
    return sorted(name.rpartition("-")[0] for name in os.listdir(tempfile.gettempdir()))


def main() -> None:
    """Run the life described above."""
    folder, name, *others = sys.argv[1:]
    group = RayWorkerGroup(config("demo", 1), RunDir.create(str(Path(folder) / "run")))
    try:
        group.start(1)
        stop(name)
        while group.is_alive():
            time.sleep(0.01)  # nothing tells
        print("lost", temporary(), flush=True)
        group.start(2)
        print("there" if group.is_alive() else "gone", temporary(), flush=True)
        for each in (name, *others):
            stop(each)
    finally:
        group.stop()
    print(psutil.Process().children(recursive=True), temporary(), flush=True)


if __name__ == "__main__":
    main()
