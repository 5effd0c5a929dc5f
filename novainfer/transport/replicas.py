"""`replicas.json` in a run directory: which replicas there are. The supervisor writes it, its gateways read it.

Where there is none the server is one replica, whose scheduler listens in the run directory itself.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from novainfer.errors import ConfigError
from novainfer.transport.addresses import Endpoint, RunDir, write_private
from novainfer.transport.short_dir import remove_short_dir

NAME = "replicas.json"
# IN: it takes requests, when it is ready. DRAINING: only what it has. OUT: it is dead; what it had goes elsewhere.
IN, DRAINING, OUT = "in", "draining", "out"
REPLICA_DIR = "replica-"  # with a replica's number: its run directory, in the server's
RAY_DIR = "ray"  # in a run directory: the files of its Ray instance, or a link to them (`short_dir`)


@dataclass(frozen=True, slots=True)
class Replicas:
    """states: by number, IN, DRAINING or OUT. `version` grows with every change."""

    version: int = 0
    states: dict[int, str] = field(default_factory=dict)

    def endpoints(self, run_dir: RunDir) -> dict[int, Endpoint]:
        """Where gateways reach each."""
        if not self.version:
            return {0: run_dir.gateways(0)}
        return {replica: replica_dir(run_dir, replica).gateways(replica) for replica in self.states}


def replica_dir(run_dir: RunDir, replica: int) -> RunDir:
    """The run directory of one of several replicas."""
    return RunDir(run_dir.path / f"{REPLICA_DIR}{replica}")


def remove_ray_files(directory: Path) -> None:
    """Of a server or a replica with this run directory, and of its replicas, wherever they are."""
    replicas = [path for path in directory.glob(f"{REPLICA_DIR}*") if not path.is_symlink()]  # no server makes such
    for path in (directory, *replicas):
        remove_short_dir(path / RAY_DIR)
        shutil.rmtree(path / RAY_DIR, ignore_errors=True)


def write_replicas(run_dir: RunDir, replicas: Replicas) -> None:
    """Replace the file as a whole."""
    text = json.dumps({"version": replicas.version, "states": replicas.states})
    write_private(run_dir.path / NAME, text)


class ReplicasFile:
    """The reader's end: `read` costs a look at the file's status unless it has changed."""

    def __init__(self, run_dir: RunDir) -> None:
        self._path: Path = run_dir.path / NAME
        self._seen: tuple[int, int] | None = None
        self._replicas = Replicas()

    def read(self) -> Replicas:
        """As they are now. Raises `ConfigError` for a file that no supervisor writes."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return self._replicas
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._seen:
            try:
                data = json.loads(self._path.read_text(encoding="utf-8"))
                states = {int(replica): str(state) for replica, state in data["states"].items()}
                self._replicas = Replicas(int(data["version"]), states)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self._path} is not what a supervisor writes: {error}") from None
            self._seen = seen
        return self._replicas
