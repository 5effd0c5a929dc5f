"""The supervisor as a model: who is replaced when, in which epoch, after which delay; see `entrypoints/supervisor.py`.

Modelled, not the real one, which is made of processes and signals; but how often it restarts is the real `Restarts`.
"""

from __future__ import annotations

from novainfer.engine.restarts import STABLE_SECONDS, Restarts
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    ChildFault,
    ChildReady,
    SchedulerPulse,
    WorkersFault,
    WorkersLost,
)
from novainfer.sim.cluster import Cluster
from novainfer.sim.ranks import SimRank
from novainfer.sim.world import World

_TICK = 0.25  # seconds between two looks at who is silent
_LAST_WORD_PATIENCE = 0.2
_SEES_DEATH_AFTER = 0.005


class SimSupervisor:
    """Starts everything, and replaces what dies or hangs."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world = world
        self.epoch = FIRST_EPOCH
        self.gave_up = False
        self.num_groups_lost = 0
        self._cluster = cluster
        self._scenario = cluster.scenario
        self._restarts = Restarts(self._scenario.config.server.max_restarts, STABLE_SECONDS)
        self._group_epoch = self._scheduler_epoch = FIRST_EPOCH
        self._faults: dict[int, bool] = {}  # rank of this group that said why it fails -> a peer was lost
        self._ready_ranks: dict[int, None] = {}
        self._is_scheduler_ready = False
        self._scheduler_heard_at: float | None = None
        self._is_recovering = False
        cluster.report = self.take
        cluster.rank_exited = lambda rank: self.world.after(_SEES_DEATH_AFTER, lambda: self._rank_died(rank))

    def start(self) -> None:
        """Everything, as at the start of a server."""
        self._cluster.start_group(self._group_epoch)
        self._boot_scheduler()
        for index in range(self._scenario.num_gateways):
            self._cluster.start_gateway(index)
        self._tick()

    @property
    def all_ready(self) -> bool:
        """Nothing is being replaced."""
        return self._is_scheduler_ready and len(self._ready_ranks) == self._scenario.group.world_size

    def take(self, report: object) -> None:
        """What a process says."""
        if isinstance(report, ChildReady):
            if report.role == ROLE_WORKER and report.epoch == self._group_epoch:
                self._ready_ranks[report.index] = None
            elif report.role == ROLE_SCHEDULER and report.epoch == self._scheduler_epoch:
                self._is_scheduler_ready = True
                self._scheduler_heard_at = self.world.now
            if self._is_recovering and self.all_ready:
                self._is_recovering = False
                self._restarts.serves(self.world.now)
        elif isinstance(report, ChildFault):
            if report.epoch == self._group_epoch:
                self._faults[report.index] = report.peer_lost
                self._lose_workers()
        elif isinstance(report, WorkersFault):
            if report.epoch == self._scheduler_epoch:
                self._lose_workers_soon(report.message)
        elif isinstance(report, SchedulerPulse) and report.epoch == self._scheduler_epoch:
            self._scheduler_heard_at = self.world.now
            if report.num_steps:
                self._restarts.step_ended()

    # -- deaths -------------------------------------------------------------------------------------------------

    def kill_scheduler(self) -> None:
        """A fault: it is gone, and we see that a little later."""
        dead = self._cluster.scheduler
        if dead is not None:
            self._cluster.end_scheduler()
            self.world.after(_SEES_DEATH_AFTER, self._lose_scheduler)

    def kill_gateway(self, index: int, *, replaced_after: float) -> None:
        """A fault."""
        gateway = self._cluster.gateways[index]
        if gateway.is_alive:
            gateway.kill()
            self.world.after(replaced_after, lambda: self._cluster.start_gateway(index))

    def _rank_died(self, rank: SimRank) -> None:
        if rank.group.epoch == self._group_epoch:
            self._lose_workers()

    # -- hangs --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.gave_up:
            return
        self.world.after(_TICK, self._tick)
        now, server = self.world.now, self._scenario.config.server
        group, scheduler = self._cluster.group, self._cluster.scheduler
        if group is not None and group.epoch == self._group_epoch:
            alive = [rank for rank in group.ranks if rank.is_alive]
            for rank in alive:
                patience = server.stall_timeout if rank.is_loading else server.hang_timeout
                is_alone = any(not other.is_busy for other in alive)
                still = server.hang_timeout if is_alone else server.stall_timeout
                if now - rank.heard_at > patience or (rank.is_busy and now - rank.moved_at > still):
                    self.world.note(f"{rank.name} hangs")
                    self._lose_workers_soon("")
                    break
        heard_at = self._scheduler_heard_at
        if scheduler is not None and heard_at is not None and now - heard_at > server.hang_timeout:
            self.world.note(f"{scheduler.name} hangs")
            self._cluster.end_scheduler()
            self._lose_scheduler()

    # -- replacing ----------------------------------------------------------------------------------------------

    def _lose_workers_soon(self, words: str) -> None:
        epoch = self.epoch
        if self._faults:
            self._lose_workers()
        else:  # perhaps a rank says why
            self.world.after(_LAST_WORD_PATIENCE, lambda: self._lose_workers() if self.epoch == epoch else None)

    def _lose_workers(self) -> None:
        faulted = any(not peer_lost for peer_lost in self._faults.values())
        group = self._cluster.group
        if group is not None and group.epoch == self._group_epoch:
            for rank in group.ranks:
                if not rank.is_zombie:
                    rank.kill()
        delay = self._begin_recovery()
        if delay is None:
            return
        self.num_groups_lost += 1
        self._faults, self._ready_ranks = {}, {}
        self._group_epoch = self._scheduler_epoch = epoch = self.epoch
        self._is_scheduler_ready = False
        self.world.note(f"order: workers lost, epoch {epoch}{', faulted' if faulted else ''}")
        self._cluster.orders.send_up(WorkersLost(epoch, faulted))
        self.world.after(delay + self._scenario.boot_seconds, lambda: self._start_group(epoch))

    def _start_group(self, epoch: int) -> None:
        if epoch == self._group_epoch and not self.gave_up:
            self._cluster.start_group(epoch)

    def _lose_scheduler(self) -> None:
        delay = self._begin_recovery()
        if delay is not None:
            self._scheduler_epoch = self.epoch
            self._is_scheduler_ready, self._scheduler_heard_at = False, None
            self.world.after(delay, self._boot_scheduler)

    def _boot_scheduler(self) -> None:
        epoch, group = self.epoch, self._group_epoch
        self.world.after(self._scenario.boot_seconds, lambda: self._cluster.start_scheduler(epoch, group))

    def _begin_recovery(self) -> float | None:
        delay = None if self.gave_up else self._restarts.delay(self.world.now)
        if delay is None:
            self.world.note("given up")
            self.gave_up = True
            return None
        self.epoch += 1
        self._is_recovering = True
        return delay
