"""Whoever fetches a client's stream at the same moment: a second reader of the same tenant, who asks first."""

from __future__ import annotations

from novainfer.client.session import Answer
from novainfer.client.stream import RequestStream
from novainfer.errors import NovaInferError, OverloadedError
from novainfer.protocol.messages import Claimed
from novainfer.sim.gateways import SimGateway
from novainfer.sim.scenario import RequestSpec
from novainfer.sim.world import World

GIVES_BACK, TAKES = "gives back", "takes"
_READ_SECONDS = 0.1


class Rival:
    """Asks once after each death of a gateway. has_taken: he has, or had, the stream."""

    def __init__(self, world: World, spec: RequestSpec) -> None:
        self.has_taken = False
        self._world = world
        self._spec = spec
        self._may_ask = False

    def lose_gateway(self) -> None:
        """The stream's gateway is dead."""
        self._may_ask = bool(self._spec.rival)

    def claim(self, gateway: SimGateway) -> None:
        """In the gateway's turn, before the client asks."""
        if self._may_ask:
            self._may_ask = False
            message = self._spec.message
            gateway.claim(message.tenant, message.aliases[0], lambda answer: self._take_over(gateway, answer))

    def _take_over(self, gateway: SimGateway, answer: Answer) -> None:
        requests = answer.requests if isinstance(answer, Claimed) else []
        if not requests:
            return
        self._world.note(f"rival of {self._spec.message.request_id} {self._spec.rival}")
        if self._spec.rival == GIVES_BACK:
            gateway.session.release(requests)
            return
        stream = RequestStream([self._spec.message.request_id], gateway.session.cancel, gateway.session.told)
        try:
            gateway.session.submit(requests, stream, gateway.clock)
        except OverloadedError:
            gateway.session.release(requests)
            return
        self.has_taken = True
        gateway.call(lambda: self._read(gateway, stream))

    def _read(self, gateway: SimGateway, stream: RequestStream) -> None:
        try:
            stream.take_ready()
            if not stream.finished:
                self._world.after(_READ_SECONDS, lambda: gateway.call(lambda: self._read(gateway, stream)))
                return
        except NovaInferError:
            pass  # what may go wrong is judged by clients
        stream.close()
