"""The scheduler process as a pure machine, between gateways, worker ranks and the supervisor: no I/O, no clock.

It outlives its workers: when they fail it tells the supervisor, and waits until that has sent others. It holds nothing
that gateways and ranks cannot tell a successor. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from novainfer.config import ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.engine.gateways import GatewayLink, Owners
from novainfer.engine.metrics import collect_stats, describe
from novainfer.engine.orphans import Orphans, as_message, ends
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError, ProtocolError
from novainfer.executor.base import GroupExecutor
from novainfer.protocol.link import BEAT_SECONDS, WINDOW, Packet
from novainfer.protocol.messages import (
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
    Notes,
    OutputBatch,
    PromptLogprobs,
    ReleaseClaim,
    RequestRejected,
    TokenOutput,
    Told,
    Unlinked,
)
from novainfer.protocol.supervision import ROLE_SCHEDULER, ChildReady, SchedulerPulse, WorkersFault, WorkersLost
from novainfer.scheduler.batch import PlainTokens, StepOutputs

logger = logging.getLogger(__name__)

GATEWAY_PATIENCE = 15.0  # seconds; a gateway speaks four times a second


@dataclass(frozen=True)
class ReplicaLinks:
    """Ways out. to_gateway(socket identity, packet): False if that gateway cannot be reached."""

    to_gateway: Callable[[bytes, Packet], bool]
    to_supervisor: Callable[[object], None]


class Replica:
    """Owns, from the first time that every rank has said hello, the engine."""

    def __init__(
        self,
        config: ServeConfig,
        executor: GroupExecutor,
        links: ReplicaLinks,
        *,
        number: int,
        epoch: int,
        now: float,
        window: int = WINDOW,
    ) -> None:
        """`window`: of each link to a gateway."""
        self._config = config
        self._executor = executor
        self._links = links
        self._number = number
        self._epoch = self._origin = epoch
        self._window = window
        self._engine: EngineCore | None = None
        self._has_workers = False
        self._have_failed = False  # the workers; the supervisor has been told
        self._num_steps = 0  # that ended in this epoch
        self._gateways: dict[bytes, GatewayLink] = {}  # by socket identity
        self._owner = Owners()
        self._orphans = Orphans(config.server.orphan_grace)
        self._last_progress = self._next_stats = now

    @property
    def engine(self) -> EngineCore | None:
        """To look at; None before the first workers were ready."""
        return self._engine

    # -- a turn of the loop -----------------------------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Do what can be done after messages were handled; True if there may be more to do at once."""
        moved = self._advance(now)
        if now >= self._next_stats:
            self._publish_stats(now)
        self._drop_gateways(now)
        return moved

    def _advance(self, now: float) -> bool:
        if self._engine is not None:
            if ended := self._engine.scheduler.expire(now):
                self._publish(ended)
            if refused := self._engine.scheduler.give_up_waiting(now):
                self._refuse(refused)
        if self._have_failed:
            return False
        try:
            if self._engine is None or not self._has_workers:
                return self._try_start()
            return self._step(self._engine, now)
        except EngineError as error:
            self._have_failed = True
            self._links.to_supervisor(WorkersFault(self._number, self._epoch, str(error)))
            return False

    def _step(self, engine: EngineCore, now: float) -> bool:
        if engine.scheduler.num_in_flight == 0:
            self._last_progress = now
        self._executor.check()
        engine.submit()
        for _ in range(self._config.scheduler.steps_in_flight):  # then gateways have their turn
            outputs = engine.collect(0.0)
            if outputs is None:
                return False
            self._last_progress = now
            self._num_steps += 1
            if self._num_steps == 1:
                self._next_stats = now  # the supervisor shall know at once that this group gets on
            self._publish_and_go_on(engine, outputs)
        return True

    def _publish_and_go_on(self, engine: EngineCore, outputs: StepOutputs) -> None:
        """The next plan goes first, except before a first token, an end, or tokens with more to tell."""
        is_urgent = outputs.plain.begun or outputs.others
        try:
            if not is_urgent:  # a gateway that hears of many tokens takes the processor, and leaves cold caches behind
                engine.submit()
        finally:  # whatever becomes of the ranks: to the scheduler these tokens are told
            self._publish(outputs.others, outputs.prompt_logprobs, outputs.plain, outputs.notes)
        if is_urgent:
            engine.submit()

    def _try_start(self) -> bool:
        info = self._executor.try_ready()
        if info is None:
            return False
        room = f"{info.num_blocks} KV blocks of {info.block_size} tokens, context of {info.max_model_len} tokens"
        logger.info("all ranks are ready (epoch %d): %s, mode %s", info.epoch, room, info.mode)
        self._has_workers = True
        if self._engine is None:
            self._engine = EngineCore(self._executor, self._config, self._executor.held)
        else:
            self._publish(self._engine.attach_workers(self._executor))
        self._inform_gateways()
        self._links.to_supervisor(ChildReady(ROLE_SCHEDULER, self._number, self._epoch))
        return True

    def obey(self, order: WorkersLost) -> None:
        """The supervisor has ended the workers; others will come."""
        if order.epoch <= self._epoch:
            return  # it was for our predecessor
        self._epoch = order.epoch
        self._executor.expect(order.epoch, group=order.epoch)
        self._has_workers = self._have_failed = False
        self._num_steps = 0
        self._inform_gateways()  # first: it says which epoch what follows is of
        if self._engine is not None:
            self._publish(self._engine.lose_workers(faulted=order.faulted))

    # -- messages from gateways -----------------------------------------------------------------------------

    def handle(self, identity: bytes, packet: Packet, now: float) -> None:
        """Take in one packet of the gateway behind this socket identity."""
        message, gateway = packet.message, self._gateways.get(identity)
        if isinstance(message, Hello) and packet.number == 0:
            self._greet(identity, packet.link, message, now)
        elif gateway is None or gateway.link != packet.link:
            self._links.to_gateway(identity, Packet(packet.link, 0, Unlinked(self._epoch), self._origin))
        else:
            try:
                if gateway.is_new(packet, now):
                    self._obey_gateway(identity, gateway, message, now)
            except ProtocolError as error:
                logger.warning("the link to %s has ended: %s", gateway.gateway_id, error)
                self._unlink(identity)
                self._links.to_gateway(identity, Packet(packet.link, 0, Unlinked(self._epoch), self._origin))

    def _obey_gateway(self, identity: bytes, gateway: GatewayLink, message: object, now: float) -> None:
        engine = self._engine
        if isinstance(message, Heartbeat):
            gateway.acknowledge(message.received)
        elif engine is None:
            raise ProtocolError(f"a {type(message).__name__} came before the engine was ready")
        elif isinstance(message, AddRequest):
            self._add(engine, identity, message, now)
        elif isinstance(message, CancelRequest):
            self._cancel(engine, identity, message)
        elif isinstance(message, Told):
            gateway.told(message.request_id)
        elif isinstance(message, CancelAlias):
            gateway.say(AliasCancelled(message.query, self._cancel_alias(engine, message)))
        elif isinstance(message, ClaimRequest):
            gateway.say(self._claim(identity, message, now))
        elif isinstance(message, ReleaseClaim):
            self._orphans.release(identity, message.request_id)
        else:
            raise ProtocolError(f"a gateway does not send {type(message).__name__}")

    def _greet(self, identity: bytes, link: int, hello: Hello, now: float) -> None:
        """A new link, or the Hello of the one that there is once more."""
        known = self._gateways.get(identity)
        if known is not None and known.gateway_id == hello.gateway_id and known.link >= link:
            if known.link == link:
                known.say(self._engine_info())
            return
        if known is not None:
            if known.gateway_id == hello.gateway_id:
                self._unlink(identity)
            else:
                self._orphan(identity, now)
        gateway = GatewayLink(
            lambda packet: self._links.to_gateway(identity, packet),
            gateway_id=hello.gateway_id,
            link=link,
            now=now,
            origin=self._origin,
            window=self._window,
        )
        gateway.is_new(Packet(link, 0, hello), now)
        self._gateways[identity] = gateway
        gateway.say(self._engine_info())
        self._next_stats = now

    def _add(self, engine: EngineCore, identity: bytes, message: AddRequest, now: float) -> None:
        request_id = message.request_id
        gateway = self._gateways[identity]
        if self._owner.get(request_id, identity) != identity:
            gateway.say(RequestRejected(request_id, 400, "This request id is in use.", code="request_id_in_use"))
            return
        if self._orphans.pop(request_id):
            engine.cancel(request_id)  # the gateway that has claimed it, or was there all the time, knows best
        try:
            ended = engine.add(message, now)
        except InvalidRequestError as error:
            gateway.say(RequestRejected(request_id, 400, error.message, error.param, error.code))
        except OverloadedError as error:
            rejected = RequestRejected(
                request_id, error.status, error.message, code="overloaded", retry_after=error.retry_after
            )
            gateway.say(rejected)
        else:
            self._owner[request_id] = identity
            if request_id in engine.scheduler.requests:
                gateway.live[request_id] = engine.scheduler.requests[request_id]
            self._publish(ended)

    def _cancel(self, engine: EngineCore, identity: bytes, message: CancelRequest) -> None:
        if self._owner.get(message.request_id) == identity:
            self._publish(engine.cancel(message.request_id, message.choice, complete=message.complete))
        if not message.complete and message.choice < 0:  # also if it has just ended: nobody reads it any more
            self._gateways[identity].told(message.request_id)

    def _cancel_alias(self, engine: EngineCore, message: CancelAlias) -> bool:
        found = [r for r in engine.scheduler.requests.values() if r.has_name(message.tenant, message.alias)]
        for request in found:
            identity = self._owner.get(request.request_id)
            self._publish(engine.cancel(request.request_id))
            self._orphans.pop(request.request_id)
            if identity is not None:
                self._gateways[identity].told(request.request_id)
        return bool(found)

    def _claim(self, identity: bytes, message: ClaimRequest, now: float) -> Claimed:
        name = message.tenant, message.alias
        if self._orphans.is_lent(*name) or any(gateway.reads(*name) for gateway in self._gateways.values()):
            return Claimed(message.query, [], is_owned=True)
        found = self._orphans.claim(*name, identity, now)
        if self._engine is not None:
            for request in found:
                self._engine.scheduler.settle(request)
        return Claimed(message.query, [as_message(request, now) for request in found], False, [ends(r) for r in found])

    # -- gateways go ----------------------------------------------------------------------------------------

    def _drop_gateways(self, now: float) -> None:
        """Give up those that are gone, and the requests that nobody has claimed in time."""
        for identity, gateway in tuple(self._gateways.items()):
            if not gateway.is_reachable or now - gateway.heard_at > GATEWAY_PATIENCE:
                words = "gateway %s is gone, its streams wait to be claimed" if gateway.live else "gateway %s is gone"
                logger.log(logging.WARNING if gateway.live else logging.INFO, words, gateway.gateway_id)
                self._orphan(identity, now)
        for request_id in self._orphans.expired(now):
            if self._engine is not None:
                self._engine.cancel(request_id)

    def _orphan(self, identity: bytes, now: float) -> None:
        """The gateway process is gone: its streams go on for those who may claim them."""
        gateway = self._gateways.pop(identity)
        self._orphans.release(identity)
        for request in [*gateway.live.values(), *gateway.untold.values()]:
            self._owner.pop(request.request_id, None)
            if request.message.answer:
                self._orphans.add(request, now)
            elif self._engine is not None:
                self._engine.cancel(request.request_id)

    def _unlink(self, identity: bytes) -> None:
        """The link has ended, the gateway has not: it will send what it still wants."""
        gateway = self._gateways.pop(identity)
        self._orphans.release(identity)
        for request_id in gateway.live:
            del self._owner[request_id]
            if self._engine is not None:
                self._engine.cancel(request_id)

    # -- messages to gateways -------------------------------------------------------------------------------

    def _publish(
        self,
        outputs: list[TokenOutput],
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        plain: PlainTokens | None = None,
        notes: Sequence[Notes] = (),
    ) -> None:
        """One message per gateway, however many tokens."""
        if not outputs and not prompt_logprobs and plain is None:
            return
        step = self._engine.scheduler.step if self._engine is not None else 0
        batches: defaultdict[bytes, OutputBatch] = defaultdict(lambda: OutputBatch(self._epoch, step, []))
        owner = self._owner.get
        for gateway, tokens in () if plain is None else self._owner.parts(plain):
            begun = [tokens.sequences[place] for place in tokens.begun]
            batches[gateway] = OutputBatch(
                self._epoch,
                step,
                [],
                refs=tokens.refs,
                offsets=tokens.offsets,
                token_ids=tokens.token_ids,
                begun_refs=[sequence.ref for sequence in begun],
                begun_cached=[max(sequence.request.num_cached_tokens, 0) for sequence in begun],
                base=tokens.base,
            )
        for output in outputs:
            identity = owner(output.request_id)
            if identity is not None:
                batches[identity].outputs.append(output)
        for item in prompt_logprobs:
            identity = owner(item.request_id)
            if identity is not None:
                batches[identity].prompt_logprobs.append(item)
        for noted in notes:
            identity = owner(noted.request_id)
            if identity is not None:
                batches[identity].notes.append(noted)
        for identity, batch in batches.items():
            self._gateways[identity].say(batch)
        for output in outputs:
            if output.finish_reason is not None and not self._is_live(output.request_id):
                identity = self._owner.pop(output.request_id, None)
                if identity is not None:
                    self._gateways[identity].ended(output.request_id)

    def _refuse(self, refused: list[RequestRejected]) -> None:
        """Requests that were accepted, and will not be run after all."""
        for rejected in refused:
            identity = self._owner.pop(rejected.request_id, None)
            if identity is not None:
                self._gateways[identity].live.pop(rejected.request_id, None)
                self._gateways[identity].say(rejected)

    def _publish_stats(self, now: float) -> None:
        self._next_stats = now + BEAT_SECONDS
        waits = not self._has_workers or (self._engine is not None and self._engine.scheduler.num_in_flight > 0)
        self._links.to_supervisor(SchedulerPulse(self._number, self._epoch, self._num_steps, waits))
        beat: EngineStats | EngineInfo = self._engine_info()
        if self._engine is not None:
            beat = collect_stats(self._engine.scheduler, self._epoch, now - self._last_progress)
        for gateway in self._gateways.values():
            gateway.beat(beat)

    def _inform_gateways(self) -> None:
        for gateway in self._gateways.values():
            gateway.say(self._engine_info())

    def _engine_info(self) -> EngineInfo:
        if not self._has_workers:
            return EngineInfo(epoch=self._epoch, ready=False)
        return describe(self._executor.info, self._epoch, self._config.scheduler)

    def _is_live(self, request_id: str) -> bool:
        return self._engine is not None and request_id in self._engine.scheduler.requests
