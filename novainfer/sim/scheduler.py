"""The scheduler process of the simulation: a `Replica` on a `RankGroup`, driven as its shell drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from novainfer.config import ServeConfig
from novainfer.engine.replica import Replica, ReplicaLinks
from novainfer.errors import ProtocolError
from novainfer.executor.ranks import RankGroup, SendToRanks
from novainfer.protocol.link import BEAT_SECONDS, Packet
from novainfer.protocol.step import StepPlan
from novainfer.protocol.supervision import WorkersLost
from novainfer.sim.world import Process, Violation, World

_MESSAGES_PER_TURN = 256
_TURN_SECONDS = 0.0001


class SimExecutor(RankGroup):
    """A `RankGroup` with an inbox, whose plans can be watched."""

    def __init__(self, send: SendToRanks, *, world_size: int, epoch: int) -> None:
        self.inbox: deque[tuple[bytes, object]] = deque()
        self.watch: Callable[[StepPlan], None] = lambda plan: None
        super().__init__(send, world_size=world_size, epoch=epoch)

    def submit(self, plan: StepPlan) -> None:
        """See `Executor`."""
        self.watch(plan)
        super().submit(plan)

    def hear(self) -> None:
        """Take in what has come."""
        while self.inbox:
            self.handle(*self.inbox.popleft())


class SimScheduler(Process):
    """One scheduler process, from the moment when its sockets are bound."""

    def __init__(
        self, world: World, config: ServeConfig, executor: SimExecutor, links: ReplicaLinks, *, epoch: int, window: int
    ) -> None:
        super().__init__(world, f"scheduler.{epoch}", clock_offset=1000.0 * epoch)
        self.executor = executor
        self.replica = Replica(config, executor, links, number=0, epoch=epoch, now=self.clock, window=window)
        self.after_turn: Callable[[SimScheduler], None] = lambda scheduler: None
        self._orders: deque[WorkersLost] = deque()
        self._packets: deque[tuple[bytes, Packet]] = deque()
        self.wake()

    def receive_order(self, order: object) -> None:
        """From the supervisor."""
        if isinstance(order, WorkersLost):
            self._orders.append(order)
            self.wake()

    def receive_packet(self, identity: bytes, packet: object) -> None:
        """From a gateway."""
        if isinstance(packet, Packet):
            self._packets.append((identity, packet))
            self.wake()

    def receive_from_rank(self, identity: bytes, message: object) -> None:
        """From a rank."""
        self.executor.inbox.append((identity, message))
        self.wake()

    def turn(self) -> None:
        """As `SchedulerServer.run`: an order, gateways' packets, what ranks say, then the replica's turn."""
        if self._orders:
            self.replica.obey(self._orders.popleft())
        for _ in range(min(len(self._packets), _MESSAGES_PER_TURN)):
            identity, packet = self._packets.popleft()
            try:
                self.replica.handle(identity, packet, self.clock)
            except ProtocolError as error:
                raise Violation(f"{self.name}: a gateway's message was refused: {error}") from error
        self.executor.hear()
        moved = self.replica.turn(self.clock)
        self.after_turn(self)
        has_mail = bool(self._orders or self._packets)
        self.wake(_TURN_SECONDS * self.slowness if moved or has_mail else BEAT_SECONDS)


def send_to(reach: Callable[[bytes, object], bool]) -> SendToRanks:
    """`SendToRanks` over something that reaches one rank."""

    def send(identities: Sequence[bytes], message: object) -> list[bytes]:
        return [identity for identity in identities if not reach(identity, message)]

    return send
