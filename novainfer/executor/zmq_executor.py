"""The scheduler's end of the worker sockets: plans out to every rank, results back from rank 0.

Lives in the scheduler process, on its one thread; knows neither torch nor Ray. The ROUTER may be polled together with
other sockets: register `socket`, and when it is readable call `try_ready` until it returns the info, from then on
`collect(0)` until it returns None. After a failure only `expect` helps: it begins anew with another group.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from novainfer.errors import EngineError, ProtocolError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.protocol.step import (
    WORKER_SCHEMA,
    Adopt,
    IndexedBlock,
    Shutdown,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from novainfer.transport.addresses import Endpoint
from novainfer.transport.channel import bind_router, start_authenticator

logger = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 500


class ZmqExecutor:
    """The ranks of one tensor-parallel group, behind a bound ROUTER socket. See `Executor` for the contract."""

    def __init__(self, endpoint: Endpoint, *, world_size: int, epoch: int, context: zmq.Context[Any]) -> None:
        """Bind. Raises `ConfigError` if somebody else listens there."""
        self.socket: zmq.Socket[bytes] = bind_router(context, endpoint)
        self._authenticator = None if endpoint.curve is None else start_authenticator(context, endpoint.curve)
        self._world_size = world_size
        self.expect(epoch, group=epoch)

    def expect(self, epoch: int, *, group: int) -> None:
        """From now on the ranks that were started as `group` work here, in `epoch`; nobody else is heard.

        Ranks of that group that are in an older epoch are adopted.
        """
        self._epoch = epoch
        self._group = group
        self._hellos: dict[int, tuple[bytes, WorkerHello]] = {}  # rank -> (socket identity, hello)
        self._info: ExecutorInfo | None = None
        self._unanswered: deque[int] = deque()  # steps in the order of submission
        self._results: deque[StepResult] = deque()  # received, not collected
        self._failure: str | None = None

    @property
    def info(self) -> ExecutorInfo:
        """What the ranks agreed on. Raises `EngineError` before all of them have said hello."""
        if self._info is None:
            raise EngineError("the workers are not ready")
        return self._info

    @property
    def held(self) -> list[IndexedBlock]:
        """The blocks that were in the index of the scheduler which had these ranks before; valid like `info`."""
        return self._hellos[0][1].held

    def try_ready(self) -> ExecutorInfo | None:
        """Take the hellos that have come; the info once all ranks have loaded. Raises `EngineError` if one failed."""
        return self._take_hellos(time.monotonic())

    def wait_ready(self, timeout: float) -> ExecutorInfo:
        """Wait until all ranks have loaded. Raises `EngineError` after `timeout` seconds or when a rank fails."""
        info = self._take_hellos(time.monotonic() + timeout)
        if info is None:
            missing = sorted(set(range(self._world_size)) - set(self._hellos))
            raise EngineError(f"ranks {missing} were not ready within {timeout:g} s")
        return info

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank. Raises `EngineError` if one is gone, or if the plan is of another epoch."""
        self._raise_failure()
        if plan.epoch != self.info.epoch:
            raise EngineError(f"plan of epoch {plan.epoch} for workers of epoch {self._epoch}")
        data = WORKER_SCHEMA.encode(plan)
        if len(data) > MAX_MESSAGE_BYTES:  # the peer would drop it, and the connection, without a word
            raise EngineError(f"the plan of step {plan.step} has {len(data)} bytes, more than a message may have")
        self._send_all(data)
        self._unanswered.append(plan.step)

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest unanswered step's result, None after `timeout` seconds. Raises `EngineError` if workers failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._results:
            self._raise_failure()
            if not self._receive(deadline):
                return None
        return self._results.popleft()

    def listen(self) -> None:
        """Take in what has come although no step is out. Raises `EngineError` if it says that the workers failed."""
        while self._receive(time.monotonic()):
            pass
        self._raise_failure()

    def close(self) -> None:
        """Tell the ranks to exit, and close the socket (idempotent)."""
        if self.socket.closed:
            return
        try:
            self._send_all(WORKER_SCHEMA.encode(Shutdown(self._epoch)))
        except EngineError:
            pass  # a rank that is gone needs no telling
        self.socket.close(linger=_CLOSE_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _take_hellos(self, deadline: float) -> ExecutorInfo | None:
        while self._info is None and self._receive(deadline):
            self._raise_failure()
        return self._info

    def _send_all(self, data: bytes) -> None:
        for rank, (identity, _) in sorted(self._hellos.items()):
            self._send(rank, identity, data)
        self._raise_failure()

    def _send(self, rank: int, identity: bytes, data: bytes) -> None:
        try:
            self.socket.send_multipart((identity, data))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._failure = f"rank {rank} has disconnected"

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _receive(self, deadline: float | None) -> bool:
        """Take in one message; False if none came until `deadline` (time.monotonic(), None = wait)."""
        wait = None if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
        if not self.socket.poll(wait):
            return False
        frames: Sequence[bytes] = self.socket.recv_multipart()
        try:
            message = WORKER_SCHEMA.decode(frames[-1]) if len(frames) == 2 else None
        except ProtocolError as error:
            logger.warning("dropped a message of %r: %s", frames[0], error)
            return True
        if isinstance(message, WorkerHello):
            self._on_hello(frames[0], message)
        elif isinstance(message, StepResult):
            self._on_result(message)
        elif isinstance(message, WorkerFault) and message.group == self._group:
            self._failure = f"rank {message.rank}: {message.message}"
        return True

    def _on_hello(self, identity: bytes, hello: WorkerHello) -> None:
        if hello.group != self._group or hello.epoch > self._epoch or hello.rank in self._hellos:
            return  # of a group that was replaced, or said once more
        if hello.epoch < self._epoch:
            self._send(hello.rank, identity, WORKER_SCHEMA.encode(Adopt(self._epoch)))
            return
        if hello.world_size != self._world_size or not 0 <= hello.rank < self._world_size:
            self._failure = f"rank {hello.rank} of {hello.world_size} does not belong to a group of {self._world_size}"
            return
        self._hellos[hello.rank] = (identity, hello)
        if len(self._hellos) == self._world_size:
            hellos = [hello for _, hello in self._hellos.values()]
            if len({hello.mode for hello in hellos}) > 1:
                self._failure = "the ranks compute differently: " + ", ".join(sorted({hello.mode for hello in hellos}))
                return
            self._info = _agree(hellos)

    def _on_result(self, result: StepResult) -> None:
        if result.epoch != self._epoch:
            return  # the last words of a group that was replaced, or meant for the scheduler before this one
        expected = self._unanswered.popleft() if self._unanswered else None
        if result.step != expected:
            self._failure = f"workers answered step {result.step}, not step {expected}"
            return
        self._results.append(result)


def _agree(hellos: Sequence[WorkerHello]) -> ExecutorInfo:
    """The minimum over the ranks: each can do at least this."""
    return ExecutorInfo(
        epoch=hellos[0].epoch,
        num_blocks=min(hello.num_blocks for hello in hellos),
        block_size=min(hello.block_size for hello in hellos),
        vocab_size=min(hello.vocab_size for hello in hellos),
        max_model_len=min(hello.max_model_len for hello in hellos),
        max_num_seqs=min(hello.max_num_seqs for hello in hellos),
        mode=hellos[0].mode,
    )
