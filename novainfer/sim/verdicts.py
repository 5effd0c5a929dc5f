"""What clients may see at all: an error needs a cause that was really there."""

from __future__ import annotations

from collections import Counter

from novainfer.engine.restarts import DELAYS
from novainfer.sim.cluster import Cluster
from novainfer.sim.faults import Fault
from novainfer.sim.gateways import SimGateway
from novainfer.sim.scenario import RequestSpec
from novainfer.sim.supervisor import SimSupervisor
from novainfer.sim.wires import FOREVER
from novainfer.sim.world import Violation

GONE = "The engine is gone for good."
_NOT_FINITE = "The model's output was not finite."
_LATE = "The request's time limit passed"
_LOST = "The engine cannot be reached."
_SMALL_LOSSES = ("drop", "duplicate", "reorder", "delay")
_EPSILON = 1e-6  # seconds
_CONVICTS = 4  # see `Verdicts._weight`
_LATE_SECONDS = 1.5  # for a word to get through a narrow window, to a slow reader


class Verdicts:
    """Shared by all clients of a world. `num_open`: those without an outcome."""

    def __init__(self, cluster: Cluster, supervisor: SimSupervisor, faults: list[Fault]) -> None:
        self.num_open = len(cluster.scenario.requests)
        self.errors: Counter[str] = Counter()
        self._cluster = cluster
        self._supervisor = supervisor
        self._is_quiet = not faults
        killed = [fault.index for fault in faults if (fault.kind, fault.target) == ("kill", "gateway")]
        others = [fault for fault in faults if (fault.kind, fault.target) != ("kill", "gateway")]
        # One gateway dies, and the others' wires lose a message at most: one lost claim costs its client half the grace
        # time (`SimClient._patience`), two the whole of it.
        self._claims_must_work = (
            len(killed) == 1
            and all(f.target == "gateway wire" and f.kind in _SMALL_LOSSES and f.index != killed[0] for f in others)
            and sum(fault.kind != "duplicate" for fault in others) <= 1
        )
        self._cut_off = [f.index for f in faults if f.target == "gateway wire" and f.duration == FOREVER]
        # Of a death in which a rank says that it failed, which looks like the fault of what ran, two are enough for an
        # innocent request to be given up, if it runs alone at the second; of those from outside, it takes four.
        self._weight = self._num_blows = 0
        for fault in faults:
            if "rank" in fault.target or fault.target in ("scheduler", "group", "wires", "orders wire"):
                self._num_blows += 1
                self._weight += 2 if fault.target == "rank wire" and fault.kind in ("drop", "reset") else 1
            self._weight += 2 * (fault.kind == "poison")
        # A scheduler that cannot hear an order works on in the old epoch, and counts as hanging; so may its successors.
        hang_timeout = cluster.scenario.config.server.hang_timeout
        num_deaf = sum(int(fault.duration / hang_timeout) for fault in faults if fault.target == "orders wire")
        self._num_blows += num_deaf
        self._num_breaks = num_deaf + sum(fault.target == "scheduler" for fault in faults)
        self._num_poisons = sum(fault.kind == "poison" for fault in faults)

    @property
    def may_give_up(self) -> bool:
        """There were so many blows that nothing could work between one death and the next.

        A poison counts twice, and twice more for each scheduler that may have died with what it knew of it.
        """
        return self._num_blows + 2 * self._num_poisons * (1 + self._num_breaks) > len(DELAYS)

    def refused(self, name: str, words: str, *, has_tokens: bool) -> None:
        """A client was told to come later."""
        if has_tokens:
            raise Violation(f"{name}: it was refused after it had got tokens")
        if not self._cluster.scenario.may_refuse:
            raise Violation(f"{name}: refused with room for all: {words}")
        self.errors["refused"] += 1

    def failed(self, spec: RequestSpec, words: str, age: float, gateway: SimGateway | None) -> None:
        """A client's request has ended with an error, `age` seconds after it was accepted."""
        message, curses = spec.message, self._cluster.curses
        seed = message.params.seed or 0
        if words == _NOT_FINITE:
            is_right = seed in curses.not_finite
        elif "quarantined" in words:
            is_right = seed in curses.poison or self._weight >= _CONVICTS
        elif words.startswith(_LATE):
            is_right = 0 < message.deadline <= age + _EPSILON
        else:
            is_gone = self._supervisor.gave_up and self.may_give_up
            is_cut_off = gateway is not None and gateway.index in self._cut_off
            # A gateway that stood still while the supervisor gave up finds nobody at the other end.
            is_right = (words == GONE and is_gone) or (words == _LOST and (is_cut_off or is_gone))
        if not is_right:
            raise Violation(f"{message.request_id}: an error without a cause: {words}")
        self.errors[words] += 1

    def done(self, spec: RequestSpec, age: float) -> None:
        """A client has got everything, `age` seconds after its request was accepted."""
        deadline = spec.message.deadline
        if self._is_quiet and 0 < deadline < age - _LATE_SECONDS:
            raise Violation(f"{spec.message.request_id}: done after {age:.1f} s, with a deadline of {deadline:.1f} s")

    def unclaimed(self, spec: RequestSpec) -> None:
        """A client asked for its stream in time, and nobody had it."""
        scenario = self._cluster.scenario
        has_time = scenario.config.server.orphan_grace >= 2.0 and scenario.num_gateways > 1 and not scenario.may_refuse
        if self._claims_must_work and has_time:
            raise Violation(f"{spec.message.request_id}: its stream cannot be claimed, and nothing else was wrong")
        self.errors["unclaimed"] += 1
