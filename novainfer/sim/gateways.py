"""A gateway process of the simulation: a `GatewaySession`, driven as the engine client drives it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from novainfer.client.session import Answer, GatewaySession
from novainfer.errors import ProtocolError
from novainfer.protocol.link import BEAT_SECONDS, Packet
from novainfer.protocol.messages import CancelAlias, ClaimRequest
from novainfer.sim.wires import Wire
from novainfer.sim.world import Process, Violation, World

_PACKETS_PER_TURN = 64


class SimGateway(Process):
    """One gateway process. What clients want of it is done in its own turn, as it would be in its event loop."""

    def __init__(self, world: World, index: int, number: int, wire: Wire, *, lost_timeout: float) -> None:
        """number: of this process among all that were ever started."""
        super().__init__(world, f"gateway{index}.{number}", clock_offset=77.0 * number)
        self.index = index
        self.wire = wire
        self.on_death: dict[str, Callable[[], None]] = {}  # of its clients, by name
        self._answers: dict[int, Callable[[Answer], None]] = {}
        self._queries = itertools.count()
        self._inbox: deque[Packet] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._next_beat = self.clock
        self.session = GatewaySession(
            wire.send_up,
            self._take_answer,
            gateway_id=self.name,
            first_link=(number + 1) << 24,
            lost_timeout=lost_timeout,
            now=self.clock,
        )
        self.wake()

    def receive(self, packet: object) -> None:
        """From the scheduler."""
        if isinstance(packet, Packet):
            self._inbox.append(packet)
            self.wake()

    def call(self, action: Callable[[], None]) -> None:
        """A client's wish: done when the process runs, never if it dies before."""
        self._calls.append(action)
        self.wake()

    def cancel_alias(self, tenant: str, alias: str, answered: Callable[[Answer], None]) -> None:
        """Ask the scheduler to end the requests with this alias."""
        query = next(self._queries)
        self._answers[query] = answered
        self.session.ask(CancelAlias(query, tenant, alias))

    def claim(self, tenant: str, alias: str, answered: Callable[[Answer], None]) -> None:
        """Ask the scheduler for the requests with this alias."""
        query = next(self._queries)
        self._answers[query] = answered
        self.session.ask(ClaimRequest(query, tenant, alias))

    def _take_answer(self, answer: Answer) -> None:
        answered = self._answers.pop(answer.query, None)
        if answered is not None:
            answered(answer)

    def turn(self) -> None:
        """Packets, clients' wishes, and a beat when it is time."""
        for _ in range(min(len(self._inbox), _PACKETS_PER_TURN)):
            try:
                self.session.take(self._inbox.popleft(), self.clock)
            except ProtocolError as error:
                raise Violation(f"{self.name}: the scheduler's message was refused: {error}") from error
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        if self.clock >= self._next_beat - 1e-9:
            self._next_beat = self.clock + BEAT_SECONDS
            self.session.beat(self.clock)
        self.wake(0.0 if self._inbox else self._next_beat - self.clock)

    def kill(self) -> None:
        """See `Process`."""
        if self.is_alive:
            super().kill()
            self.wire.dealer_died()
            waiting, self.on_death = self.on_death, {}
            for tell in waiting.values():
                tell()
