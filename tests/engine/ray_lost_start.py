"""A process for the tests of Ray: its raylet dies while it is started. argv: a folder.

Prints what `start` raised, the processes that are left once it was stopped, and whether the next start goes well.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil

from novainfer.config import ParallelConfig
from novainfer.errors import EngineError
from workers.ray_instance import RayInstance


def kill_when_there(name: str) -> None:
    """The first child of this name."""
    while True:
        for child in psutil.Process().children():
            try:
                if child.name() == name:
                    child.kill()
                    return
            except psutil.NoSuchProcess:
                pass


def main() -> None:
    """Run the life described above."""
    instance = RayInstance(ParallelConfig(device="cpu"), Path(sys.argv[1]))
    killer = threading.Thread(target=kill_when_there, args=("raylet",))
    killer.start()
    try:
        instance.start()
    except EngineError as error:
        print(error, flush=True)
    killer.join()
    instance.stop()
    print(psutil.Process().children(recursive=True), flush=True)
    instance.start()
    print("there" if instance.is_there() else "gone", flush=True)
    instance.stop()


if __name__ == "__main__":
    main()
