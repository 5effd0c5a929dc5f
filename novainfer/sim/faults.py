"""Faults as a list of plain events drawn from the seed: what is in the list happens, and nothing else.

A run that goes wrong is made small by leaving faults out (`shrink`); what random numbers a fault needs were drawn when
it was made, so that the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from novainfer.sim.cluster import Cluster
from novainfer.sim.ranks import SimRank
from novainfer.sim.scenario import Scenario
from novainfer.sim.supervisor import SimSupervisor
from novainfer.sim.wires import FOREVER, Lane, Wire
from novainfer.sim.world import Process, World

_ZOMBIE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One event. target: of a process or wire 'gateway', 'rank' or 'scheduler', with its number in `index`.

    amount: messages, a factor, an output index, or 1 for the way down of a wire, as the kind has it.
    """

    time: float
    kind: str
    target: str
    index: int = 0
    duration: float = 0.0
    amount: int = 0

    def __str__(self) -> str:
        until = "for ever" if self.duration == FOREVER else f"for {self.duration:.3f} s"
        return f"{self.time:8.3f} s  {self.kind} {self.target} {self.index} ({self.amount}) {until}"


# kind -> (target, weight). Of wires: even amounts act on the way up, odd ones on the way down.
_KINDS: tuple[tuple[str, str, int], ...] = (
    ("kill", "rank", 4),
    ("kill", "scheduler", 5),
    ("kill", "gateway", 3),
    ("stop", "rank", 3),
    ("stop", "scheduler", 2),
    ("stop", "gateway", 2),
    ("slow", "rank", 1),
    ("slow", "scheduler", 1),
    ("zombie", "rank", 2),
    ("load fault", "group", 1),
    ("drop", "gateway wire", 4),
    ("duplicate", "gateway wire", 3),
    ("reorder", "gateway wire", 3),
    ("delay", "gateway wire", 2),
    ("clog", "gateway wire", 3),
    ("cut", "gateway wire", 3),
    ("reset", "gateway wire", 3),
    ("drop", "rank wire", 2),
    ("delay", "rank wire", 1),
    ("clog", "rank wire", 2),
    ("reset", "rank wire", 2),
    ("clog", "orders wire", 1),
    ("swizzle", "wires", 2),
    ("not finite", "request", 2),
    ("poison", "request", 2),
)


def make_faults(world: World, scenario: Scenario, *, until: float, is_liveness: bool) -> list[Fault]:
    """Draw the faults of a world's seed; those of times lie in 0.35 s to `until`."""
    rng = world.rng("faults")
    if scenario.num_gateways > 1:
        special = rng.random()
        if special < 0.15:
            return _lone_gateway(rng, scenario, until)
        if special < 0.25:  # schedulers die, and nothing else is wrong
            times = sorted(rng.uniform(0.35, 1.5) for _ in range(rng.choice((1, 1, 2))))
            return [Fault(time, "kill", "scheduler", 0, 0.0, rng.randrange(2)) for time in times]
    kinds = [kind for kind in _KINDS if rng.random() < 0.6] or list(_KINDS)  # some worlds know only a few
    count = rng.choice((0, 1, 1, 2, 3, 5, 8, 16))
    weights = [weight for _, _, weight in kinds]
    faults: list[Fault] = []
    for kind, target, _ in rng.choices(kinds, weights, k=count):
        faults += _draw(rng, kind, target, scenario, until)
    if is_liveness and scenario.num_gateways > 1 and rng.random() < 0.25:
        kind = rng.choice(("cut", "clog"))
        faults.append(Fault(rng.uniform(0.35, until), kind, "gateway wire", 0, FOREVER, rng.randrange(2)))
    return sorted(faults, key=lambda fault: fault.time)


def _lone_gateway(rng: Random, scenario: Scenario, until: float) -> list[Fault]:
    """One gateway dies, and its clients must get on elsewhere, though the others' wires lose a packet."""
    killed = rng.randrange(scenario.num_gateways)
    others = [index for index in range(scenario.num_gateways) if index != killed]
    time = rng.uniform(0.35, min(until, 1.5))
    faults = [Fault(time, "kill", "gateway", killed, rng.choice((0.02, 0.6)))]
    for _ in range(rng.choice((0, 1, 3))):
        kind, amount = rng.choice(("drop", "drop", "duplicate", "reorder")), 2 + rng.randrange(2)
        faults.append(Fault(time + rng.random(), kind, "gateway wire", rng.choice(others), 0.0, amount))
    return sorted(faults, key=lambda fault: fault.time)


def _draw(rng: Random, kind: str, target: str, scenario: Scenario, until: float) -> list[Fault]:
    time = 0.35 + (until - 0.35) * rng.random() ** 2  # more of them while there is work
    short, long = rng.choice((0.02, 0.2, 0.6)), rng.choice((0.5, 1.5, 4.0))
    if kind == "swizzle":
        return _swizzle(rng, scenario, time)
    if target == "request":
        return [Fault(time, kind, target, rng.randrange(len(scenario.requests)), 0.0, rng.randrange(8))]
    sizes = {"gateway": scenario.num_gateways, "rank": scenario.group.world_size}
    index = rng.randrange(sizes.get(target.split()[0], 1))
    if kind in ("drop", "duplicate", "reorder"):
        return [Fault(time, kind, target, index, 0.0, 2 * rng.randint(1, 4) + rng.randrange(2))]
    duration = {"stop": rng.choice((short, long)), "slow": long, "kill": short, "reset": rng.choice((0.0, short))}
    return [Fault(time, kind, target, index, duration.get(kind, rng.choice((short, long))), rng.randrange(8))]


def _swizzle(rng: Random, scenario: Scenario, time: float) -> list[Fault]:
    """Clog some wires one by one, and free them in another order (FoundationDB's swizzle-clogging)."""
    wires = [("gateway wire", i, way) for i in range(scenario.num_gateways) for way in (0, 1)]
    wires += [("rank wire", i, way) for i in range(scenario.group.world_size) for way in (0, 1)]
    chosen = rng.sample(wires, rng.randint(1, len(wires)))
    begins = sorted(time + rng.random() for _ in chosen)
    return [
        Fault(begin, "clog", target, index, time + 1.0 + rng.random() - begin, way)
        for begin, (target, index, way) in zip(begins, chosen, strict=True)
    ]


class Injector:
    """Makes faults happen."""

    def __init__(self, world: World, cluster: Cluster, supervisor: SimSupervisor) -> None:
        self._world = world
        self._cluster = cluster
        self._supervisor = supervisor
        self._is_over = False

    def plan(self, faults: list[Fault]) -> None:
        """Curses act from the start; the others when it is their time."""
        for fault in faults:
            if fault.target == "request":
                self._curse(fault)
            else:
                self._world.at(fault.time, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def heal(self) -> None:
        """No more faults; what is stopped, slow or clogged is so no longer, unless it was to be so for ever."""
        self._is_over = True
        cluster = self._cluster
        processes: list[Process] = [*cluster.gateways, *(cluster.group.ranks if cluster.group else [])]
        if cluster.scheduler is not None:
            processes.append(cluster.scheduler)
        for process in processes:
            process.slowness = 1.0
            process.resume()
        for wire in (cluster.orders, *cluster.gateway_wires.values(), *cluster.rank_wires.values()):
            for lane in (wire.up, wire.down):
                _heal_lane(lane, self._world.now)

    def _curse(self, fault: Fault) -> None:
        params = self._cluster.scenario.requests[fault.index].message.params
        at = (fault.amount % params.n, fault.amount % params.max_tokens)
        curses = self._cluster.curses
        (curses.not_finite if fault.kind == "not finite" else curses.poison)[params.seed or 0] = at

    def _strike(self, fault: Fault) -> None:
        if self._is_over or self._supervisor.gave_up:
            return
        self._world.note(f"fault: {fault.kind} {fault.target} {fault.index}")
        if fault.target.endswith("wire"):
            for wire in self._wires(fault):
                _strike_wire(wire, fault, self._world.now)
        elif fault.kind == "load fault":
            self._cluster.load_faults += 1
        elif fault.kind == "kill" and fault.target == "gateway":
            self._supervisor.kill_gateway(fault.index, replaced_after=fault.duration)
        elif fault.kind == "kill" and fault.target == "scheduler":
            self._cluster.keeps_last_words = bool(fault.amount % 2)
            self._supervisor.kill_scheduler()
        else:
            for process in self._processes(fault):
                self._strike_process(process, fault)

    def _strike_process(self, process: Process, fault: Fault) -> None:
        world = self._world
        if fault.kind == "kill":
            process.kill()
        elif fault.kind == "slow":
            process.slowness = float(2 + fault.amount)
            world.after(fault.duration, lambda: _set_pace(process))
        else:
            process.stop()
            if fault.kind == "zombie" and isinstance(process, SimRank):
                process.is_zombie = True
                world.after(fault.duration + _ZOMBIE_SECONDS, process.kill)
            world.after(fault.duration, process.resume)

    def _processes(self, fault: Fault) -> list[Process]:
        cluster = self._cluster
        if fault.target == "gateway":
            return [cluster.gateways[fault.index]]
        if fault.target == "scheduler":
            return [cluster.scheduler] if cluster.scheduler is not None else []
        return [cluster.group.ranks[fault.index]] if cluster.group is not None else []

    def _wires(self, fault: Fault) -> list[Wire]:
        cluster = self._cluster
        if fault.target == "orders wire":
            return [cluster.orders]
        if fault.target == "gateway wire":
            return [cluster.gateways[fault.index].wire]
        return [cluster.group.ranks[fault.index].wire] if cluster.group is not None else []


def _set_pace(process: Process) -> None:
    process.slowness = 1.0


def _strike_wire(wire: Wire, fault: Fault, now: float) -> None:
    lane = wire.down if fault.amount % 2 else wire.up
    if fault.target == "orders wire":
        lane = wire.up
    actions: dict[str, Callable[[], None]] = {
        "drop": lambda: setattr(lane, "drops", fault.amount // 2),
        "duplicate": lambda: setattr(lane, "duplicates", fault.amount // 2),
        "reorder": lambda: setattr(lane, "reorders", fault.amount // 2),
        "clog": lambda: setattr(lane, "clogged_until", max(lane.clogged_until, now + fault.duration)),
        "cut": lambda: setattr(lane, "cut_until", max(lane.cut_until, now + fault.duration)),
        "delay": lambda: _delay(lane, now + fault.duration, 0.05 * (1 + fault.amount)),
        "reset": lambda: wire.reset(now + fault.duration),
    }
    actions[fault.kind]()


def _delay(lane: Lane, until: float, seconds: float) -> None:
    lane.delayed_until, lane.extra_delay = until, seconds


def _heal_lane(lane: Lane, now: float) -> None:
    lane.drops = lane.duplicates = lane.reorders = 0
    lane.delayed_until = min(lane.delayed_until, now)
    if lane.cut_until < FOREVER:
        lane.cut_until = min(lane.cut_until, now)
