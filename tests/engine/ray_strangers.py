"""A process of its own for the tests of Ray: starts ranks, and a spare one, whose fingerprints are not the known ones.

argv: a folder for the run directory. Prints what became of each as one line.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from novainfer.errors import EngineError
from novainfer.transport.addresses import RunDir
from tests.engine.ray_driver import config
from workers.ray_group import RayWorkerGroup

KNOWN = ("another", "others")


def main() -> None:
    """Run the life described above."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.ERROR)
    group = RayWorkerGroup(config("demo", 1), RunDir.create(str(Path(sys.argv[1]) / "run")))
    try:
        group.start(1, KNOWN)
        while group.is_alive():
            time.sleep(0.01)  # nothing tells of a rank that has ended
        group.end()
        group.start(2)
        group.prepare(8, KNOWN)
        try:
            while not group.tend():
                time.sleep(0.01)
        except EngineError as error:
            print(f"spare: {error}")
        print(f"the one that serves lives: {group.is_alive()}")
    finally:
        group.stop()


if __name__ == "__main__":
    main()
