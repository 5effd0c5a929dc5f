"""What the scheduler knows of its worker group, as a pure machine: no socket, no clock.

A group is expected, its ranks say hello (or are adopted first), and from then on every plan goes to each rank and is
answered once, by rank 0, in order. A link loses what is on its way when it breaks, and nobody is told: but ranks that
say hello again and again, as idle ones do, while an answer is due have never got the plan, or their answer was lost.
After a failure only `expect` helps: it begins anew with another group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.step import Adopt, IndexedBlock, StepPlan, StepResult, WorkerFault, WorkerHello

# Hellos of each rank while an answer is due (ten a second) before it counts as lost; some may be older than the plan.
_IDLE_HELLOS = 10

# Sends one record of WORKER_SCHEMA to each of these socket identities; returns those that cannot be reached.
SendToRanks = Callable[[Sequence[bytes], object], Sequence[bytes]]


class RankGroup:
    """The ranks of one tensor-parallel group. Implements `GroupExecutor`; nothing here ever waits.

    epoch: in which they are expected.
    """

    def __init__(self, send: SendToRanks, *, world_size: int, epoch: int) -> None:
        self._send_to = send
        self._world_size = world_size
        self.expect(epoch, group=epoch)

    def expect(self, epoch: int, *, group: int) -> None:
        """See `GroupExecutor`."""
        self.epoch = epoch
        self._group = group
        self._hellos: dict[int, tuple[bytes, WorkerHello]] = {}  # rank -> (socket identity, hello)
        self._info: ExecutorInfo | None = None
        self._is_first = True  # no plan was sent yet
        self._unanswered: deque[int] = deque()  # steps in the order of submission
        self._results: deque[StepResult] = deque()  # received, not collected
        self._failure: str | None = None
        self._idle_hellos = [0] * self._world_size  # since the last plan or result, while an answer is due

    @property
    def info(self) -> ExecutorInfo:
        """What the ranks agreed on. Raises `EngineError` before all of them have said hello."""
        if self._info is None:
            raise EngineError("the workers are not ready")
        return self._info

    @property
    def held(self) -> list[IndexedBlock]:
        """See `GroupExecutor`."""
        return self._hellos[0][1].held

    @property
    def missing(self) -> list[int]:
        """Ranks that have not said hello."""
        return sorted(set(range(self._world_size)) - set(self._hellos))

    def try_ready(self) -> ExecutorInfo | None:
        """See `GroupExecutor`."""
        self.check()
        return self._info

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank. Raises `EngineError` if one is gone, or if the plan is of another epoch."""
        self.check()
        if plan.epoch != self.info.epoch:
            raise EngineError(f"plan of epoch {plan.epoch} for workers of epoch {self.epoch}")
        self.tell_all(replace(plan, is_first=True) if self._is_first else plan)
        self._is_first = False
        self.check()
        self._unanswered.append(plan.step)
        self._idle_hellos = [0] * self._world_size

    def collect(self, timeout: float | None = 0.0) -> StepResult | None:
        """The oldest unanswered step's result, None if it is not there. Raises `EngineError` if workers failed."""
        if not self._results:
            self.check()
            return None
        return self._results.popleft()

    def check(self) -> None:
        """Raises `EngineError` if the workers failed."""
        if self._failure is not None:
            raise EngineError(self._failure)

    def close(self) -> None:
        """Nothing to release."""

    def tell_all(self, message: object) -> None:
        """Send to every rank that has said hello."""
        ranks = sorted(self._hellos)
        self._send([self._hellos[rank][0] for rank in ranks], message)

    def handle(self, identity: bytes, message: object) -> None:
        """Take in one message of a rank."""
        if isinstance(message, WorkerHello):
            self._on_hello(identity, message)
        elif isinstance(message, StepResult):
            self._on_result(message)
        elif isinstance(message, WorkerFault) and message.group == self._group:
            self._failure = f"rank {message.rank}: {message.message}"

    def _send(self, identities: Sequence[bytes], message: object) -> None:
        for gone in self._send_to(identities, message):
            rank = next((rank for rank, (identity, _) in self._hellos.items() if identity == gone), "?")
            self._failure = f"rank {rank} has disconnected"

    def _on_hello(self, identity: bytes, hello: WorkerHello) -> None:
        if hello.group != self._group or hello.epoch > self.epoch:
            return  # of a group that was replaced
        if hello.rank in self._hellos:
            self._on_idle(hello.rank)
            return
        if hello.epoch < self.epoch:
            self._send([identity], Adopt(self.epoch))
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

    def _on_idle(self, rank: int) -> None:
        """A rank that is known says hello once more: it waits for a plan."""
        if not self._unanswered:
            return
        self._idle_hellos[rank] += 1
        if min(self._idle_hellos) >= _IDLE_HELLOS and self._failure is None:
            self._failure = f"every rank is idle and step {self._unanswered[0]} has no answer: a message was lost"

    def _on_result(self, result: StepResult) -> None:
        if result.epoch != self.epoch:
            return  # the last words of a group that was replaced, or meant for the scheduler before this one
        expected = self._unanswered.popleft() if self._unanswered else None
        if result.step != expected:
            self._failure = f"workers answered step {result.step}, not step {expected}"
            return
        self._results.append(result)
        self._idle_hellos = [0] * self._world_size


def _agree(hellos: Sequence[WorkerHello]) -> ExecutorInfo:
    """The minimum over the ranks: each can do at least this."""
    return ExecutorInfo(
        epoch=hellos[0].epoch,
        num_blocks=min(hello.num_blocks for hello in hellos),
        block_size=min(hello.block_size for hello in hellos),
        vocab_size=min(hello.vocab_size for hello in hellos),
        max_model_len=min(hello.max_model_len for hello in hellos),
        max_num_seqs=min(hello.max_num_seqs for hello in hellos),
        max_num_batched_tokens=min(hello.max_num_batched_tokens for hello in hellos),
        mode=hellos[0].mode,
        can_draft=all(hello.can_draft for hello in hellos),
        hidden_size=min(hello.hidden_size for hello in hellos),
    )
