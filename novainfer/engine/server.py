"""The scheduler process: one thread and its sockets around a `Replica`.

Each turn of the loop: receive messages, submit plans; for each result that is there: apply it, submit the next plan,
publish one batch per gateway (which goes first if it has first tokens or ends).
`python -m novainfer.engine.server --run-dir DIR --replica N --epoch E --group G`
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import time
from typing import Any

import zmq
from setproctitle import setproctitle

from novainfer.config import ServeConfig
from novainfer.engine.replica import Replica, ReplicaLinks
from novainfer.errors import ConfigError, ProtocolError
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.logs import configure
from novainfer.protocol.link import BEAT_SECONDS, Packet, packets_in
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    GIVE_UP_SIGNAL,
    ORDERS_SCHEMA,
    ROLE_SCHEDULER,
    SUPERVISOR_SCHEMA,
    ChildStarted,
)
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import (
    bind_pull,
    bind_router,
    connect_push,
    has_message,
    receive_frames,
    send_frames,
)
from novainfer.transport.parent import die_with_parent

logger = logging.getLogger("novainfer.scheduler")

# Nothing that comes and goes with steps and requests is a circle, so collections find next to nothing; and a full one
# visits every indexed block.
_GC_THRESHOLD = 20_000
_MAX_PACKETS_PER_TURN = 256  # or a few more: a message is taken whole


class SchedulerServer:
    """Owns the sockets."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, replica: int, *, epoch: int, group: int) -> None:
        """`group`: the epoch in which the worker group was started that works here at first."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateway_socket = bind_router(self._context, run_dir.gateways(replica))
        self._executor = ZmqExecutor(
            run_dir.workers(replica),
            world_size=config.parallel.tensor_parallel_size,
            epoch=epoch,
            context=self._context,
        )
        self._executor.expect(epoch, group=group)
        self._orders = bind_pull(self._context, run_dir.orders(replica))
        self._supervisor = connect_push(self._context, run_dir.supervisor())
        links = ReplicaLinks(self._send, self._report)
        self._replica = Replica(config, self._executor.group, links, number=replica, epoch=epoch, now=time.monotonic())
        self._started = ChildStarted(ROLE_SCHEDULER, replica, os.getpid(), epoch=epoch)
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        # In this order: what the supervisor says comes first.
        sources = (self._orders, self._gateway_socket, self._executor.socket, self._wake_r.fileno())
        self._sources: list[tuple[Any, int]] = [(source, int(zmq.POLLIN)) for source in sources]
        self._stopping = False
        self._ends_ranks = False  # nobody comes after us who would work with them

    def run(self) -> None:
        """Serve until SIGTERM, which leaves the ranks to a successor, or `GIVE_UP_SIGNAL`, which ends them."""
        signal.set_wakeup_fd(self._wake_w.fileno())
        for number in (signal.SIGTERM, GIVE_UP_SIGNAL):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
        self._report(self._started)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection between two steps need look at it
        gc.set_threshold(_GC_THRESHOLD)
        busy = False
        try:
            while not self._stopping:
                self._receive(0.0 if busy else BEAT_SECONDS)
                busy = self._replica.turn(time.monotonic())
        finally:
            self._executor.close(ends_ranks=self._ends_ranks)
            self._orders.close()
            self._supervisor.close()
            self._gateway_socket.close(linger=500)
            self._context.term()

    def _receive(self, timeout: float) -> None:
        ready = [source for source, _ in zmq.zmq_poll(self._sources, int(timeout * 1000))]
        if self._orders in ready:
            self._take_order()
        if heard := self._gateway_socket in ready:
            self._hear_gateways()
        # Last: what ranks said while they were idle is older than the plans to come, and must be known before them.
        if self._executor.socket in ready:
            self._executor.hear(has_any=True)
        elif heard:
            self._executor.hear()

    def _hear_gateways(self) -> None:
        """Take what they have sent; there is something."""
        left = _MAX_PACKETS_PER_TURN
        while True:
            identity, *frames = receive_frames(self._gateway_socket)
            left -= max(len(frames) // 2, 1)
            try:
                for packet in packets_in(frames):
                    self._replica.handle(identity, packet, time.monotonic())
            except ProtocolError as error:
                logger.warning("dropped what is not a gateway's message: %s", error)
            if left <= 0 or not has_message(self._gateway_socket):
                return

    def _take_order(self) -> None:
        try:
            self._replica.obey(ORDERS_SCHEMA.decode(self._orders.recv()))
        except ProtocolError as error:
            logger.warning("dropped what is not the supervisor's order: %s", error)

    def _send(self, identity: bytes, packet: Packet) -> bool:
        try:
            send_frames(self._gateway_socket, (identity, *packet.frames()))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _report(self, message: object) -> None:
        self._supervisor.send(SUPERVISOR_SCHEMA.encode(message))

    def _on_stop(self, signum: int, frame: object) -> None:
        self._stopping = True
        self._ends_ranks = self._ends_ranks or signum == GIVE_UP_SIGNAL


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process; the exit code is 0 only after a signal to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=FIRST_EPOCH)
    parser.add_argument("--group", type=int, default=FIRST_EPOCH)
    args = parser.parse_args(argv)
    die_with_parent()
    setproctitle(f"novainfer: scheduler {args.replica}")
    run_dir = RunDir.create(args.run_dir)
    config = ServeConfig.from_json(run_dir.config_file.read_text())
    configure(f"scheduler {args.replica}", config.server)
    try:
        SchedulerServer(config, run_dir, args.replica, epoch=args.epoch, group=args.group).run()
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
