"""A process for the tests of Ray: loses its raylet, starts another one, says how far it is. argv: a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from novainfer.config import ParallelConfig
from workers.ray_instance import RayInstance


def main() -> None:
    """Run the life described above."""
    instance = RayInstance(ParallelConfig(device="cpu"), Path(sys.argv[1]))
    instance.start()
    raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
    raylet.kill()
    raylet.wait()
    print("there" if instance.is_there() else "gone", flush=True)
    instance.stop()
    instance.start()
    print("there" if instance.is_there() else "gone", flush=True)
    instance.stop()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
