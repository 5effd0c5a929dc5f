"""A process for the tests of Ray: its raylet dies while it is started. argv: a folder.

Prints what `start` raised, the processes that are left once it was stopped, and whether the next start goes well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import psutil

import workers.ray_lean
from novainfer.config import ParallelConfig
from novainfer.errors import EngineError
from novainfer.transport.processes import children_named
from workers.ray_instance import RayInstance


def dies_before_it_is_known(gcs_address: str, node_id: str) -> bool:
    """In place of the question whether the control store knows the node: once it did, Ray's core would connect to it,
    and end this whole process if it is dead then.
    """
    for child in children_named(("raylet",)):
        child.kill()
    return False


def main() -> None:
    """Run the life described above."""
    instance = RayInstance(ParallelConfig(device="cpu"), Path(sys.argv[1]))
    with mock.patch.object(workers.ray_lean, "_is_registered", dies_before_it_is_known):
        try:
            instance.start()
        except EngineError as error:
            print(error, flush=True)
    instance.stop()
    print(psutil.Process().children(recursive=True), flush=True)
    instance.start()
    print("there" if instance.is_there() else "gone", flush=True)
    instance.stop()


if __name__ == "__main__":
    main()
