"""A gateway's end of one scheduler's socket, in its event loop: a `GatewaySession`, its socket and its clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable

import zmq

from novainfer.client.session import Answer, GatewaySession
from novainfer.client.stream import Backlog
from novainfer.errors import EngineError, OverloadedError, ProtocolError
from novainfer.protocol.link import BEAT_SECONDS, Packet
from novainfer.protocol.messages import AliasCancelled, CancelAlias, Claimed, ClaimRequest, EngineInfo
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import NOBLOCK, connect_dealer, has_message, receive_frames, send_frames

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # of an engine that is there
ANSWER_PATIENCE = 30.0  # of one that is being replaced
MESSAGES_PER_TURN = 64  # then other tasks of the loop have their turn
PACKETS_PER_MESSAGE = 64  # to the scheduler, at most
_ORDINARY_MESSAGES = 2  # so many at once are no backlog


class EngineLink:
    """One scheduler, as seen from one gateway. `session` is for its owner, who must not keep it waiting.

    beaten: called after each beat, four times a second, when the session has judged whether its engine is there.
    backlog: is_behind while the message that is being handled was not among the first of its turn.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        gateway_id: str,
        lost_timeout: float,
        backlog: Backlog,
        beaten: Callable[[], None],
    ) -> None:
        self._identity = gateway_id.encode()
        self._endpoint = endpoint
        self._beaten = beaten
        self.session = GatewaySession(
            self._send,
            self._take_answer,
            gateway_id=f"{gateway_id}-{os.getpid()}",
            first_link=int.from_bytes(os.urandom(4)) << 24,
            lost_timeout=lost_timeout,
            now=time.monotonic(),
            backlog=backlog,
        )
        self._answers: dict[int, asyncio.Future[Answer]] = {}  # by the query that asked for it
        self._queries = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._heard = asyncio.Event()
        self._outgoing: list[bytes] = []  # frames of packets that go out together, see `_send`
        self._backlog = backlog

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and say hello; the scheduler may come later."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, self._endpoint, self._identity)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self.session.heard_at = time.monotonic()
        self._beat()

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        self.session.fail_all(EngineError("The server is shutting down."), tell_engine=True)
        self.session.tell_told()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._socket is not None and self._context is not None and self._loop is not None:
            self._flush()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=200)
            self._context.term()
        self._socket = self._context = None

    @property
    def is_ready(self) -> bool:
        """See `GatewaySession.is_ready`."""
        return self.session.is_ready(time.monotonic())

    @property
    def accepts(self) -> bool:
        """See `GatewaySession.accepts`."""
        return self.session.accepts(time.monotonic())

    @property
    def stats_age(self) -> float:
        """Seconds since the last `EngineStats`."""
        return time.monotonic() - self.session.stats_at

    async def wait_ready(self) -> EngineInfo:
        """Return once the engine has said that it is ready."""
        while self.session.info is None or not self.session.info.ready:
            await self._hear()
        return self.session.info

    def owes_figures(self, *, is_new: bool) -> bool:
        """Whether its first figures are about to come: it is ready, or was so before the gateway that is_new."""
        info = self.session.info
        return self.session.stats is None and (is_new or (info is not None and info.ready))

    async def wait_figures(self, *, is_new: bool) -> None:
        """Return once it owes none."""
        while self.owes_figures(is_new=is_new):
            await self._hear()

    async def _hear(self) -> None:
        await self._heard.wait()
        self._heard.clear()

    # -- questions ----------------------------------------------------------------------------------------------

    async def cancel_alias(self, alias: str, tenant: str) -> bool:
        """End the tenant's requests with this alias in the engine, of whichever gateway; whether there were any.

        They end at their own gateways. Raises `OverloadedError` if the engine does not answer.
        """
        answer = await self._ask(CancelAlias(next(self._queries), tenant, alias))
        return isinstance(answer, AliasCancelled) and answer.found

    async def claim(self, alias: str, tenant: str) -> Claimed:
        """The tenant's streams with this alias that may be taken over: by submitting them; else they must be released.

        Raises `OverloadedError` if the engine does not answer.
        """
        query = next(self._queries)
        answer = await self._ask(ClaimRequest(query, tenant, alias))
        return answer if isinstance(answer, Claimed) else Claimed(query, [], False)

    async def _ask(self, question: CancelAlias | ClaimRequest) -> Answer:
        if not self.is_ready or self._loop is None:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[question.query] = future
        self.session.ask(question)
        begun = time.monotonic()
        try:
            while not future.done() and time.monotonic() < begun + ANSWER_PATIENCE:
                num_links = self.session.num_links
                await asyncio.wait([future], timeout=ANSWER_SECONDS)
                if self.is_ready and num_links == self.session.num_links:
                    break  # else it was asked again, or will be
        except asyncio.CancelledError:
            if future.done():
                self._give_back(future.result())
            raise
        finally:
            self._answers.pop(question.query, None)
            self.session.give_up(question.query)
        if not future.done():
            raise OverloadedError("The engine does not answer.", retry_after=2.0)
        return future.result()

    def _take_answer(self, answer: Answer) -> None:
        future = self._answers.pop(answer.query, None)
        if future is not None:
            future.set_result(answer)
        else:
            self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        """Too late: nobody waits any more."""
        if isinstance(answer, Claimed):
            self.session.release(answer.requests)

    # -- the socket ---------------------------------------------------------------------------------------------

    def _send(self, packet: Packet) -> None:
        """What one turn of the loop has to say goes as one message: each wakes ZeroMQ's thread, and the scheduler."""
        if self._socket is None or self._loop is None:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += packet.frames()
        if len(self._outgoing) >= 2 * PACKETS_PER_MESSAGE:
            self._flush()

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if not frames or self._socket is None or self._loop is None:
            return
        send_frames(self._socket, frames, NOBLOCK)  # no high-water mark: never blocks
        # The socket's descriptor is edge-triggered and a send may have consumed the edge of a message.
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Handle what has arrived. Called by the loop, never blocks."""
        number = 0
        while number < MESSAGES_PER_TURN and self._take_message(is_behind=number >= _ORDINARY_MESSAGES):
            number += 1
        self.session.flush()
        self._backlog.is_behind = False
        if number:
            self._heard.set()
        if number == MESSAGES_PER_TURN and self._loop is not None:
            self._loop.call_soon(self._receive)

    def _take_message(self, *, is_behind: bool) -> bool:
        """Handle the next one; whether there was one."""
        if self._socket is None or not has_message(self._socket):
            return False
        self._backlog.is_behind = is_behind
        try:
            self.session.take(Packet.of(receive_frames(self._socket, NOBLOCK)), time.monotonic())
        except ProtocolError as error:
            self.session.num_protocol_errors += 1
            log.error("message from the scheduler dropped: %s", error)
        return True

    def _beat(self) -> None:
        if self._loop is None or self._socket is None:
            return
        self._receive()
        self.session.beat(time.monotonic())
        self._heartbeat = self._loop.call_later(BEAT_SECONDS, self._beat)
        self._beaten()
