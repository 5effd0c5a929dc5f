"""The scheduler process as a pure machine, between gateways, worker ranks and the supervisor: no I/O, no clock.

It outlives its workers: when they fail it tells the supervisor, and waits until that has sent others. It holds nothing
that gateways and ranks cannot tell a successor. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from novainfer.config import ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.engine.metrics import collect_stats
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError
from novainfer.executor.base import GroupExecutor
from novainfer.protocol.messages import (
    AddRequest,
    AliasCancelled,
    CancelAlias,
    CancelRequest,
    EngineInfo,
    Hello,
    OutputBatch,
    PromptLogprobs,
    RequestRejected,
    TokenOutput,
)
from novainfer.protocol.supervision import ROLE_SCHEDULER, ChildReady, SchedulerPulse, WorkersFault, WorkersLost

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25  # seconds; so often a gateway hears that we live, and the supervisor too
_SESSIONS_PER_EPOCH = 1 << 32


@dataclass(frozen=True)
class ReplicaLinks:
    """Ways out. to_gateway(socket identity, record of GATEWAY_SCHEMA): False if that gateway cannot be reached."""

    to_gateway: Callable[[bytes, object], bool]
    to_supervisor: Callable[[object], None]


class Replica:
    """Owns, from the first time that every rank has said hello, the engine."""

    def __init__(
        self, config: ServeConfig, executor: GroupExecutor, links: ReplicaLinks, *, number: int, epoch: int, now: float
    ) -> None:
        self._config = config
        self._executor = executor
        self._links = links
        self._number = number
        self._epoch = epoch
        self._engine: EngineCore | None = None
        self._has_workers = False
        self._have_failed = False  # the workers; the supervisor has been told
        self._num_steps = 0  # that ended in this epoch
        self._gateways: dict[bytes, str] = {}  # socket identity -> gateway id of its current process
        self._sessions: dict[bytes, int] = {}  # socket identity -> `EngineInfo.session`
        self._next_session = epoch * _SESSIONS_PER_EPOCH
        self._owner: dict[str, bytes] = {}  # request id -> socket identity of its gateway
        self._last_progress = now
        self._next_stats = now

    @property
    def engine(self) -> EngineCore | None:
        """To look at; None before the first workers were ready."""
        return self._engine

    # -- a turn of the loop -----------------------------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Do what can be done after messages were handled; True if something moved, so that the next need not wait."""
        moved = self._advance(now)
        self._publish_stats(now)
        return moved

    def _advance(self, now: float) -> bool:
        if self._engine is not None:
            self._publish(self._engine.scheduler.expire(now), [])
            self._refuse(self._engine.scheduler.give_up_waiting(now))
        if self._have_failed:
            with suppress(EngineError):
                self._executor.listen()  # what is not read would wake us again and again
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
        submitted = engine.submit()
        if engine.scheduler.num_in_flight == 0:
            self._executor.listen()
        outputs = engine.collect(0.0)
        if outputs is not None:
            self._last_progress = now
            self._num_steps += 1
            if self._num_steps == 1:
                self._next_stats = now  # the supervisor shall know at once that this group gets on
            self._publish(outputs.outputs, outputs.prompt_logprobs)
        return bool(submitted) or outputs is not None

    def _try_start(self) -> bool:
        info = self._executor.try_ready()
        if info is None:
            return False
        logger.info("all ranks are ready: %s", info)
        self._has_workers = True
        if self._engine is None:
            self._engine = EngineCore(self._executor, self._config, self._executor.held)
        else:
            self._publish(self._engine.attach_workers(self._executor), [])
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
            self._publish(self._engine.lose_workers(faulted=order.faulted), [])

    # -- messages from gateways -----------------------------------------------------------------------------

    def handle(self, identity: bytes, message: object, now: float) -> None:
        """Take in one message of the gateway behind this socket identity."""
        if isinstance(message, Hello):
            self._greet(identity, message, now)
        elif isinstance(message, AddRequest):
            self._add(identity, message, now)
        elif isinstance(message, CancelRequest):
            if self._engine is not None and self._owner.get(message.request_id) == identity:
                self._publish(self._engine.cancel(message.request_id, message.choice), [])
        elif isinstance(message, CancelAlias):
            if self._engine is not None:  # else we cannot know: no answer
                self._send(identity, AliasCancelled(message.query, self._cancel_alias(self._engine, message)))
        else:
            logger.warning("dropped a %s: not for the scheduler", type(message).__name__)

    def _cancel_alias(self, engine: EngineCore, message: CancelAlias) -> bool:
        request_ids = [
            request_id
            for request_id, request in engine.scheduler.requests.items()
            if request.message.tenant == message.tenant and message.alias in request.message.aliases
        ]
        for request_id in request_ids:
            self._publish(engine.cancel(request_id), [])
        return bool(request_ids)

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        known = self._gateways.get(identity)
        if known is not None and known != hello.gateway_id:
            self._cancel_of(identity)  # its predecessor died; nobody reads those streams
        if known != hello.gateway_id:
            self._sessions[identity] = self._next_session
            self._next_session += 1
        self._gateways[identity] = hello.gateway_id
        self._send(identity, self._engine_info(identity))
        self._next_stats = now

    def _add(self, identity: bytes, message: AddRequest, now: float) -> None:
        request_id = message.request_id
        if self._engine is None:
            return  # it was sent to our predecessor; we shall get it again with the gateway's whole journal
        if self._owner.get(request_id, identity) != identity:
            self._send(identity, RequestRejected(request_id, 400, "This request id is in use."))
            return
        try:
            ended = self._engine.add(message, now)
        except InvalidRequestError as error:
            self._send(identity, RequestRejected(request_id, 400, error.message, error.param, error.code))
        except OverloadedError as error:
            rejected = RequestRejected(
                request_id, error.status, error.message, code="overloaded", retry_after=error.retry_after
            )
            self._send(identity, rejected)
        else:
            self._owner[request_id] = identity
            self._publish(ended, [])

    # -- messages to gateways -------------------------------------------------------------------------------

    def _publish(self, outputs: list[TokenOutput], prompt_logprobs: list[PromptLogprobs]) -> None:
        """One message per gateway, however many tokens."""
        if not outputs and not prompt_logprobs:
            return
        by_gateway: dict[bytes, tuple[list[TokenOutput], list[PromptLogprobs]]] = defaultdict(lambda: ([], []))
        for output in outputs:
            identity = self._owner.get(output.request_id)
            if identity is not None:
                by_gateway[identity][0].append(output)
        for item in prompt_logprobs:
            identity = self._owner.get(item.request_id)
            if identity is not None:
                by_gateway[identity][1].append(item)
        for output in outputs:
            if output.finish_reason is not None and not self._is_live(output.request_id):
                self._owner.pop(output.request_id, None)
        step = self._engine.scheduler.step if self._engine is not None else 0
        for identity, (tokens, logprobs) in by_gateway.items():
            self._send(identity, OutputBatch(self._epoch, step, tokens, logprobs))

    def _refuse(self, refused: list[RequestRejected]) -> None:
        """Requests that were accepted, and will not be run after all."""
        for rejected in refused:
            identity = self._owner.pop(rejected.request_id, None)
            if identity is not None:
                self._send(identity, rejected)

    def _publish_stats(self, now: float) -> None:
        if now < self._next_stats:
            return
        self._next_stats = now + STATS_INTERVAL
        self._links.to_supervisor(SchedulerPulse(self._number, self._epoch, self._num_steps))
        if self._engine is None:
            return
        stats = collect_stats(self._engine.scheduler, self._epoch, now - self._last_progress)
        for identity in list(self._gateways):
            self._send(identity, stats)

    def _send(self, identity: bytes, message: object) -> None:
        if not self._links.to_gateway(identity, message):
            logger.warning("gateway %r is gone: its requests are cancelled", self._gateways.get(identity))
            self._gateways.pop(identity, None)
            self._cancel_of(identity)

    def _cancel_of(self, identity: bytes) -> None:
        """End the requests of a gateway that cannot hear it."""
        for request_id in [r for r, owner in self._owner.items() if owner == identity]:
            del self._owner[request_id]
            if self._engine is not None:
                self._engine.cancel(request_id)

    def _inform_gateways(self) -> None:
        for identity in list(self._gateways):
            self._send(identity, self._engine_info(identity))

    def _engine_info(self, identity: bytes) -> EngineInfo:
        session = self._sessions[identity]
        if not self._has_workers:
            return EngineInfo(epoch=self._epoch, ready=False, session=session)
        info = self._executor.info
        return EngineInfo(
            epoch=self._epoch,
            ready=True,
            session=session,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=min(info.max_num_seqs, self._config.scheduler.max_num_seqs),
            mode=info.mode,
        )

    def _is_live(self, request_id: str) -> bool:
        return self._engine is not None and request_id in self._engine.scheduler.requests
