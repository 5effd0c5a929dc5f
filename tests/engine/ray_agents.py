"""A process for the tests of Ray: what its raylet's agents read, whether an actor answers, and which agents are left by
a raylet that is killed; a line each. argv: a folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from novainfer.config import ParallelConfig
from workers.ray_instance import RayInstance, import_ray

_PATIENCE = 20.0  # seconds; an event ends the wait long before


def main() -> None:
    """Run the life described above."""
    instance = RayInstance(ParallelConfig(device="cpu"), Path(sys.argv[1]))
    instance.start()
    raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
    agents = [child for child in raylet.children() if child.name() == "cat"]
    print([os.readlink(f"/proc/{agent.pid}/fd/0").partition(":")[0] for agent in agents], flush=True)
    ray = import_ray()
    actor = ray.remote(num_cpus=1)(Answering).remote()
    print(ray.get(actor.answer.remote(), timeout=_PATIENCE), flush=True)
    raylet.kill()
    print(psutil.wait_procs(agents, _PATIENCE)[1], flush=True)
    instance.stop()


class Answering:
    """An actor."""

    def answer(self) -> str:
        """Return a word."""
        return "here"


if __name__ == "__main__":
    main()
