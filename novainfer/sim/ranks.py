"""The worker group of the simulation: `RankSession`s on oracle rows, which step together as a real group does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.rank import RankSession
from novainfer.protocol.step import NewRow, StepPlan, StepResult, WorkerFault
from novainfer.protocol.supervision import ROLE_WORKER, ChildFault, ChildReady
from novainfer.sim.oracle import OracleError, OracleRow, OracleRows
from novainfer.sim.wires import Wire
from novainfer.sim.world import Process, Violation, World

_PEER_LOST_AFTER = 0.03  # seconds until a rank in a sum notices that another one is gone, if it does


@dataclass(slots=True)
class Curses:
    """What is special about requests, by seed: (choice, output index) whose logits are not finite, or that kill."""

    not_finite: dict[int, tuple[int, int]] = field(default_factory=dict)
    poison: dict[int, tuple[int, int]] = field(default_factory=dict)
    salts: dict[int, int] = field(default_factory=dict)  # of those who may share a prefix: their KV is like no other's


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What every group of this world is like."""

    world_size: int
    info: ExecutorInfo
    step_seconds: float
    load_seconds: float
    hello_seconds: float
    max_launched: int  # steps that a rank begins before the first has ended


class SimRows(OracleRows):
    """Rows of requests that may be cursed. `is_deaf`: a plan never came, so what it computes may be wrong."""

    def __init__(self, info: ExecutorInfo, curses: Curses) -> None:
        super().__init__(info)
        self.is_deaf: Callable[[], bool] = bool
        self._curses = curses

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan; a poisoned row raises `EngineError`."""
        result = super().execute(plan)
        if self._curses.poison:
            for index in plan.rows:
                row = self.rows[index]
                at = self._curses.poison.get(row.params.seed or 0)
                # The tokens that were sampled just now are counted already.
                end = result.rows.count(index) if row.embed else len(row.token_ids) - row.prompt_len
                if at is not None and at[0] == row.choice and end - result.rows.count(index) <= at[1] < end:
                    raise EngineError("poison")
        return result

    def salt_of(self, new: NewRow) -> int:
        """See `OracleRows`."""
        return self._curses.salts[new.params.seed or 0]

    def is_bad(self, index: int, row: OracleRow) -> bool:
        """See `OracleRows`."""
        at = self._curses.not_finite.get(row.params.seed or 0)
        return at == (row.choice, len(row.token_ids) - row.prompt_len)

    def may_read_garbage(self, row: OracleRow) -> bool:
        """The choices of one request share what they computed."""
        return row.is_bad or (row.params.seed or 0) in self._curses.not_finite

    def _read(self, row: OracleRow, end: int) -> bool:
        try:
            return super()._read(row, end)
        except OracleError:
            if not self.is_deaf():
                raise
            row.hashes[-1] ^= 1  # wrong tokens, which nobody may ever see
            return True


@dataclass(slots=True)
class _Running:
    """A step that has begun on a rank. `ends`: on the world's clock, None as long as another rank is missing."""

    result: StepResult
    launched_at: float
    ends: float | None = None


class SimGroup:
    """The ranks of one start. They add up in every step: none ends it before all have begun it."""

    def __init__(self, world: World, spec: GroupSpec, epoch: int, rng: Random) -> None:
        self.epoch = epoch
        self.spec = spec
        self.ranks: list[SimRank] = []
        self._world = world
        self._rng = rng
        self._begun: dict[int, list[tuple[SimRank, StepPlan, _Running]]] = {}  # by the number of the launch

    def begin(self, rank: SimRank, number: int, plan: StepPlan, running: _Running) -> None:
        """A rank has got as far as its launch `number`."""
        begun = self._begun.setdefault(number, [])
        begun.append((rank, plan, running))
        if any((plan.epoch, plan.step) != (other.epoch, other.step) for _, other, _ in begun):
            raise Violation(f"ranks of one group add up in different steps: {[p.step for _, p, _ in begun]}")
        if len(begun) == self.spec.world_size:
            del self._begun[number]
            slowness = max(member.slowness for member, _, _ in begun)
            seconds = self.spec.step_seconds * slowness * (0.5 + self._rng.random())
            for member, _, its in begun:
                its.ends = self._world.now + seconds
                member.wake(seconds)

    def died(self, dead: SimRank) -> None:
        """The others may notice, if they wait for it."""
        for rank in self.ranks:
            if rank is not dead and rank.waits_for_others and self._rng.random() < 0.5:
                self._world.after(_PEER_LOST_AFTER, rank.lose_peer)


class SimRank(Process):
    """One rank: loads, says hello, runs plans."""

    def __init__(
        self, world: World, group: SimGroup, rank: int, wire: Wire, report: Callable[[object], None], rows: SimRows
    ) -> None:
        super().__init__(world, f"rank{rank}.{group.epoch}")
        self.group = group
        self.rank = rank
        self.wire = wire
        self.is_loading = True
        self.is_zombie = False  # a SIGKILL does not reach it
        self.on_exit: Callable[[SimRank], None] = lambda rank: None
        self._report = report
        self._rows = rows
        self._inbox: deque[object] = deque()
        self._running: deque[_Running] = deque()
        self._num_launched = 0
        self._heard_at = 0.0
        self._session = RankSession(self, wire.send_up, rank=rank, world_size=group.spec.world_size, info=rows.info)
        rows.is_deaf = lambda: wire.down.has_lost

    # -- what the supervisor feels ------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """As its pulses say."""
        return bool(self._running)

    @property
    def moved_at(self) -> float:
        """When it last got on, on the world's clock."""
        if self._running and self._running[0].ends is None:
            return self._running[0].launched_at
        return self.heard_at

    @property
    def waits_for_others(self) -> bool:
        """It is in a step that another rank has not begun."""
        return self.is_alive and any(running.ends is None for running in self._running)

    # -- life -----------------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        """It can serve."""
        if self.is_alive:
            self.is_loading = False
            self._heard_at = self.world.now
            self._session.say_hello()
            self._report(ChildReady(ROLE_WORKER, self.rank, self.group.epoch))
            self.wake()

    def receive(self, message: object) -> None:
        """From the scheduler."""
        self._inbox.append(message)
        self.wake()

    def turn(self) -> None:
        """Finish what has ended, take what may be taken, else say hello from time to time."""
        if self.is_loading:
            return
        now = self.world.now
        while self._running and self._running[0].ends is not None and self._running[0].ends <= now:
            result = self._running.popleft().result
            if self.rank == 0:
                self.wire.send_up(result)
            self._heard_at = now
        try:
            self._take(now)
        except Violation:
            raise
        except OracleError as error:
            if not self.wire.down.has_lost:
                raise Violation(f"{self.name}: {error}") from error
            self.fail(str(error))
        except EngineError as error:
            if str(error) != "poison" and not self.wire.down.has_lost:
                raise Violation(f"{self.name}: {error}") from error
            self.fail(str(error))
        if not self.is_alive:
            return
        if self._running:
            ends = self._running[0].ends
            if ends is not None:
                self.wake(ends - now)
            return
        wait = self._heard_at + self.group.spec.hello_seconds - now
        if wait <= 1e-9:
            self._session.say_hello()
            self._heard_at = now
            wait = self.group.spec.hello_seconds
        self.wake(wait)

    def _take(self, now: float) -> None:
        while self._inbox:
            message = self._inbox[0]
            # Adopt ends the steps that have begun first: it is taken when they have.
            most = self.group.spec.max_launched if isinstance(message, StepPlan) else 1
            if len(self._running) >= most:
                return
            self._inbox.popleft()
            self._heard_at = now
            self._session.handle(message)

    def launch(self, plan: StepPlan) -> None:
        """See `Steps`."""
        running = _Running(self._rows.execute(plan), self.world.now)
        self._running.append(running)
        self._num_launched += 1
        self.group.begin(self, self._num_launched, plan, running)

    def drop_rows(self) -> None:
        """See `Steps`."""
        self._rows.rows.clear()

    def fail(self, message: str, *, peer_lost: bool = False) -> None:
        """Tell both peers, and exit."""
        if self.is_alive:
            self.wire.send_up(WorkerFault(self.group.epoch, self.rank, message))
            self._report(ChildFault(ROLE_WORKER, self.rank, self.group.epoch, message, peer_lost))
            self.kill()

    def lose_peer(self) -> None:
        """A rank that it adds up with is gone."""
        if self.waits_for_others and self.stopped_at is None:
            self.fail("a peer is lost", peer_lost=True)

    def kill(self) -> None:
        """See `Process`."""
        if self.is_alive:
            super().kill()
            self.wire.dealer_died()
            self.group.died(self)
            self.on_exit(self)
