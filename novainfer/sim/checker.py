"""What must hold in the scheduler process after its turns, and when nothing is left to do. Looks into private state."""

from __future__ import annotations

from novainfer.engine.replica import Replica
from novainfer.protocol.step import StepPlan
from novainfer.scheduler.scheduler import Scheduler
from novainfer.sim.cluster import Cluster
from novainfer.sim.faults import Fault
from novainfer.sim.scheduler import SimScheduler
from novainfer.sim.supervisor import SimSupervisor
from novainfer.sim.world import Violation

_TURNS_PER_CHECK = 5
_UNCOUNTED_PACKETS = 80  # beats that a gateway may get beyond its credit before it counts as gone
_UNWANTED_SECONDS = 0.15
_FAR_FROM_GATEWAYS = ("rank", "group", "request", "rank wire", "orders wire")
_FAR_FROM_RANKS = ("gateway", "gateway wire", "scheduler", "orders wire")


class Checker:
    """Watches one world."""

    def __init__(self, cluster: Cluster, supervisor: SimSupervisor, faults: list[Fault]) -> None:
        self._cluster = cluster
        self._are_gateways_heard = all(
            f.target in _FAR_FROM_GATEWAYS or (f.kind, f.target) == ("kill", "scheduler") for f in faults
        )
        # Of several ranks, some may have got the last plan of a scheduler that died, and others not.
        self._are_ranks_untouched = all(
            (f.target in _FAR_FROM_RANKS or f.kind == "not finite")
            and (f.target != "scheduler" or cluster.scenario.group.world_size == 1)
            for f in faults
        )
        self._unwanted_since: dict[tuple[int, str, int], float] = {}
        self._supervisor = supervisor
        self._num_turns = 0
        self._last_epoch = 0
        cluster.watch = self.watch

    def watch(self, scheduler: SimScheduler) -> None:
        """Look at this scheduler process from now on."""
        scheduler.after_turn = self._after_turn
        scheduler.executor.watch = lambda plan: self._check_plan(plan)

    def _after_turn(self, scheduler: SimScheduler) -> None:
        replica = scheduler.replica
        if replica._epoch < self._last_epoch:
            raise Violation(f"epoch {replica._epoch} follows {self._last_epoch}")
        self._last_epoch = replica._epoch
        self._num_turns += 1
        if self._num_turns % _TURNS_PER_CHECK == 0 and replica.engine is not None:
            check_replica(replica)
            self._check_credit(replica)
            if self._are_ranks_untouched and self._supervisor.num_groups_lost:
                raise Violation("a worker group was replaced, and nothing was wrong with it")
            if self._are_gateways_heard:
                self._check_wanted(replica)
            check_scheduler(replica.engine.scheduler, self._cluster.scenario.config.scheduler.steps_in_flight)

    def _check_plan(self, plan: StepPlan) -> None:
        config = self._cluster.scenario.config.scheduler
        most = config.max_num_batched_tokens or 0  # every scenario says it
        if sum(plan.num_new_tokens) > most or min(plan.num_new_tokens) < 1:
            raise Violation(f"step {plan.step} computes {plan.num_new_tokens} tokens")
        if len(dict.fromkeys(plan.rows)) != len(plan.rows) or max(plan.rows) >= config.max_num_seqs:
            raise Violation(f"step {plan.step} runs rows {plan.rows}")
        if not set(plan.indexed).isdisjoint(plan.unindexed):
            raise Violation(f"step {plan.step}: a block both enters and leaves the index")

    def _check_credit(self, replica: Replica) -> None:
        for link in replica._gateways.values():
            ahead = link._num_sent - link._num_acknowledged - self._cluster.scenario.window
            # One that hears nothing, but is heard, gets beats as long as it lives.
            if ahead > _UNCOUNTED_PACKETS and not self._cluster.is_deaf(link.gateway_id):
                raise Violation(f"{link.gateway_id}: {ahead} packets are ahead of its credit")

    def _check_wanted(self, replica: Replica) -> None:
        """Nothing is computed for long that its gateway has ended."""
        unwanted, since = self._unwanted_since, {}
        now = self._cluster.world.now
        for request_id, identity in replica._owner.items():
            entry = self._cluster.gateways[int(identity.split(b"-")[1])].session._journal.get(request_id)
            sequences = replica.engine.scheduler.requests[request_id].sequences if replica.engine is not None else []
            for sequence in sequences:
                if not sequence.finished and (entry is None or entry.finish_reasons[sequence.choice] is not None):
                    key = replica._epoch, request_id, sequence.choice  # a new scheduler is told anew
                    since[key] = unwanted.get(key, now)
                    if now - since[key] > _UNWANTED_SECONDS:
                        raise Violation(f"{request_id}/{sequence.choice} is computed, and its gateway has ended it")
        self._unwanted_since = since

    def leftovers(self) -> str:
        """What is not as it was before the first request, in words; '' if nothing."""
        scheduler = self._cluster.scheduler
        for gateway in self._cluster.gateways:
            if gateway.is_alive and (gateway.session.num_live or gateway.session._sinks):
                return f"{gateway.name} has live requests"
        if scheduler is None or scheduler.replica.engine is None or not self._supervisor.all_ready:
            return "the engine is not ready"
        replica = scheduler.replica
        state = replica.engine.scheduler if replica.engine is not None else None
        if state is None or not replica._has_workers:
            return "the scheduler has no workers"
        isolation = state._isolation
        counts = {
            "requests": len(state.requests),
            "owners": len(replica._owner),
            "orphans": len(replica._orphans),
            "waiting sequences": len(state.waiting),
            "running sequences": len(state.running),
            "watched sequences": len(state.waiting.waits._watched),
            "live sequences": state._num_live,
            "steps in flight": state.num_in_flight,
            "suspects": len(isolation._suspects),
            "records of deaths": len(isolation._records),
            "used blocks": state.kv.pool.num_blocks - state.kv.pool.num_free,
            "used rows": state._rows.num_rows - state._rows.num_free,
        }
        left = [f"{count} {name}" for name, count in counts.items() if count]
        return ", ".join(left)


def check_replica(replica: Replica) -> None:
    """Every live request belongs to exactly one gateway, or waits for one."""
    requests = replica.engine.scheduler.requests if replica.engine is not None else {}
    orphans = replica._orphans._entries
    for request_id, identity in replica._owner.items():
        if request_id not in requests or identity not in replica._gateways:
            raise Violation(f"{request_id} has an owner but is not live, or its gateway is not known")
        if request_id in orphans:
            raise Violation(f"{request_id} has a gateway and is an orphan")
    for request_id in requests:
        if request_id not in replica._owner and request_id not in orphans:
            raise Violation(f"{request_id} runs for nobody")


def check_scheduler(scheduler: Scheduler, steps_in_flight: int) -> None:
    """Blocks, rows and queues add up."""
    pool = scheduler.kv.pool
    owners = [0] * pool.num_blocks
    num_live = num_held_back = num_running = 0
    for request in scheduler.requests.values():
        for sequence in request.sequences:
            for block in sequence.table.blocks:
                owners[block] += 1
            if sequence.finished:
                if sequence.table.blocks:
                    raise Violation(f"{request.request_id}/{sequence.choice} has ended and keeps blocks")
                continue
            num_live += 1
            places = sequence.is_running, sequence in scheduler.waiting, sequence in request.followers
            if sum(places) != 1:
                raise Violation(f"{request.request_id}/{sequence.choice} is in {sum(places)} queues")
            num_running += places[0]
            num_held_back += places[2]
            if scheduler._rows.cohort.num_computed(sequence) > len(sequence.table.blocks) * scheduler.kv.block_size:
                raise Violation(f"{request.request_id}/{sequence.choice} computes behind its blocks")
    if owners != pool._refs:
        raise Violation(f"references {pool._refs} of blocks owned {owners} times")
    if pool.num_free != owners.count(0):
        raise Violation(f"{pool.num_free} blocks are free, {owners.count(0)} have no owner")
    if num_live != scheduler._num_live or num_running != len(scheduler.running):
        raise Violation(f"{num_live} live and {num_running} running sequences were counted wrongly")
    if num_live != num_running + num_held_back + len(scheduler.waiting):
        raise Violation("a sequence waits that is of no live request")
    rows = sorted([*scheduler._rows._free, *(sequence.row for sequence in scheduler.running)])
    if rows != list(range(scheduler._rows.num_rows)):
        raise Violation(f"rows {rows} are free or taken")
    ages = [sequence.age for sequence in scheduler.running]
    if ages != sorted(ages):
        raise Violation("running sequences are not in order of age")
    cohort = scheduler._rows.cohort
    if sorted([*cohort._members, *cohort.others], key=lambda sequence: sequence.age) != scheduler.running:
        raise Violation("not every running sequence is a member of the cohort or one of the others")
    if scheduler.num_in_flight > steps_in_flight:
        raise Violation(f"{scheduler.num_in_flight} steps are in flight")
    if any(sequence.finished for sequence in scheduler._isolation._suspects):
        raise Violation("a request that has ended is suspected")
