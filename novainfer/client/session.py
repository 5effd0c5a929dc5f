"""The gateway's side of its talk with one scheduler, as a pure machine: journal, streams, messages; no I/O, no clock.

Workers that are being replaced show as an `EngineInfo` that is not ready: the streams wait, the scheduler has all it
needs. A scheduler that knows nothing of us, or a packet that was lost, ends the link: in the next one every live
request is sent again with the tokens it has, and goes on. Nothing is promised for an engine that stays silent for
minutes: its requests end with an error. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from novainfer.client.intake import Intake
from novainfer.client.journal import Journal, JournalEntry, Moved
from novainfer.client.stream import Backlog, ShortWay, Sink
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError, ProtocolError
from novainfer.protocol.link import Inbox, Packet
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    AddRequest,
    AliasCancelled,
    CancelAlias,
    CancelRequest,
    Claimed,
    ClaimRequest,
    EngineInfo,
    EngineStats,
    Heartbeat,
    Hello,
    OutputBatch,
    ReleaseClaim,
    RequestRejected,
    TokenOutput,
    Told,
    Unlinked,
)

log = logging.getLogger(__name__)

SILENCE_BEFORE_UNREADY = 2.0  # seconds; stats come four times a second
_BEAT_EVERY = 512  # packets, in a burst: the scheduler waits for word of what was taken


Answer = AliasCancelled | Claimed


class GatewaySession:
    """One scheduler, as seen from one gateway process.

    send: one packet to the scheduler.   answered: called with each answer to `ask`.
    first_link: no other process may use this number or the next few million ones.
    lost_timeout: seconds of silence after which live requests end with an error.
    backlog: while it is behind, `flush` is to follow.
    `info` and `stats` are the last that came, None before; `limits` is the last info of an engine that was ready.
    """

    def __init__(
        self,
        send: Callable[[Packet], None],
        answered: Callable[[Answer], None],
        *,
        gateway_id: str,
        first_link: int,
        lost_timeout: float,
        now: float,
        backlog: Backlog | None = None,
    ) -> None:
        self.info: EngineInfo | None = None
        self.limits: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.num_protocol_errors = 0
        self.heard_at = now
        self.stats_at = now
        self._send_packet = send
        self._answered = answered
        self._gateway_id = gateway_id
        self._lost_timeout = lost_timeout
        self._journal = Journal()
        self._sinks: dict[str, Sink] = {}
        self._intake = Intake(self._journal, self._sinks, backlog or Backlog(), self._end_whole, self._break)
        self._epoch = 0  # the newest that was heard of
        self._untold: set[str] = set()  # streams that have ended, kept by the engine while they are being read
        self._told: list[str] = []  # and such as have been: the engine hears of them with what is next
        self._questions: dict[int, CancelAlias | ClaimRequest] = {}  # by query, without an answer
        self._link = first_link - 1
        self.num_links = 0
        self._new_link()

    def is_ready(self, now: float) -> bool:
        """The engine has loaded, takes requests, and was heard from lately."""
        return self.info is not None and self.info.ready and now - self.heard_at < SILENCE_BEFORE_UNREADY

    def accepts(self, now: float) -> bool:
        """Requests may be submitted: also while the engine recovers, when they wait with the others."""
        return self.limits is not None and now - self.heard_at < self._lost_timeout

    @property
    def num_tokens_received(self) -> int:
        """In all that was taken."""
        return self._intake.num_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._journal)

    def num_live_of(self, tenant: str) -> int:
        """Those of one tenant."""
        return self._journal.num_of(tenant)

    def has(self, request_id: str) -> bool:
        """Whether it is live here."""
        return self._journal.get(request_id) is not None

    # -- the link -----------------------------------------------------------------------------------------------

    def _new_link(self) -> None:
        self._link += 1
        self.num_links += 1
        self._inbox = Inbox()
        self._origin: int | None = None  # of the scheduler at its other end, once it has said something
        self._num_sent = 1  # the Hello
        self._is_open = False  # the engine was told of the journal
        self._untold.clear()
        self._told.clear()

    def _say_hello(self) -> None:
        self._send_packet(Packet(self._link, 0, Hello(self._gateway_id)))

    def _open_link(self) -> None:
        self._new_link()
        self._say_hello()

    def _send(self, message: object) -> None:
        self._send_packet(Packet(self._link, self._num_sent, message))
        self._num_sent += 1

    def beat(self, now: float) -> None:
        """To be called every `BEAT_SECONDS`: tells that we live, and what was taken; gives a lost scheduler up."""
        self.tell_told()
        if self._inbox.num_taken:
            self._send(Heartbeat(self._inbox.num_taken))
        else:
            self._say_hello()
        if now - self.heard_at > self._lost_timeout and self.num_live:
            self.fail_all(EngineError("The engine cannot be reached."), tell_engine=True)

    def take(self, packet: Packet, now: float) -> None:
        """Handle a packet that has arrived. Raises `ProtocolError` for a record that no scheduler sends."""
        self.heard_at = now
        if packet.link != self._link:
            return
        if isinstance(packet.message, Unlinked):
            self._open_link()
            return
        if not self._comes_from_the_other_end(packet):
            return
        try:
            is_new = self._inbox.is_new(packet.number)
        except ProtocolError as error:
            log.warning("a new link to the scheduler: %s", error)
            self._open_link()
            return
        if is_new:
            if self._inbox.num_taken % _BEAT_EVERY == 0:
                self._send(Heartbeat(self._inbox.num_taken))
            self._handle(packet.message, now)

    def _comes_from_the_other_end(self, packet: Packet) -> bool:
        """Whether the scheduler that this link is with has sent it. A successor's first word ends the link."""
        if self._origin is None:
            self._origin = packet.origin
        if packet.origin > self._origin:
            log.warning("a new link to the scheduler: the one at the other end was replaced")
            self._open_link()
        return packet.origin == self._origin

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[AddRequest], sink: Sink, now: float) -> None:
        """Enter requests in the journal and send them; the tokens they bring along, and all that follows, go to `sink`.

        Raises `OverloadedError` before the engine is ready for the first time, or when it is lost.
        """
        if not self.accepts(now) or self.info is None:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        for request in requests:
            entry = JournalEntry(request, accepted_at=now, epoch=self.info.epoch)
            self._journal.add(entry)
            self._sinks[request.request_id] = sink
            for choice, token_ids in enumerate(request.emitted):
                if token_ids:
                    cached = max(request.num_cached_tokens, 0)
                    sink.push(TokenOutput(request.request_id, choice, 0, token_ids, num_cached_tokens=cached))
            if self._is_open:
                self._send_entry(entry, now)
        self.tell_told()

    def cancel(self, request_id: str, choice: int = -1, complete: bool = False) -> None:
        """End a request, or one choice of it, here and in the engine. No output of it follows but the end.

        complete: its answer is whole (a stop string was found), not broken off.
        """
        self.flush()
        entry = self._journal.get(request_id)
        if entry is None:
            return
        live = [c for c, reason in enumerate(entry.finish_reasons) if reason is None and choice in (-1, c)]
        if not live:
            return
        entry.cancel(choice)
        self._journal.end_ways(entry)
        self._tell(CancelRequest(request_id, -1 if entry.finished else choice, complete))
        for c in live:
            index = len(entry.emitted[c])
            end = TokenOutput(request_id, c, index, [], FINISH_CANCELLED, notes=entry.told_notes(c))
            self._sinks[request_id].push(end)
        if entry.finished:
            self._end(request_id, keep=complete)

    def told(self, request_id: str) -> None:
        """The reader of a request that has ended has all of it. That is no news to wake the engine for."""
        if request_id in self._untold:
            self._untold.remove(request_id)
            self._told.append(request_id)

    def tell_told(self) -> None:
        """Let the engine forget the streams that have been read."""
        for request_id in self._told:
            self._tell(Told(request_id))
        self._told.clear()

    def shorten(self, request_id: str, choice: int, way: ShortWay) -> None:
        """From now on plain tokens of a live choice go there while that is open, else to its sink."""
        entry = self._journal.get(request_id)
        if entry is not None:
            self._journal.shorten(entry, choice, way)

    def fail_all(self, error: Exception, *, tell_engine: bool = False) -> None:
        """End every live request with `error`."""
        self.flush()
        for entry in self._journal:
            if tell_engine:
                self._tell(CancelRequest(entry.request.request_id))
            self._end(entry.request.request_id, error)

    def leave(self) -> list[Moved]:
        """Take every live request out, for another session to `adopt`.

        With a new link this engine forgets them, and what it still says of them is of the old one, should they return.
        """
        self.flush()
        moved = []
        for entry in self._journal:
            request_id = entry.request.request_id
            ways = self._journal.ways_of(entry)
            self._journal.remove(request_id)
            moved.append(Moved(entry, self._sinks.pop(request_id), ways))
        self._open_link()
        return moved

    def adopt(self, moved: Moved, now: float) -> None:
        """Go on with a request that another session has left. There must have been an `info`."""
        entry = moved.entry
        entry.epoch = self.info.epoch if self.info is not None else 0
        if entry.noted is not None:
            entry.noted.restarts += 1
        self._journal.add(entry)
        for choice, way in moved.ways.items():
            self._journal.shorten(entry, choice, way)
        self._sinks[entry.request.request_id] = moved.sink
        if self._is_open:
            self._send_entry(entry, now)

    def ask(self, question: CancelAlias | ClaimRequest) -> None:
        """Send a question, and again to each engine that we are linked with before there is an answer, or `give_up`."""
        self.tell_told()
        self._questions[question.query] = question
        self._tell(question)

    def give_up(self, query: int) -> None:
        """Nobody waits for the answer any more."""
        self._questions.pop(query, None)

    def release(self, requests: Sequence[AddRequest]) -> None:
        """Give back what was claimed and will not be submitted."""
        for request in requests:
            self._tell(ReleaseClaim(request.request_id))

    def _tell(self, message: object) -> None:
        """Send what is of no use to an engine that does not know our requests."""
        if self._is_open:
            self._send(message)

    def _end(self, request_id: str, error: Exception | None = None, *, keep: bool = False) -> None:
        """The one place where a request leaves the journal. `keep`: the engine keeps it, if it is a stream."""
        if error is not None:
            self.flush()
        entry = self._journal.remove(request_id)
        if entry is None:
            return
        if keep and entry.request.answer:
            self._untold.add(request_id)
        self._sinks.pop(request_id).end(request_id, error)

    # -- what the scheduler says --------------------------------------------------------------------------------

    def _handle(self, message: object, now: float) -> None:
        if isinstance(message, OutputBatch):
            self._handle_batch(message)
        elif isinstance(message, EngineInfo):
            self._handle_info(message, now)
        elif isinstance(message, EngineStats):
            self.stats, self.stats_at = message, now
        elif isinstance(message, RequestRejected):
            self._end(message.request_id, _refusal(message))
        elif isinstance(message, AliasCancelled | Claimed):
            self._questions.pop(message.query, None)
            self._answered(message)
        else:
            raise ProtocolError(f"a scheduler does not send {type(message).__name__}")

    def _handle_batch(self, batch: OutputBatch) -> None:
        if batch.epoch < self._epoch:
            return  # from an engine that was replaced
        self._reach(batch.epoch)
        self._intake.take(batch)

    def _reach(self, epoch: int) -> None:
        """The newest that was heard of: if it is another one, workers or their scheduler were replaced."""
        if epoch > self._epoch:
            self._epoch = epoch
            for entry in self._journal:
                if entry.noted is not None:
                    entry.noted.restarts += 1

    def flush(self) -> None:
        """Tell the readers what is held back of their tokens: nothing more has come."""
        self._intake.flush()

    def _end_whole(self, request_id: str) -> None:
        self._end(request_id, keep=True)

    def _break(self, request_id: str) -> None:
        self.num_protocol_errors += 1
        self._tell(CancelRequest(request_id))
        self._end(request_id, EngineError("The engine's stream of tokens broke."))

    def _handle_info(self, info: EngineInfo, now: float) -> None:
        if self.info is not None and info.epoch < self.info.epoch:
            return
        self.info = info
        self._reach(info.epoch)
        if not info.ready:
            return
        self.limits = info
        if not self._is_open:
            self._is_open = True
            for entry in self._journal:
                self._send_entry(entry, now)
            for question in self._questions.values():
                self._send(question)

    def _send_entry(self, entry: JournalEntry, now: float) -> None:
        """A live request as it stands, to an engine that does not know it."""
        self._send(entry.resume_request(now=now) if entry.was_sent else entry.request)
        entry.sent(now)
        for choice in entry.finished_choices:
            self._send(CancelRequest(entry.request.request_id, choice))


def _refusal(message: RequestRejected) -> Exception:
    if message.status in (429, 503):
        return OverloadedError(message.message, retry_after=message.retry_after or 1.0, status=message.status)
    if 400 <= message.status < 500:
        return InvalidRequestError(message.message, param=message.param, code=message.code)
    return EngineError(message.message)
