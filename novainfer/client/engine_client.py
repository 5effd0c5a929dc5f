"""All engines (replicas) of a server as one, in a gateway's event loop: chooses one for each request, and another one
when that is lost. docs/replicas.md has the contract.

A request is in the journal of one session at a time. Who reads it does not notice that it moves: its sink goes along.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from novainfer.client.engine_link import EngineLink
from novainfer.client.router import HOW_ONLY, Load, Router
from novainfer.client.stream import Backlog, RequestStream, ShortWay
from novainfer.errors import OverloadedError
from novainfer.protocol.messages import AddRequest, Claimed, EngineInfo, EngineStats
from novainfer.transport.addresses import Endpoint
from novainfer.transport.replicas import DRAINING, OUT

log = logging.getLogger(__name__)

LOST_SECONDS = 120.0  # by then the supervisor has replaced whatever is gone, or ended us
MOVE_SECONDS = 0.5  # of an engine that is not ready, before its requests move to others

LOST, DRAINED = "lost", "drained"  # why requests move


@dataclass(slots=True)
class Totals:
    """What has become of requests since the start, for metrics."""

    moved: Counter[str] = field(default_factory=Counter)  # by `LOST` or `DRAINED`
    routed: Counter[tuple[int, str]] = field(default_factory=Counter)  # by replica, and how it was chosen


@dataclass(slots=True)
class _Replica:
    """One engine. ready_at: when it was last seen ready.   drain_by: when what it still has moves, if it is draining.

    is_out: its supervisor says that it is dead.
    sent: requests since its last figures, which do not count them.
    """

    number: int
    link: EngineLink
    ready_at: float = 0.0
    drain_by: float | None = None
    is_out: bool = False
    sent: int = 0
    stats: EngineStats | None = None

    @property
    def serves(self) -> bool:
        return self.drain_by is None and not self.is_out and self.link.is_ready

    @property
    def num_sequences(self) -> int:
        """Running and waiting, as far as is known."""
        stats = self.link.session.stats
        if stats is not self.stats:
            self.stats, self.sent = stats, 0
        return self.sent + (stats.num_running + stats.num_waiting if stats is not None else 0)


class EngineClient:
    """The engines of a server, as seen from one gateway.

    lost_timeout: seconds of silence after which an engine's live requests end with an error, if there is no other.
    drain_timeout: seconds that requests may stay with an engine that is draining.
    """

    def __init__(
        self,
        endpoints: Endpoint | Mapping[int, Endpoint],
        *,
        gateway_id: str,
        lost_timeout: float = LOST_SECONDS,
        drain_timeout: float = 0.0,
    ) -> None:
        self._gateway_id = gateway_id
        self._lost_timeout = lost_timeout
        self._drain_timeout = drain_timeout
        self._backlog = Backlog()
        self._router = Router()
        self._claimed: dict[str, _Replica] = {}  # requests that are lent to us, and the lenders
        self._is_started = False
        self._changed = asyncio.Event()  # engines came or went
        self.totals = Totals()
        self._replicas: dict[int, _Replica] = {}
        self._only: _Replica | None = None  # where there is one alone: nothing to compare
        known = {0: endpoints} if isinstance(endpoints, Endpoint) else endpoints
        for number, endpoint in known.items():
            self._add(number, endpoint)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and say hello; the schedulers may come later."""
        self._is_started = True
        for replica in self._replicas.values():
            await replica.link.start()

    async def close(self) -> None:
        """Cancel what is live and disconnect."""
        for replica in self._replicas.values():
            await replica.link.close()

    async def follow(self, endpoints: Mapping[int, Endpoint], states: Mapping[int, str]) -> None:
        """These are the engines now (see `Replicas`). What one that has gone, or is dead, still had moves to others."""
        for number in [number for number in self._replicas if number not in endpoints]:
            replica = self._replicas.pop(number)
            self._only = self._find_only()
            self._router.forget(number)
            if any(one.link.accepts for one in self._replicas.values()):
                self._move_all(replica, DRAINED)
            await replica.link.close()
        for number, endpoint in endpoints.items():
            if number not in self._replicas:
                self._add(number, endpoint)
                if self._is_started:
                    await self._replicas[number].link.start()
            replica = self._replicas[number]
            replica.is_out = states[number] == OUT
            if states[number] != DRAINING:
                replica.drain_by = None
            elif replica.drain_by is None:
                replica.drain_by = time.monotonic() + self._drain_timeout
        for number in self._replicas:
            self._look_after(number)
        self._changed.set()

    def _add(self, number: int, endpoint: Endpoint) -> None:
        link = EngineLink(
            endpoint,
            gateway_id=self._gateway_id,
            lost_timeout=self._lost_timeout,
            backlog=self._backlog,
            beaten=lambda: self._look_after(number),
        )
        self._replicas[number] = _Replica(number, link)
        self._only = self._find_only()

    def _find_only(self) -> _Replica | None:
        return next(iter(self._replicas.values())) if len(self._replicas) == 1 else None

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def links(self) -> dict[int, EngineLink]:
        """Of all engines, by their numbers."""
        return {number: replica.link for number, replica in self._replicas.items()}

    @property
    def live_by_replica(self) -> dict[int, int]:
        """Live requests of each engine."""
        return {number: replica.link.session.num_live for number, replica in self._replicas.items()}

    @property
    def info(self) -> EngineInfo | None:
        """What the engine said of itself last: one that serves, else any."""
        return self._one().link.session.info if self._replicas else None

    @property
    def limits(self) -> EngineInfo | None:
        """What it said last while it was ready."""
        if self._only is not None:
            return self._only.link.session.limits
        found = [one.link.session.limits for one in self._by_service()]
        known = [limits for limits in found if limits is not None]
        return min(known, key=lambda limits: limits.max_model_len, default=None)  # so that it fits wherever it goes

    @property
    def open_limits(self) -> EngineInfo | None:
        """The same while requests may be submitted (`accepts`), else None."""
        if self._only is not None:
            session = self._only.link.session
            return session.limits if session.accepts(time.monotonic()) else None
        return self.limits if self.accepts else None

    @property
    def stats(self) -> EngineStats | None:
        """The last figures of the engine where a request would wait least."""
        if self._only is not None:
            return self._only.link.session.stats
        found = [one.link.session.stats for one in self._replicas.values() if one.serves]
        known = [stats for stats in found if stats is not None]
        return min(known, key=lambda stats: stats.queue_seconds, default=None)

    @property
    def ready(self) -> bool:
        """An engine serves."""
        return any(one.serves for one in self._replicas.values())

    @property
    def accepts(self) -> bool:
        """Requests may be submitted: also while engines recover, when they wait with the others."""
        if self._only is not None:
            return self._only.link.accepts
        return any(one.link.accepts for one in self._replicas.values())

    @property
    def num_accepting(self) -> int:
        """Engines that share the load: at least one."""
        if self._only is not None:
            return 1
        return max(1, sum(one.link.accepts and one.drain_by is None for one in self._replicas.values()))

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(one.link.session.num_live for one in self._replicas.values())

    @property
    def num_protocol_errors(self) -> int:
        """Faults in what the schedulers sent."""
        return sum(one.link.session.num_protocol_errors for one in self._replicas.values())

    async def wait_ready(self) -> EngineInfo:
        """Return once an engine has said that it is ready."""
        while True:
            self._changed.clear()
            waits = [asyncio.ensure_future(one.link.wait_ready()) for one in self._replicas.values()]
            waits_for_change = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([*waits, waits_for_change], return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    if wait.done():
                        return wait.result()
            finally:
                for task in [*waits, waits_for_change]:
                    task.cancel()

    def _by_service(self) -> list[_Replica]:
        """Those that serve first."""
        return sorted(self._replicas.values(), key=lambda one: not one.serves)

    def _one(self) -> _Replica:
        return self._only or self._by_service()[0]

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, *requests: AddRequest) -> RequestStream:
        """Enter requests in the journal and send them; their outputs come on one stream, which must be closed.

        Raises `OverloadedError` before an engine is ready for the first time, or when all are lost. A refusal by the
        scheduler is raised by the stream.
        """
        request_ids = [request.request_id for request in requests]
        stream = RequestStream(request_ids, self.cancel, self._told, self._backlog, self._shorten)
        now = time.monotonic()
        try:
            for request in requests:
                replica = (self._lender(request) if self._claimed else None) or self._choose(request)
                replica.link.session.submit([request], stream, now)
        except OverloadedError:
            stream.close()
            raise
        return stream

    def _lender(self, request: AddRequest) -> _Replica | None:
        """The engine that lent it to us, if it serves: it goes on with what it has."""
        replica = self._claimed.pop(request.request_id, None)
        return replica if replica is not None and replica.serves else None

    def _choose(self, request: AddRequest) -> _Replica:
        """Where a request goes: to an engine that serves, else to one that recovers."""
        if self._only is not None and self._only.link.accepts:
            return self._sent(request, self._only, HOW_ONLY)
        able = [one for one in self._replicas.values() if one.serves]
        able = able or [one for one in self._replicas.values() if one.link.accepts]
        if not able:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        tenant = request.tenant
        loads = [Load(one.number, one.num_sequences, one.link.session.num_live_of(tenant)) for one in able]
        route = self._router.route(request, loads)
        return self._sent(request, self._replicas[route.replica], route.how)

    def _sent(self, request: AddRequest, replica: _Replica, how: str) -> _Replica:
        replica.sent += request.params.n
        self.totals.routed[replica.number, how] += 1
        return replica

    def cancel(self, request_id: str, choice: int = -1, complete: bool = False) -> None:
        """See `GatewaySession.cancel`."""
        for one in self._replicas.values():
            one.link.session.cancel(request_id, choice, complete)

    def fail_all(self, error: Exception, *, tell_engine: bool = False) -> None:
        """End every live request with `error`."""
        for one in self._replicas.values():
            one.link.session.fail_all(error, tell_engine=tell_engine)

    def _told(self, request_id: str) -> None:
        for one in self._replicas.values():
            one.link.session.told(request_id)

    def _shorten(self, request_id: str, choice: int, way: ShortWay) -> None:
        for one in self._replicas.values():
            one.link.session.shorten(request_id, choice, way)

    # -- moving -------------------------------------------------------------------------------------------------

    def _look_after(self, number: int) -> None:
        """After each beat of an engine's link: whether it has lost its requests to the others."""
        now = time.monotonic()
        replica = self._replicas.get(number)
        if replica is None:
            return
        if replica.link.is_ready:
            replica.ready_at = now
        if not any(one.serves for one in self._replicas.values() if one is not replica):
            return
        if replica.is_out or now - replica.ready_at > MOVE_SECONDS:
            self._move_all(replica, LOST)
        elif replica.drain_by is not None and now > replica.drain_by:
            self._move_all(replica, DRAINED)

    def _move_all(self, replica: _Replica, why: str) -> None:
        """Everything that is live there goes to others."""
        if not replica.link.session.num_live:
            return
        if why == LOST:
            self._router.forget(replica.number)
        moved = replica.link.session.leave()
        log.warning("engine %d is %s: %d requests go on elsewhere", replica.number, why, len(moved))
        self.totals.moved[why] += len(moved)
        for one in moved:
            self._choose(one.entry.request).link.session.adopt(one, time.monotonic())

    # -- questions ----------------------------------------------------------------------------------------------

    async def cancel_alias(self, alias: str, tenant: str) -> bool:
        """End the tenant's requests with this alias in the engines, of whichever gateway; whether there were any.

        They end at their own gateways. Raises `OverloadedError` if an engine does not answer.
        """
        links = self._able_links()
        return any(await asyncio.gather(*(link.cancel_alias(alias, tenant) for link in links)))

    async def claim(self, alias: str, tenant: str) -> Claimed:
        """The tenant's streams with this alias that may be taken over: by submitting them; else they must be released.

        Raises `OverloadedError` if an engine does not answer.
        """
        lenders = [one for one in self._replicas.values() if one.link.is_ready]
        if not lenders:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        asking = [asyncio.ensure_future(one.link.claim(alias, tenant)) for one in lenders]
        try:
            await asyncio.wait(asking)
        except asyncio.CancelledError:
            for task in asking:
                task.cancel()
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(answer, Claimed):
                    self.release(answer.requests)
            raise
        answers = await asyncio.gather(*asking, return_exceptions=True)
        found = [(one, answer) for one, answer in zip(lenders, answers, strict=True) if isinstance(answer, Claimed)]
        lent: dict[str, tuple[_Replica, AddRequest, list[int]]] = {}
        for one, answer in found:
            for request, num_tokens in zip(answer.requests, answer.num_tokens, strict=True):
                known = lent.get(request.request_id)
                if known is None or _num_emitted(known[1]) < _num_emitted(request):
                    lent[request.request_id] = (one, request, num_tokens)
        failed = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if failed is not None and not lent:
            raise failed
        self._claimed |= {request_id: one for request_id, (one, _, _) in lent.items()}
        requests = [request for _, request, _ in lent.values()]
        if any(answer.is_owned for _, answer in found):
            self.release(requests)
            return Claimed(0, [], True)
        return Claimed(0, requests, False, [num_tokens for _, _, num_tokens in lent.values()])

    def release(self, requests: Sequence[AddRequest]) -> None:
        """See `GatewaySession.release`."""
        for request in requests:
            self._claimed.pop(request.request_id, None)
        for one in self._replicas.values():
            one.link.session.release(requests)

    def _able_links(self) -> list[EngineLink]:
        links = [one.link for one in self._replicas.values() if one.link.is_ready]
        if not links:
            raise OverloadedError("The engine is not ready.", retry_after=2.0)
        return links


def _num_emitted(request: AddRequest) -> int:
    return sum(map(len, request.emitted))
