"""What the supervisor of several replicas knows of each, and what is to become of it. No process, no socket.

It writes `replicas.json`, by which the gateways go, and reads from their pulses when nobody needs a replica any more.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from novainfer.config import ServeConfig
from novainfer.engine.restarts import REPLICA_STABLE_SECONDS, SPARE_DELAYS, Restarts
from novainfer.entrypoints.children import ChildState, Phase
from novainfer.errors import ConfigError
from novainfer.protocol.supervision import FIRST_EPOCH, ROLE_REPLICA, GatewayPulse, ReplicaList
from novainfer.transport.addresses import RunDir, write_private
from novainfer.transport.replicas import DRAINING, IN, OUT, Replicas, remove_ray_files, replica_dir, write_replicas

logger = logging.getLogger(__name__)

STAY, LEAVE, RESTART = "stay", "leave", "restart"  # what becomes of a replica
_PAUSE = 1.0  # seconds until what could not be written is tried again


@dataclass(slots=True)
class Replica:
    """One replica. due: when its process is to be started.   is_late: it was added to a server that serves.

    serves: all of its processes are ready.   fate: what is to become of it.
    draining_since: the version of `replicas.json` that told the gateways so; 0 = it is not draining.
    """

    child: ChildState
    restarts: Restarts
    due: float | None
    is_late: bool = False
    serves: bool = False
    fate: str = STAY
    draining_since: int = 0
    num_deaths: int = 0  # since it last served
    is_told: bool = False  # to end
    is_out: bool = False  # it is dead, and its successor does not serve yet


@dataclass(slots=True)
class _Gateway:
    version: int = 0
    num_live: dict[int, int] = field(default_factory=dict)


class Roster:
    """The replicas of a server, by number."""

    def __init__(self, config: ServeConfig, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir
        self._replicas: dict[int, Replica] = {}
        self._next_number = 0
        self._version = 0
        self._written_version = 0  # less: a full disk, say; then gateways go by what they were told before
        self._write_at = float("inf")
        self._gateways: dict[int, _Gateway] = {}
        self._gateway_lost_at = float("-inf")
        self._to_restart: deque[int] = deque()
        self._has_served = False

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    def child(self, number: int) -> ChildState | None:
        """The process of a replica that is here."""
        replica = self._replicas.get(number)
        return None if replica is None else replica.child

    # -- who is here --------------------------------------------------------------------------------------------

    def add(self) -> Replica:
        """One more, to be started at once. Raises `ConfigError` if the gateways cannot be told."""
        number = self._next_number
        restarts = Restarts(None, REPLICA_STABLE_SECONDS, SPARE_DELAYS)  # as long as others serve it is tried again
        child = ChildState(ROLE_REPLICA, number, FIRST_EPOCH)
        replica = Replica(child, restarts, due=time.monotonic(), is_late=self._has_served)
        self._replicas[number] = replica
        self._publish()
        if (refusal := self._why_untold()) is not None:
            del self._replicas[number]
            raise ConfigError(refusal)
        self._next_number += 1
        return replica

    def take_due(self, now: float) -> list[Replica]:
        """Those whose process is to be started now."""
        due = [replica for replica in self if replica.due is not None and replica.due <= now]
        for replica in due:
            replica.due = None
        return due

    def furnish(self, replica: Replica) -> None:
        """Make the directory with what its process reads. Raises `OSError` or `ConfigError`, on a full disk say."""
        run_dir = RunDir.create(str(replica_dir(self._run_dir, replica.child.index).path))
        write_private(run_dir.config_file, self._own_config().to_json())

    def _own_config(self) -> ServeConfig:
        """Of one replica: no gateways, and its part of the processors."""
        parallel = self._config.parallel
        if parallel.threads_per_worker is None and parallel.cluster_host is None:
            num_ranks = parallel.tensor_parallel_size * max(len(self._replicas), parallel.replicas or 1)
            parallel = replace(parallel, threads_per_worker=max(1, num_cores() // num_ranks))
        server = replace(self._config.server, num_gateways=0)
        return replace(self._config, parallel=replace(parallel, replicas=None), server=server)

    def serves(self, number: int, now: float) -> None:
        """A replica is ready for the first time since its start."""
        replica = self._replicas[number]
        replica.serves, replica.num_deaths = True, 0
        replica.restarts.serves(now)
        was_published = _published(replica)
        replica.is_out = False
        if _published(replica) != was_published:
            self._publish()
        self._has_served = self._has_served or self.all_ready()

    def note_pulse_of(self, number: int, *, serves: bool) -> None:
        """Whether a replica has all of its processes."""
        self._replicas[number].serves = serves

    def all_ready(self) -> bool:
        """Every replica has been ready since its start."""
        return all(replica.child.phase == Phase.READY for replica in self)

    def ended(self, replica: Replica, now: float) -> bool:
        """A replica's process is gone: it is started again, unless it was to leave. Whether it had been told to end."""
        child = replica.child
        replica.serves = False
        was_told = replica.is_told
        if replica.fate == LEAVE:
            del self._replicas[child.index]
            self._publish()
            run_dir = replica_dir(self._run_dir, child.index)
            remove_ray_files(run_dir.path)
            shutil.rmtree(run_dir.path, ignore_errors=True)
            return was_told
        replica.child = ChildState(ROLE_REPLICA, child.index, child.epoch + 1)
        replica.is_out = True
        # If it was to be restarted, it is: should its successor die, nobody told it to.
        replica.fate, replica.draining_since, replica.is_told = STAY, 0, False
        replica.due = now
        if not was_told:
            replica.num_deaths += 1
            replica.due += replica.restarts.delay(now) or 0.0
        self._publish()
        return was_told

    def is_hopeless(self) -> bool:
        """None serves, and each that is to stay has died too often: one that cannot start takes nobody down."""
        least = min((replica.num_deaths for replica in self if replica.fate != LEAVE), default=0)
        return least > self._config.server.max_restarts and not any(replica.serves for replica in self)

    # -- draining -----------------------------------------------------------------------------------------------

    def drain(self, numbers: Sequence[int]) -> str | None:
        """Let replicas go once nobody needs them; why not, if that cannot be."""
        refusal = self._why_not(numbers)
        if refusal is None and not any(r.child.index not in numbers and r.fate == STAY and r.serves for r in self):
            refusal = "no replica that serves would be left: end the server instead"
        if refusal is None:
            for number in numbers:
                self._begin(self._replicas[number], LEAVE)
            refusal = self._why_untold()
            if refusal is not None:
                for replica in map(self._replicas.__getitem__, numbers):
                    replica.fate, replica.draining_since = STAY, 0
        return refusal

    def restart(self, numbers: Sequence[int]) -> str | None:
        """Restart these replicas (none: all), one after another; why not, if that cannot be."""
        wanted = list(numbers) or [replica.child.index for replica in self]
        refusal = self._why_not(wanted)
        if refusal is None and sum(replica.fate == STAY for replica in self) < 2:
            refusal = "nobody would serve meanwhile: add a replica before"
        if refusal is None:
            self._to_restart.extend(wanted)
        return refusal

    def _why_not(self, numbers: Sequence[int]) -> str | None:
        for number in numbers:
            if number not in self._replicas:
                return f"there is no replica {number}"
            if self._replicas[number].fate != STAY or number in self._to_restart:
                return f"replica {number} is {self._state(self._replicas[number])} already"
        return None

    def drained(self, gateways: Sequence[ChildState], now: float) -> list[ChildState]:
        """Processes that are to end now, as no gateway has anything there; each is named once."""
        self._begin_next_restart()
        found = []
        for replica in self:
            if replica.fate == STAY or replica.is_told or not self._is_free(replica, gateways, now):
                continue
            replica.is_told = True
            if replica.child.process is not None and replica.child.phase != Phase.EXITED:
                found.append(replica.child)
            elif self.ended(replica, now):  # it had died before
                logger.info("replica %d was not running", replica.child.index)
        return found

    def _begin_next_restart(self) -> None:
        while self._to_restart and all(replica.fate != RESTART for replica in self):
            number = self._to_restart[0]
            others = [replica for replica in self if replica.child.index != number and replica.fate == STAY]
            if number in self._replicas and self._replicas[number].fate == STAY:
                if not others or not all(replica.serves for replica in others):
                    return
                self._begin(self._replicas[number], RESTART)
            self._to_restart.popleft()

    def _begin(self, replica: Replica, fate: str) -> None:
        replica.fate = fate
        replica.draining_since = self._publish()
        logger.info("replica %d is draining", replica.child.index)

    def _is_free(self, replica: Replica, gateways: Sequence[ChildState], now: float) -> bool:
        """Every gateway has heard that it is draining and has nothing there, nor has one that died left something."""
        if now - self._gateway_lost_at < self._config.server.orphan_grace:
            return False
        for gateway in gateways:
            known = self._gateways.get(gateway.index, _Gateway())
            if known.version < replica.draining_since or known.num_live.get(replica.child.index, 0):
                return False
        return True

    def note_gateway(self, pulse: GatewayPulse) -> None:
        """What a gateway goes by, and has at each replica."""
        live = dict(zip(pulse.replicas, pulse.num_live, strict=False))
        self._gateways[pulse.index] = _Gateway(pulse.version, live)

    def gateway_lost(self, index: int, now: float) -> None:
        """What it had at the replicas waits there for a successor."""
        self._gateways.pop(index, None)
        self._gateway_lost_at = now

    def _publish(self) -> int:
        """Tell the gateways, at once or as soon as that is possible; the version that tells them."""
        self._version += 1
        self._write(time.monotonic())
        return self._version

    def catch_up(self, now: float) -> None:
        """Tell the gateways what they could not be told. To be called again and again."""
        if now >= self._write_at:
            self._write(now)

    def _write(self, now: float) -> None:
        states = {replica.child.index: _published(replica) for replica in self}
        try:
            write_replicas(self._run_dir, Replicas(self._version, states))
        except OSError as error:
            if self._write_at == float("inf"):  # else that has been said
                logger.error("the gateways cannot be told of the replicas: %s", error)
            self._write_at = now + _PAUSE
        else:
            self._written_version, self._write_at = self._version, float("inf")

    def _why_untold(self) -> str | None:
        if self._written_version == self._version:
            return None
        return f"the gateways cannot be told: {self._run_dir.path} cannot be written (the disk may be full)"

    # -- listing ------------------------------------------------------------------------------------------------

    def listing(self) -> ReplicaList:
        """For whoever asks."""
        numbers = list(self._replicas)
        live = [sum(gateway.num_live.get(number, 0) for gateway in self._gateways.values()) for number in numbers]
        return ReplicaList(numbers, [self._state(self._replicas[number]) for number in numbers], live)

    def _state(self, replica: Replica) -> str:
        if replica.fate == LEAVE:
            return "draining"
        if replica.fate == RESTART:
            return "restarting" if replica.is_told else "draining"
        if replica.child.index in self._to_restart:
            return "waiting for a restart"
        if replica.child.process is None:
            return "dead" if replica.num_deaths else "loading"
        if replica.serves:
            return "serving"
        return "loading" if replica.child.phase < Phase.READY else "recovering"


def _published(replica: Replica) -> str:
    if replica.is_out:
        return OUT
    return IN if replica.fate == STAY else DRAINING


def num_cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
