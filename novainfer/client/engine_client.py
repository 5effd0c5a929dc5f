"""The gateway's end of the scheduler socket: submit, cancel, and one reader that dispatches whole `OutputBatch`es.

Lives in the gateway's event loop. Holds the journal; knows no HTTP and no text. Workers that are being replaced show
as an `EngineInfo` that is not ready: the streams wait, the scheduler has all it needs. A scheduler that knows nothing
of us (it died and came back) shows as another session: then every live request is sent again with the tokens it has,
and goes on. Nothing is promised for an engine that stays silent for minutes: its requests end with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time

import zmq

from novainfer.client.journal import Journal, JournalEntry
from novainfer.client.stream import RequestStream, StreamItem
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError, ProtocolError
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    GATEWAY_SCHEMA,
    AddRequest,
    AliasCancelled,
    CancelAlias,
    CancelRequest,
    EngineInfo,
    EngineStats,
    Hello,
    OutputBatch,
    PromptLogprobs,
    RequestRejected,
    TokenOutput,
)
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import connect_dealer

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25
SILENCE_BEFORE_HELLO = 0.75  # stats come four times a second
SILENCE_BEFORE_UNREADY = 2.0
LOST_SECONDS = 120.0  # by then the supervisor has replaced whatever is gone, or ended us
ANSWER_SECONDS = 5.0
MESSAGES_PER_TURN = 64  # then other tasks of the loop have their turn


class EngineClient:
    """One scheduler, as seen from one gateway.

    lost_timeout: seconds of silence after which live requests end with an error.
    `info` and `stats` are the last that came, None before; `limits` is the last info of an engine that was ready.
    """

    def __init__(self, endpoint: Endpoint, *, gateway_id: str, lost_timeout: float = LOST_SECONDS) -> None:
        self.info: EngineInfo | None = None
        self.limits: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.num_protocol_errors = 0
        self._identity = gateway_id.encode()
        # A new name for each process: a scheduler must not take a restarted gateway for the one that it knew.
        self._hello = Hello(f"{gateway_id}-{os.getpid()}-{os.urandom(4).hex()}")
        self._lost_timeout = lost_timeout
        self._endpoint = endpoint
        self._journal = Journal()
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[int, asyncio.Future[bool]] = {}  # by the query that asked for it
        self._queries = itertools.count()
        self._session = -1  # in which the scheduler knows our requests
        self._last_heard = time.monotonic()
        self._stats_at = self._last_heard
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._ready = asyncio.Event()

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and say hello; the scheduler may come later."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, self._endpoint, self._identity)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._last_heard = time.monotonic()
        self._send(self._hello)
        self._heartbeat = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        self.fail_all(EngineError("The server is shutting down."), tell_engine=True)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._socket is not None and self._context is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=200)
            self._context.term()
        self._socket = self._context = None

    @property
    def ready(self) -> bool:
        """The engine has loaded, takes requests, and was heard from lately."""
        info = self.info
        return info is not None and info.ready and self.silence < SILENCE_BEFORE_UNREADY

    @property
    def accepts(self) -> bool:
        """Requests may be submitted: also while the engine recovers, when they wait with the others."""
        return self.limits is not None and self.silence < self._lost_timeout

    @property
    def silence(self) -> float:
        """Seconds since the scheduler's last message."""
        return time.monotonic() - self._last_heard

    @property
    def stats_age(self) -> float:
        """Seconds since the last `EngineStats`."""
        return time.monotonic() - self._stats_at

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._journal)

    async def wait_ready(self) -> EngineInfo:
        """Return once the engine has said that it is ready."""
        while self.info is None or not self.info.ready:
            await self._ready.wait()
            self._ready.clear()
        return self.info

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, *requests: AddRequest) -> RequestStream:
        """Enter requests in the journal and send them; their outputs come on one stream, which must be closed.

        Raises `OverloadedError` before the engine is ready for the first time, or when it is lost. A refusal by the
        scheduler is raised by the stream.
        """
        if not self.accepts or self.info is None:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        stream = RequestStream([request.request_id for request in requests], self.cancel)
        now = time.monotonic()
        for request in requests:
            self._journal.add(JournalEntry(request, accepted_at=now, epoch=self.info.epoch))
            self._streams[request.request_id] = stream
            self._send(request)
        return stream

    def cancel(self, request_id: str, choice: int = -1) -> None:
        """End a request, or one choice of it, here and in the engine. No output of it follows but the end."""
        entry = self._journal.get(request_id)
        if entry is None:
            return
        live = [c for c, reason in enumerate(entry.finish_reasons) if reason is None and choice in (-1, c)]
        if not live:
            return
        entry.cancel(choice)
        self._send(CancelRequest(request_id, -1 if entry.finished else choice))
        for c in live:
            index = len(entry.emitted[c])
            self._streams[request_id].push(TokenOutput(request_id, c, index, [], FINISH_CANCELLED))
        if entry.finished:
            self._end(request_id)

    async def cancel_alias(self, alias: str, tenant: str) -> bool:
        """End the tenant's requests with this alias in the engine, of whichever gateway; whether there were any.

        They end at their own gateways. Raises `OverloadedError` if the engine does not answer.
        """
        if not self.ready or self._loop is None:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        query = next(self._queries)
        self._answers[query] = self._loop.create_future()
        self._send(CancelAlias(query, tenant, alias))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._answers[query]
        except TimeoutError:
            raise OverloadedError("The engine does not answer.", retry_after=2.0) from None
        finally:
            del self._answers[query]

    def fail_all(self, error: Exception, *, tell_engine: bool = False) -> None:
        """End every live request with `error`."""
        for entry in self._journal:
            if tell_engine:
                self._send(CancelRequest(entry.request.request_id))
            self._end(entry.request.request_id, error)

    def _end(self, request_id: str, error: Exception | None = None) -> None:
        """The one place where a request leaves the journal."""
        if self._journal.remove(request_id) is not None:
            self._streams.pop(request_id).end(request_id, error)

    # -- messages -----------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        if self._socket is None or self._loop is None:
            return
        self._socket.send(GATEWAY_SCHEMA.encode(message), zmq.NOBLOCK)  # no high-water mark: never blocks
        # The socket's descriptor is edge-triggered and a send may have consumed the edge of a message.
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Handle what has arrived. Called by the loop, never blocks."""
        for _ in range(MESSAGES_PER_TURN):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = time.monotonic()
            try:
                self._handle(GATEWAY_SCHEMA.decode(data))
            except ProtocolError as error:
                self.num_protocol_errors += 1
                log.error("message from the scheduler dropped: %s", error)
        if self._loop is not None:
            self._loop.call_soon(self._receive)

    def _handle(self, message: object) -> None:
        if isinstance(message, OutputBatch):
            self._handle_batch(message)
        elif isinstance(message, EngineInfo):
            self._handle_info(message)
        elif isinstance(message, EngineStats):
            self.stats, self._stats_at = message, time.monotonic()
        elif isinstance(message, RequestRejected):
            self._end(message.request_id, _refusal(message))
        elif isinstance(message, AliasCancelled):
            answer = self._answers.get(message.query)
            if answer is not None and not answer.done():
                answer.set_result(message.found)
        else:
            raise ProtocolError(f"a scheduler does not send {type(message).__name__}")

    def _handle_batch(self, batch: OutputBatch) -> None:
        if self.info is not None and batch.epoch < self.info.epoch:
            return  # from an engine that was replaced
        outputs: list[StreamItem] = [*batch.prompt_logprobs, *batch.outputs]
        for output in outputs:
            entry = self._journal.get(output.request_id)
            if entry is None:
                continue
            try:
                self._dispatch(entry, output, batch.epoch)
            except ProtocolError as error:
                self.num_protocol_errors += 1
                log.error("request ended by a fault in its stream: %s", error)
                self._send(CancelRequest(output.request_id))
                self._end(output.request_id, EngineError("The engine's stream of tokens broke."))

    def _dispatch(self, entry: JournalEntry, output: StreamItem, epoch: int) -> None:
        fresh: StreamItem | None
        if isinstance(output, PromptLogprobs):
            fresh = entry.accept_prompt_logprobs(output, epoch)
        else:
            fresh = entry.accept(output, epoch)
        if fresh is None:
            return
        self._streams[output.request_id].push(fresh)
        if entry.finished:
            self._end(output.request_id)

    def _handle_info(self, info: EngineInfo) -> None:
        if self.info is not None and info.epoch < self.info.epoch:
            return
        self.info = info
        if not info.ready:
            return
        self.limits = info
        self._ready.set()
        if info.session != self._session:
            self._session = info.session
            self._resume_all()

    def _resume_all(self) -> None:
        """Send every live request again, as it stands. The scheduler ignores those that it has."""
        now = time.monotonic()
        for entry in self._journal:
            self._send(entry.resume_request(now=now))
            for choice in entry.finished_choices:
                self._send(CancelRequest(entry.request.request_id, choice))

    def _beat(self) -> None:
        """Now and then: say hello to a silent scheduler (it may be a new one), give a lost one up."""
        if self._loop is None or self._socket is None:
            return
        self._receive()
        if self.silence > SILENCE_BEFORE_HELLO:
            self._send(self._hello)
        if self.silence > self._lost_timeout and self.num_live:
            self.fail_all(EngineError("The engine cannot be reached."), tell_engine=True)
        self._heartbeat = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)


def _refusal(message: RequestRejected) -> Exception:
    if message.status in (429, 503):
        return OverloadedError(message.message, retry_after=message.retry_after or 1.0, status=message.status)
    if 400 <= message.status < 500:
        return InvalidRequestError(message.message, param=message.param, code=message.code)
    return EngineError(message.message)
