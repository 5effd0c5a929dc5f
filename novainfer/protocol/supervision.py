"""What a child process or worker rank tells the supervisor, and what the supervisor tells the scheduler.

Both lines are one way (PUSH -> PULL). `epoch` in a report is the one in which the process was started, for a scheduler
the one it works in: news of a process that has been replaced is dropped.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from novainfer.protocol.codec import Schema

ROLE_GATEWAY = "gateway"
ROLE_SCHEDULER = "scheduler"
ROLE_WORKER = "worker"
ROLE_REPLICA = "replica"  # the supervisor of one of several engines, for the supervisor above it

# The engine is gone for good. To a gateway, which SIGTERM would let wait for its streams; to a scheduler, which SIGTERM
# would let leave its ranks to the next one.
GIVE_UP_SIGNAL = signal.SIGUSR1

# Of a server that has replaced nothing yet. 0 is "none".
FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """Phase one: the process runs and its sockets are bound or connecting. `port`: a gateway's HTTP port."""

    role: str
    index: int  # gateway number, scheduler or replica number, worker rank
    pid: int
    port: int = 0
    epoch: int = FIRST_EPOCH


@dataclass(frozen=True, slots=True)
class ChildReady:
    """Phase two: the process can do its part of a request (a scheduler: all ranks have said hello)."""

    role: str
    index: int
    epoch: int = FIRST_EPOCH
    num_blocks: int = 0  # of a rank: the KV blocks it has room for
    fingerprint: str = ""  # of rank 0: its group's, see `workers.fingerprint`


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a rank is with loading, for the human who waits."""

    rank: int
    stage: str  # "weights", "kv cache", "warm-up"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ChildFault:
    """The process cannot go on; `message` is one line for the log. The process exits after it.

    peer_lost: a rank that failed only because it cannot reach another one.
    fingerprint: of a group that ends because this is not that of the one before it.
    """

    role: str
    index: int
    epoch: int
    message: str
    peer_lost: bool = False
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RankWarning:
    """What a rank's process has logged, at `logging.WARNING` or above; `message` is one line for the server's log."""

    rank: int
    epoch: int
    level: int  # as `logging` numbers them
    message: str


@dataclass(frozen=True, slots=True)
class RankPulse:
    """A rank lives, several times a second. `progress` grows with every layer; it may stand still unless `is_busy`.

    num_blocks: above 0 once it has said `ChildReady`, which may have been lost.   fingerprint: as there.
    """

    rank: int
    epoch: int
    is_busy: bool
    progress: int
    num_blocks: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerPulse:
    """The scheduler's loop turns, several times a second.

    num_steps: those that ended in this epoch.   waits: for its ranks, to say hello or to answer a plan.
    """

    replica: int
    epoch: int
    num_steps: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class GatewayPulse:
    """A gateway's event loop turns, several times a second.

    version: of the `replicas.json` that it goes by.   num_live[i]: live requests that replica replicas[i] has from it.
    """

    index: int
    epoch: int
    version: int = 0
    replicas: list[int] = field(default_factory=list)
    num_live: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReplicaPulse:
    """A replica's supervisor turns, several times a second. serves: all of its processes are ready."""

    index: int
    epoch: int
    serves: bool


@dataclass(frozen=True, slots=True)
class WorkersFault:
    """The scheduler cannot go on with the worker group of this epoch, and waits for another one."""

    replica: int
    epoch: int
    message: str


SUPERVISOR_SCHEMA = Schema(
    "supervisor",
    {
        1: ChildStarted,
        2: ChildReady,
        3: LoadProgress,
        4: ChildFault,
        5: RankPulse,
        6: SchedulerPulse,
        7: WorkersFault,
        8: GatewayPulse,
        9: ReplicaPulse,
        10: RankWarning,
    },
)


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """To the scheduler: the worker group is dead; `epoch` is that of the one that will say hello.

    faulted: it died of what it did (a rank said so), not from outside.
    """

    epoch: int
    faulted: bool


ORDERS_SCHEMA = Schema("orders", {1: WorkersLost})


LIST, ADD, DRAIN, RESTART = "list", "add", "drain", "restart"


@dataclass(frozen=True, slots=True)
class ReplicaCommand:
    """To a server with several replicas; answered by `ReplicaList` or `Refused`, before it has been carried out.

    action: LIST; ADD one more; DRAIN: let these finish what they have, then end them; RESTART these (none: all), one
    after another, each drained before.
    """

    action: str
    replicas: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """states[i]: of replica replicas[i]: "loading", "serving", "recovering", "draining", "restarting" or "dead"."""

    replicas: list[int]
    states: list[str]
    num_live: list[int]  # requests


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that cannot be carried out, and why."""

    message: str


CONTROL_SCHEMA = Schema("control", {1: ReplicaCommand, 16: ReplicaList, 17: Refused})
