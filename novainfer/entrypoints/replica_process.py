"""One replica of several as a process: `python -m novainfer.entrypoints.replica_process --server-dir DIR --index R`.

A supervisor like that of a whole server, without gateways. Who wants to know how it is, and starts it again if it
dies, is the supervisor of the server (`fleet.py`), whose child it is.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import zmq
from setproctitle import setproctitle

from novainfer.config import ServeConfig
from novainfer.entrypoints.launch import standard_launch
from novainfer.entrypoints.supervisor import Supervisor
from novainfer.errors import ConfigError
from novainfer.logs import configure
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    ROLE_REPLICA,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
    ReplicaPulse,
)
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import connect_push
from novainfer.transport.cluster import cluster_links
from novainfer.transport.parent import die_with_parent
from novainfer.transport.replicas import remove_ray_files, replica_dir

logger = logging.getLogger(__name__)

# A replica's epochs go on where those of the process before it can never have come to: gateways drop older ones.
EPOCHS_OF_A_START = 1_000_000


class FleetReports:
    """A `Progress` that tells the supervisor of the server."""

    def __init__(self, server_dir: RunDir, index: int, epoch: int) -> None:
        self._index = index
        self._epoch = epoch
        self._began = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_push(self._context, server_dir.supervisor())

    def show(self, message: LoadProgress) -> None:
        """Several replicas at once would be no progress that a human could follow."""

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def announce(self, config: ServeConfig, port: int) -> None:
        """All processes are ready."""
        logger.info("ready (%.1f s)", self.seconds())
        self._send(ChildReady(ROLE_REPLICA, self._index, self._epoch))

    def turn(self, serves: bool) -> None:
        """We live."""
        self._send(ReplicaPulse(self._index, self._epoch, serves))

    def stopping(self) -> None:
        """It was the other end's wish, or it sees us end."""

    def started(self) -> None:
        """The process runs."""
        self._send(ChildStarted(ROLE_REPLICA, self._index, os.getpid(), epoch=self._epoch))

    def fault(self, words: str) -> None:
        """The last word of a process that cannot go on."""
        self._send(ChildFault(ROLE_REPLICA, self._index, self._epoch, words))

    def close(self) -> None:
        """Nothing is shown."""

    def end(self) -> None:
        """Let a last word out, for a second at most."""
        self._socket.close()
        self._context.term()

    def _send(self, message: object) -> None:
        try:
            self._socket.send(SUPERVISOR_SCHEMA.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass


def main(argv: list[str] | None = None) -> int:
    """Run one replica to its end; the exit status is 0 after SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-dir", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--epoch", type=int, default=FIRST_EPOCH)
    args = parser.parse_args(argv)
    die_with_parent()
    setproctitle(f"novainfer: replica {args.index}")
    server_dir = RunDir.create(args.server_dir)
    run_dir = RunDir.create(str(replica_dir(server_dir, args.index).path))
    config = ServeConfig.from_json(run_dir.config_file.read_text(encoding="utf-8"))
    configure(f"replica {args.index}", config.server)
    reports = FleetReports(server_dir, args.index, args.epoch)
    reports.started()
    try:
        return _supervise(config, run_dir, args.index, reports, args.epoch)
    except ConfigError as error:
        reports.fault(str(error))
        return 2
    finally:
        reports.end()


def _supervise(config: ServeConfig, run_dir: RunDir, index: int, reports: FleetReports, start: int) -> int:
    _remove_files(run_dir)
    with cluster_links(run_dir, config.parallel.cluster_host, index):
        launch = standard_launch(config, run_dir, index)
        first_epoch = FIRST_EPOCH + (start - FIRST_EPOCH) * EPOCHS_OF_A_START
        with Supervisor(config, run_dir, launch, reports, index, first_epoch) as supervisor:
            status = supervisor.run()
        if supervisor.fault is not None:
            reports.fault(supervisor.fault)
        return status


def _remove_files(run_dir: RunDir) -> None:
    """What a process that was killed here has left."""
    remove_ray_files(run_dir.path)
    for path in run_dir.path.glob("ranks-*"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
