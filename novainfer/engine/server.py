"""The scheduler process: one thread. Gateways in front, worker ranks behind, the supervisor above; nothing is shared.

Each turn of the loop: receive messages, submit plans, apply the oldest result, publish one batch per gateway. It
outlives its workers: when they fail it tells the supervisor, and waits until that has sent others. It holds nothing
that gateways and ranks cannot tell a successor.
`python -m novainfer.engine.server --run-dir DIR --replica N --epoch E --group G`
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import time
from collections import defaultdict
from contextlib import suppress

import zmq
from setproctitle import setproctitle

from novainfer.config import ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.engine.metrics import collect_stats
from novainfer.errors import ConfigError, EngineError, InvalidRequestError, OverloadedError, ProtocolError
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.messages import (
    GATEWAY_SCHEMA,
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
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    ORDERS_SCHEMA,
    ROLE_SCHEDULER,
    SUPERVISOR_SCHEMA,
    ChildReady,
    ChildStarted,
    SchedulerPulse,
    WorkersFault,
    WorkersLost,
)
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import bind_pull, bind_router, connect_push
from novainfer.transport.parent import die_with_parent

logger = logging.getLogger("novainfer.scheduler")

STATS_INTERVAL = 0.25  # seconds; so often a gateway hears that we live, and the supervisor too
_MAX_MESSAGES_PER_TURN = 256
_SESSIONS_PER_EPOCH = 1 << 32


class SchedulerServer:
    """Owns the sockets and, from the first time that every rank has said hello, the engine."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, replica: int, *, epoch: int, group: int) -> None:
        """`group`: the epoch in which the worker group was started that works here at first."""
        self._config = config
        self._replica = replica
        self._epoch = epoch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateway_socket = bind_router(self._context, run_dir.gateways(replica))
        self._executor = ZmqExecutor(
            run_dir.workers(replica),
            world_size=config.parallel.tensor_parallel_size,
            epoch=epoch,
            context=self._context,
        )
        self._executor.expect(epoch, group=group)
        self._orders = bind_pull(self._context, run_dir.orders(replica))
        self._supervisor = connect_push(self._context, run_dir.supervisor())
        self._engine: EngineCore | None = None
        self._has_workers = False
        self._have_failed = False  # the workers; the supervisor has been told
        self._num_steps = 0  # that ended in this epoch
        self._gateways: dict[bytes, str] = {}  # socket identity -> gateway id of its current process
        self._sessions: dict[bytes, int] = {}  # socket identity -> `EngineInfo.session`
        self._next_session = epoch * _SESSIONS_PER_EPOCH
        self._owner: dict[str, bytes] = {}  # request id -> socket identity of its gateway
        self._last_progress = time.monotonic()
        self._next_stats = 0.0
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        self._poller = zmq.Poller()
        for source in (self._gateway_socket, self._executor.socket, self._orders, self._wake_r):
            self._poller.register(source, zmq.POLLIN)
        self._stopping = False

    # -- the loop -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until SIGTERM."""
        signal.set_wakeup_fd(self._wake_w.fileno())
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
        self._report(ChildStarted(ROLE_SCHEDULER, self._replica, os.getpid(), epoch=self._epoch))
        busy = False
        try:
            while not self._stopping:
                self._receive(0.0 if busy else STATS_INTERVAL)
                busy = self._advance()
                self._publish_stats()
        finally:
            self._executor.close()
            self._orders.close()
            self._supervisor.close()
            self._gateway_socket.close(linger=500)
            self._context.term()

    def _receive(self, timeout: float) -> None:
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._orders in ready:
            self._obey(ORDERS_SCHEMA.decode(self._orders.recv()))
        if self._gateway_socket in ready:
            for _ in range(_MAX_MESSAGES_PER_TURN):
                try:
                    identity, data = self._gateway_socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                except ValueError:
                    logger.warning("a gateway sent a message of the wrong number of frames")
                    continue
                self._handle(identity, data)

    def _advance(self) -> bool:
        """Submit and collect what is there; True if something moved, so that the next turn need not wait."""
        if self._engine is not None:
            self._publish(self._engine.scheduler.expire(time.monotonic()), [])
        if self._have_failed:
            with suppress(EngineError):
                self._executor.listen()  # what is not read would wake us again and again
            return False
        try:
            if self._engine is None or not self._has_workers:
                return self._try_start()
            return self._step(self._engine)
        except EngineError as error:
            self._have_failed = True
            self._report(WorkersFault(self._replica, self._epoch, str(error)))
            return False

    def _step(self, engine: EngineCore) -> bool:
        now = time.monotonic()
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
                self._next_stats = 0.0  # the supervisor shall know at once that this group gets on
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
        self._report(ChildReady(ROLE_SCHEDULER, self._replica, self._epoch))
        return True

    def _obey(self, order: WorkersLost) -> None:
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

    def _handle(self, identity: bytes, data: bytes) -> None:
        try:
            message = GATEWAY_SCHEMA.decode(data)
        except ProtocolError as error:
            logger.warning("dropped a message that is not of the schema: %s", error)
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
        elif isinstance(message, AddRequest):
            self._add(identity, message)
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

    def _greet(self, identity: bytes, hello: Hello) -> None:
        known = self._gateways.get(identity)
        if known is not None and known != hello.gateway_id:
            self._cancel_of(identity)  # its predecessor died; nobody reads those streams
        if known != hello.gateway_id:
            self._sessions[identity] = self._next_session
            self._next_session += 1
        self._gateways[identity] = hello.gateway_id
        self._send(identity, self._engine_info(identity))
        self._next_stats = 0.0

    def _add(self, identity: bytes, message: AddRequest) -> None:
        request_id = message.request_id
        if self._engine is None:
            return  # it was sent to our predecessor; we shall get it again with the gateway's whole journal
        if self._owner.get(request_id, identity) != identity:
            self._send(identity, RequestRejected(request_id, 400, "This request id is in use."))
            return
        try:
            ended = self._engine.add(message, time.monotonic())
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

    def _publish_stats(self) -> None:
        now = time.monotonic()
        if now < self._next_stats:
            return
        self._next_stats = now + STATS_INTERVAL
        self._report(SchedulerPulse(self._replica, self._epoch, self._num_steps))
        if self._engine is None:
            return
        stats = collect_stats(self._engine.scheduler, self._epoch, self._seconds_since_progress())
        for identity in list(self._gateways):
            self._send(identity, stats)

    def _send(self, identity: bytes, message: object) -> None:
        try:
            self._gateway_socket.send_multipart([identity, GATEWAY_SCHEMA.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.warning("gateway %r is gone: its requests are cancelled", self._gateways.get(identity))
            self._gateways.pop(identity, None)
            self._cancel_of(identity)

    def _cancel_of(self, identity: bytes) -> None:
        """End the requests of a gateway that cannot hear it."""
        for request_id in [r for r, owner in self._owner.items() if owner == identity]:
            del self._owner[request_id]
            if self._engine is not None:
                self._engine.cancel(request_id)

    # -- small things ---------------------------------------------------------------------------------------

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

    def _seconds_since_progress(self) -> float:
        return time.monotonic() - self._last_progress

    def _report(self, message: object) -> None:
        self._supervisor.send(SUPERVISOR_SCHEMA.encode(message))

    def _on_stop(self, signum: int, frame: object) -> None:
        self._stopping = True


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process; the exit code is 0 only after SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=FIRST_EPOCH)
    parser.add_argument("--group", type=int, default=FIRST_EPOCH)
    args = parser.parse_args(argv)
    die_with_parent()
    setproctitle(f"novainfer: scheduler {args.replica}")
    run_dir = RunDir.create(args.run_dir)
    config = ServeConfig.from_json(run_dir.config_file.read_text())
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        SchedulerServer(config, run_dir, args.replica, epoch=args.epoch, group=args.group).run()
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
