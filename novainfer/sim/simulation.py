"""One run of a simulated server from a seed, and how a run that goes wrong is made small.

safety: faults go on until all clients have an outcome, or time is over; nothing wrong may happen.
liveness: faults end at a time, but for one that may stay; then everything must come to its end within a bound.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from novainfer.engine.replica import GATEWAY_PATIENCE
from novainfer.engine.restarts import DELAYS
from novainfer.errors import EngineError
from novainfer.protocol.link import BEAT_SECONDS
from novainfer.sim.checker import Checker
from novainfer.sim.clients import SimClient
from novainfer.sim.cluster import Cluster
from novainfer.sim.faults import Fault, Injector, make_faults
from novainfer.sim.scenario import Scenario, make_scenario
from novainfer.sim.supervisor import SimSupervisor
from novainfer.sim.verdicts import GONE, Verdicts
from novainfer.sim.wires import FOREVER
from novainfer.sim.world import Violation, World

SAFETY, LIVENESS = "safety", "liveness"
MODES = (SAFETY, LIVENESS)
_FAULTS_UNTIL = {SAFETY: 12.0, LIVENESS: 4.0}
_SAFETY_HORIZON = 20.0
_MAX_EVENTS = 400_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. violation: None if nothing went wrong. seconds: of virtual time."""

    seed: int
    mode: str
    violation: str | None
    trace_hash: str
    num_events: int
    seconds: float
    faults: tuple[Fault, ...]
    lines: tuple[str, ...]
    ends: tuple[str, ...]


def simulate(
    seed: int,
    mode: str = SAFETY,
    *,
    faults: Sequence[Fault] | None = None,
    max_events: int | None = None,
    keep_all: bool = False,
) -> Outcome:
    """Run the world of this seed.

    faults: in place of the seed's own.   max_events: stop there, whatever is left.   keep_all: of the trace's lines.
    """
    world = World(seed, keep_all=keep_all)
    scenario = make_scenario(world)
    if faults is None:
        faults = make_faults(world, scenario, until=_FAULTS_UNTIL[mode], is_liveness=mode == LIVENESS)
    run = _Run(world, scenario, list(faults))
    violation = None
    try:
        run.to_end(mode, max_events)
    except _Stopped:
        pass
    except Violation as error:
        violation = str(error)
    except Exception as error:  # in a real process: it dies, and takes its state along
        place = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
    return Outcome(
        seed=seed,
        mode=mode,
        violation=violation,
        trace_hash=world.trace_hash,
        num_events=world.num_events,
        seconds=world.now,
        faults=tuple(faults),
        lines=tuple(world.lines),
        ends=tuple(client.outcome or "open" for client in run.clients),
    )


def shrink(outcome: Outcome) -> Outcome:
    """The same run with as few faults as still break it (delta debugging)."""
    if outcome.violation is None:
        return outcome
    best, faults, size = outcome, list(outcome.faults), max(1, len(outcome.faults) // 2)
    while faults:
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            tried = simulate(outcome.seed, outcome.mode, faults=fewer)
            if tried.violation is not None:
                best, faults = tried, fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(faults)))
    return best


class _Stopped(Exception):
    """There were as many events as were asked for."""


class _Run:
    """The parts of one world."""

    def __init__(self, world: World, scenario: Scenario, faults: list[Fault]) -> None:
        self._world = world
        self._scenario = scenario
        self._faults = faults
        self._cluster = Cluster(world, scenario)
        self._supervisor = SimSupervisor(world, self._cluster)
        self._checker = Checker(self._cluster, self._supervisor, faults)
        self._verdicts = Verdicts(self._cluster, self._supervisor, faults)
        self._injector = Injector(world, self._cluster, self._supervisor)
        self._max_events: int | None = None
        self.clients: list[SimClient] = []

    def to_end(self, mode: str, max_events: int | None) -> None:
        """Raises `Violation`, and whatever the machines raise."""
        self._max_events = max_events
        self._supervisor.start()
        self.clients = [SimClient(self._world, self._cluster, spec, self._verdicts) for spec in self._scenario.requests]
        self._injector.plan(self._faults)
        until = _SAFETY_HORIZON if mode == SAFETY else _FAULTS_UNTIL[LIVENESS]
        self._let_run(until)
        if mode == SAFETY and self._verdicts.num_open:
            return
        self._injector.heal()
        bound = self._world.now + self._bound()
        self._let_run(bound)
        if self._verdicts.num_open:
            waiting = [c.spec.message.request_id for c in self.clients if c.outcome is None]
            raise Violation(f"not finished {self._bound():.0f} s after the last fault: {', '.join(waiting)}")
        bound = self._world.now + self._bound()
        while not self._supervisor.gave_up and (left := self._checker.leftovers()):
            if self._world.now > bound:
                raise Violation(f"left behind: {left}")
            self._step()

    def _let_run(self, until: float) -> None:
        """Until all clients have an outcome, or until that time."""
        while self._verdicts.num_open and self._world.now < until:
            self._step()

    def _step(self) -> None:
        if self._world.num_events == self._max_events:
            raise _Stopped
        if not self._world.step() or self._world.num_events > _MAX_EVENTS:
            raise Violation(f"{self._world.num_events} events, and no end")
        if self._supervisor.gave_up and self._verdicts.num_open:
            self._end_server()

    def _end_server(self) -> None:
        """As the supervisor's last signal to the gateways; those that cannot hear it are killed."""
        if not self._verdicts.may_give_up:
            raise Violation("the supervisor gave up for no reason")
        for gateway in self._cluster.gateways:
            if gateway.is_alive and gateway.stopped_at is None:
                gateway.session.fail_all(EngineError(GONE))
        for _ in range(200):
            self._world.step()
        for client in self.clients:
            client.give_up()

    def _bound(self) -> float:
        """Seconds in which everything must end when no more faults come.

        A hang is seen; then, at the worst, all restarts that are allowed in a row, for each poisoned request two; the
        last clog ends; a gateway that is cut off is given up on both sides; every token is computed four times; and of
        a link with a window of one packet, each request waits for some beats.
        """
        scenario, server = self._scenario, self._scenario.config.server
        deaths = len(DELAYS) + 2 * sum(fault.kind == "poison" for fault in self._faults)
        restart = server.stall_timeout + scenario.boot_seconds + scenario.group.load_seconds + 1.0
        tokens = sum(
            s.message.params.n * (s.message.params.max_tokens + len(s.message.prompt_token_ids))
            for s in scenario.requests
        )
        seconds = deaths * restart + sum(DELAYS) + 2 * max(DELAYS) * (deaths - len(DELAYS)) + 8.0
        seconds += 4 * tokens * (scenario.group.step_seconds * 1.5 + 4 * scenario.rank_latency)
        seconds += 8 * BEAT_SECONDS * len(scenario.requests)
        if any(fault.duration == FOREVER for fault in self._faults):
            seconds += scenario.lost_timeout + GATEWAY_PATIENCE
        return seconds + GATEWAY_PATIENCE + server.orphan_grace
