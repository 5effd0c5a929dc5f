"""The scheduler's end of the worker sockets: plans out to every rank, results back from rank 0.

Lives in the scheduler process, on its one thread; knows neither torch nor Ray. What the messages mean is `RankGroup`'s
matter. The ROUTER may be polled together with other sockets: register `socket`, call `hear` when it is readable, and
work with `group`, which never looks at the socket. The rest is for owners who wait (`LLM` over Ray, measurements).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import zmq

from novainfer.errors import EngineError, ProtocolError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.ranks import RankGroup
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.protocol.step import WORKER_SCHEMA, Shutdown, StepPlan, StepResult
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import bind_router, has_message, receive_frames, send_frames, start_authenticator

logger = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 500


class ZmqExecutor:
    """The ranks of one tensor-parallel group, behind a bound ROUTER socket. Implements `Executor`."""

    def __init__(self, endpoint: Endpoint, *, world_size: int, epoch: int, context: zmq.Context[Any]) -> None:
        """Bind. Raises `ConfigError` if somebody else listens there."""
        self.socket: zmq.Socket[bytes] = bind_router(context, endpoint)
        self._authenticator = None if endpoint.curve is None else start_authenticator(context, endpoint.curve)
        self._ranks = RankGroup(self._send, world_size=world_size, epoch=epoch)

    @property
    def group(self) -> RankGroup:
        """The ranks, as far as they were heard."""
        return self._ranks

    def hear(self, *, has_any: bool = False) -> None:
        """Take in what has come; never waits. has_any: something has, so that it need not look first."""
        while has_any or has_message(self.socket):
            has_any = False
            self._take()

    def expect(self, epoch: int, *, group: int) -> None:
        """See `GroupExecutor`."""
        self._ranks.expect(epoch, group=group)

    @property
    def info(self) -> ExecutorInfo:
        """What the ranks agreed on. Raises `EngineError` before all of them have said hello."""
        return self._ranks.info

    def try_ready(self) -> ExecutorInfo | None:
        """Take the hellos that have come; the info once all ranks have loaded. Raises `EngineError` if one failed."""
        return self._take_hellos(0.0)

    def wait_ready(self, timeout: float) -> ExecutorInfo:
        """Wait until all ranks have loaded. Raises `EngineError` after `timeout` seconds or when a rank fails."""
        info = self._take_hellos(timeout)
        if info is None:
            raise EngineError(f"ranks {self._ranks.missing} were not ready within {timeout:g} s")
        return info

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank. Raises `EngineError` if one is gone, or if the plan is of another epoch."""
        self._ranks.submit(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest unanswered step's result, None after `timeout` seconds. Raises `EngineError` if workers failed."""
        deadline = time.monotonic() + timeout if timeout else None
        while (result := self._ranks.collect()) is None:
            if not self._receive(timeout if deadline is None else deadline - time.monotonic()):
                return None
        return result

    def listen(self) -> None:
        """Take in what has come although no step is out. Raises `EngineError` if it says that the workers failed."""
        self.hear()
        self._ranks.check()

    def close(self, *, ends_ranks: bool = True) -> None:
        """Close the socket (idempotent); before, tell the ranks to exit, unless others will work with them."""
        if self.socket.closed:
            return
        if ends_ranks:
            self._ranks.tell_all(Shutdown(self._ranks.epoch))
        self.socket.close(linger=_CLOSE_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _take_hellos(self, timeout: float) -> ExecutorInfo | None:
        deadline = time.monotonic() + timeout
        while (info := self._ranks.try_ready()) is None and self._receive(deadline - time.monotonic()):
            pass
        return info

    def _send(self, identities: Sequence[bytes], message: object) -> list[bytes]:
        data = WORKER_SCHEMA.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:  # the peer would drop it, and the connection, without a word
            raise EngineError(f"a plan has {len(data)} bytes, more than a message may have")
        return [identity for identity in identities if not self._reaches(identity, data)]

    def _reaches(self, identity: bytes, data: bytes) -> bool:
        try:
            send_frames(self.socket, (identity, data))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _receive(self, timeout: float | None) -> bool:
        """Take in one message; False if none came within `timeout` seconds (None = for ever)."""
        wait = -1 if timeout is None else math.ceil(timeout * 1000) if timeout > 0.0 else 0
        if not has_message(self.socket, wait):
            return False
        self._take()
        return True

    def _take(self) -> None:
        frames = receive_frames(self.socket)
        try:
            if len(frames) == 2:
                self._ranks.handle(frames[0], WORKER_SCHEMA.decode(frames[1]))
        except ProtocolError as error:
            logger.warning("dropped a message of %r: %s", frames[0], error)
