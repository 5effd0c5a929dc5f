"""When a process that still exists counts as dead: pure rules over what its pulses told. No clock, no signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from novainfer.config import ServerConfig
from novainfer.entrypoints.children import ChildState, ChildTable, Phase
from novainfer.protocol.supervision import (
    ROLE_GATEWAY,
    ROLE_REPLICA,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    GatewayPulse,
    RankPulse,
    SchedulerPulse,
)

Pulse = RankPulse | SchedulerPulse | GatewayPulse
STOPPED_TIMEOUT = 1.0  # seconds of silence that are enough of a process that the system says is stopped


def heard(child: ChildState, now: float) -> None:
    """It lives, and has just got somewhere."""
    child.heard_at = child.moved_at = child.worked_at = now


def felt(rank: ChildState, pulse: RankPulse, now: float) -> None:
    """A rank lives, and may have got on."""
    if pulse.num_blocks and rank.phase < Phase.READY:  # what it said of it was lost
        rank.phase, rank.num_blocks, rank.fingerprint = Phase.READY, pulse.num_blocks, pulse.fingerprint
        heard(rank, now)
    rank.heard_at = now
    if not pulse.is_busy or pulse.progress != rank.progress:
        rank.moved_at = now
    if pulse.is_busy or pulse.progress != rank.progress:
        rank.worked_at = now
    rank.is_busy, rank.progress = pulse.is_busy, pulse.progress


def felt_scheduler(scheduler: ChildState, pulse: SchedulerPulse, now: float) -> None:
    """A scheduler lives; what it waits for is not its fault."""
    scheduler.heard_at = scheduler.moved_at = now
    if not pulse.waits or pulse.num_steps != scheduler.progress:
        scheduler.worked_at = now
    scheduler.progress = pulse.num_steps


def take_pulse(table: ChildTable, pulse: Pulse, now: float) -> ChildState | None:
    """Whom a pulse comes from, who is as it tells now; None if it has been replaced. Raises KeyError for a stranger."""
    child: ChildState | None
    if isinstance(pulse, RankPulse):
        if (child := table.find(ROLE_WORKER, pulse.rank, pulse.epoch)) is not None:
            felt(child, pulse, now)
    elif isinstance(pulse, SchedulerPulse):
        if (child := table.find(ROLE_SCHEDULER, pulse.replica, pulse.epoch)) is not None:
            felt_scheduler(child, pulse, now)
    elif (child := table.find(ROLE_GATEWAY, pulse.index, pulse.epoch)) is not None:
        heard(child, now)
    return child


def forgive(children: Sequence[ChildState], now: float) -> None:
    """Nobody listened for a while (this process was stopped, the machine slept): nobody is to blame for it."""
    for child in children:
        if child.heard_at is not None:
            heard(child, now)
        elif child.spawned_at is not None:
            child.spawned_at = now


def hang(
    children: Sequence[ChildState], config: ServerConfig, now: float, *, is_stopped: Callable[[ChildState], bool]
) -> tuple[ChildState, str] | None:
    """The first of these processes (of one role) that hangs, and why. `is_stopped`: asked of one that is silent."""
    for child in children:
        since = child.heard_at if child.heard_at is not None else child.spawned_at
        if since is None or child.phase == Phase.EXITED:
            continue
        # Before the first word Python imports; while a rank loads, one call may keep the whole process from running.
        is_loading = child.heard_at is None or (child.role == ROLE_WORKER and child.phase < Phase.READY)
        # A gateway's loop shares the interpreter with the threads that tokenise, and its death costs connections; a
        # replica's supervisor may wait for ranks to die.
        is_slow = is_loading or child.role in (ROLE_GATEWAY, ROLE_REPLICA)
        patience = config.stall_timeout if is_slow else config.hang_timeout
        silence = now - since
        if silence > patience or (silence > STOPPED_TIMEOUT and is_stopped(child)):
            return child, f"{child.name} hangs: silent for {silence:.1f} s"
        if child.is_busy and not is_loading:
            # All ranks get the same plans. A step that one has got and another not, from a dying scheduler, never ends.
            is_alone = any(not other.is_busy for other in children)
            still = now - child.moved_at
            if still > (config.hang_timeout if is_alone else config.stall_timeout):
                return child, f"{child.name} hangs: no progress for {still:.1f} s"
    return None


def standstill(ranks: Sequence[ChildState], scheduler: ChildState, config: ServerConfig, now: float) -> str | None:
    """Why the worker group cannot go on, if its ranks and the scheduler wait for each other; all of them live.

    A link that was cut shows at its ends; one that has only fallen silent, or lost its reader, does not.
    """
    if scheduler.phase not in (Phase.STARTED, Phase.READY) or any(rank.phase != Phase.READY for rank in ranks):
        return None
    if scheduler.heard_at is None:  # it has just been started, and has not told whether it waits
        return None
    still = min(now - child.worked_at for child in (scheduler, *ranks))
    if still <= config.hang_timeout:
        return None
    return f"the scheduler and its idle ranks wait for each other: {still:.1f} s"


class Watch:
    """Looks again and again, and counts silence only while it does so itself."""

    def __init__(self, config: ServerConfig, is_stopped: Callable[[ChildState], bool]) -> None:
        self._config = config
        self._is_stopped = is_stopped
        self._away = min(STOPPED_TIMEOUT, config.hang_timeout) / 2
        self._last_look = float("inf")

    def look(self, children: Sequence[ChildState], now: float) -> list[tuple[ChildState, str]]:
        """The first process of each role that hangs, and every gateway that does, and why.

        After a time without a look nobody hangs: if the whole server was stopped, the others may wake up after us.
        """
        away, self._last_look = now - self._last_look, now
        if away > self._away:
            forgive(children, now)
        ranks, schedulers = ([child for child in children if child.role == r] for r in (ROLE_WORKER, ROLE_SCHEDULER))
        groups = [ranks, schedulers, *([child] for child in children if child.role == ROLE_GATEWAY)]
        found = [hang(group, self._config, now, is_stopped=self._is_stopped) for group in groups]
        if found[0] is None and found[1] is None:
            words = standstill(ranks, schedulers[0], self._config, now)
            found[0] = (ranks[0], words) if words is not None else None
        return [hung for hung in found if hung is not None]
