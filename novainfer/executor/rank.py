"""A rank's end of the link to its scheduler, as a pure machine: no socket, no clock, no model.

It says hello as long as no plan comes, because a scheduler that has replaced another one knows nothing of this rank;
it hears one scheduler at a time, the one of the newest epoch; and it runs that one's plans in order, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.held_blocks import HeldBlocks
from novainfer.protocol.step import Adopt, IndexedBlock, Shutdown, StepPlan, WorkerHello


class Steps(Protocol):
    """What runs the plans of a rank."""

    def launch(self, plan: StepPlan) -> None:
        """Begin a step; its result is sent when it ends."""
        ...

    def drop_rows(self) -> None:
        """End the steps that have begun, then forget every row; the KV blocks stay as they are."""
        ...


class RankSession:
    """One rank of a group that was started in the epoch `info.epoch`."""

    def __init__(
        self, steps: Steps, send: Callable[[object], None], *, rank: int, world_size: int, info: ExecutorInfo
    ) -> None:
        """`send`: one record of WORKER_SCHEMA to the scheduler."""
        self._steps = steps
        self._send = send
        self._rank = rank
        self._world_size = world_size
        self._info = info
        self._held = HeldBlocks()
        self._epoch = info.epoch
        self._hello_epoch = info.epoch  # up to here the scheduler knows for certain what we hold
        self._last_step: int | None = None
        self._asks = True  # has said hello since it last answered an `Adopt`

    def say_hello(self) -> None:
        """To be called at first, and whenever nothing was heard for a while."""
        self._asks = True
        self._say_hello([], self._hello_epoch)

    def handle(self, message: object) -> bool:
        """Obey the scheduler; False if it said that the rank shall end.

        Raises `EngineError` for a plan out of order, and whatever a step raises: then the rank cannot go on.
        """
        if isinstance(message, Adopt):
            self._follow(message)
        elif isinstance(message, StepPlan):
            if message.epoch >= self._epoch:  # else of a scheduler that was replaced
                self._launch(message)
        elif isinstance(message, Shutdown):
            return message.epoch < self._epoch
        else:
            raise EngineError(f"the scheduler sent a {type(message).__name__}")
        return True

    def _follow(self, adopt: Adopt) -> None:
        """Another scheduler: no row is known to it, and no step was ever asked for.

        It answers each of our hellos, also those that waited for it. It is told once more only if we have said hello
        since we told it: what it was told got lost then.
        """
        if adopt.epoch < self._epoch or adopt.epoch == self._hello_epoch:
            return
        if adopt.epoch == self._epoch and not self._asks:
            return
        self._asks = False
        self._steps.drop_rows()
        self._epoch, self._last_step = adopt.epoch, None
        self._say_hello(self._held.tell(), adopt.epoch)

    def _launch(self, plan: StepPlan) -> None:
        expected = plan.step if self._last_step is None else self._last_step + 1
        if plan.is_first != (self._last_step is None):
            raise EngineError(f"step {plan.step} is {'' if plan.is_first else 'not '}the first one: another was lost")
        if plan.epoch != self._epoch or plan.step != expected:
            raise EngineError(f"got step {plan.step} of epoch {plan.epoch}, not step {expected} of epoch {self._epoch}")
        self._last_step = plan.step
        self._hello_epoch = self._epoch
        if self._rank == 0:
            self._held.apply(plan)
        self._steps.launch(plan)

    def _say_hello(self, held: list[IndexedBlock], epoch: int) -> None:
        info = self._info
        hello = WorkerHello(
            epoch=epoch,
            group=info.epoch,
            rank=self._rank,
            world_size=self._world_size,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            held=held,
            mode=info.mode,
            max_num_batched_tokens=info.max_num_batched_tokens,
            can_draft=info.can_draft,
            hidden_size=info.hidden_size,
        )
        self._send(hello)
