"""A scheduler process without ranks: the real `Replica` on the oracle's rows, pure or behind a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from novainfer.config import ServeConfig, ServerConfig
from novainfer.engine.replica import Replica, ReplicaLinks
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.link import Packet, packets_in
from novainfer.protocol.messages import AddRequest, Hello, OutputBatch
from novainfer.protocol.step import IndexedBlock, StepResult
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import connect_dealer
from tests.oracle import OracleExecutor
from tests.serving_thread import ServingThread


class OracleGroup(OracleExecutor):
    """Ranks that are always there. Implements `GroupExecutor`; while `paused` is set no step comes to its end."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.paused = threading.Event()
        self.held: list[IndexedBlock] = []

    def expect(self, epoch: int, *, group: int) -> None:
        """See `GroupExecutor`."""

    def try_ready(self) -> ExecutorInfo:
        """See `GroupExecutor`."""
        return self.info

    def check(self) -> None:
        """See `GroupExecutor`."""

    def collect(self, timeout: float | None) -> StepResult | None:
        """See `Executor`."""
        return None if self.paused.is_set() else super().collect(timeout)


def make_replica(group: OracleGroup, to_gateway: Callable[[bytes, Packet], bool], grace: float, now: float) -> Replica:
    """`grace`: seconds that an orphan is kept. `to_gateway`: False if that gateway cannot be reached."""
    config = ServeConfig(server=ServerConfig(orphan_grace=grace))
    return Replica(config, group, ReplicaLinks(to_gateway, lambda report: None), number=0, epoch=1, now=now)


class ReplicaThread(ServingThread):
    """Serves gateways until closed. `replica` is to look at; `group.paused` may be set."""

    def __init__(self, endpoint: Endpoint, *, vocab_size: int, grace: float = 30.0) -> None:
        super().__init__(endpoint)
        self.group = OracleGroup(vocab_size=vocab_size, block_size=16, num_blocks=256)
        self.replica = make_replica(self.group, self._send, grace, time.monotonic())
        self._start()

    def leave_behind(self, *requests: AddRequest, num_tokens: int = 0) -> None:
        """A gateway that sends these and dies, once so many tokens of each have come; return when they are orphans."""
        self.wait_for(lambda: self.replica._engine is not None)  # gateways send requests to an engine that is ready
        with connect_dealer(self._context, self.endpoint, b"gateway-lost") as dealer:
            for number, message in enumerate((Hello("lost"), *requests)):
                dealer.send_multipart(Packet(1, number, message).frames())
            counts = dict.fromkeys((request.request_id for request in requests), 0)
            while min(counts.values()) < num_tokens:
                said = Packet.of(dealer.recv_multipart()).message
                for output in said.outputs if isinstance(said, OutputBatch) else []:
                    counts[output.request_id] += len(output.token_ids)
            self.wait_for(lambda: all(self._is_known(request.request_id) for request in requests))
        self.wait_for(lambda: len(self.replica._orphans) == len(requests))

    def _is_known(self, request_id: str) -> bool:
        return any(request_id in {**link.live, **link.untold} for link in list(self.replica._gateways.values()))

    def _send(self, identity: bytes, packet: Packet) -> bool:
        try:
            self._socket.send_multipart([identity, *packet.frames()], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _turn(self) -> bool:
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            for packet in packets_in(frames):
                self.replica.handle(identity, packet, time.monotonic())
        return self.replica.turn(time.monotonic())
