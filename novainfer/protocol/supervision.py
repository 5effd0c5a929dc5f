"""What a child process or worker rank tells the supervisor. One way: child -> supervisor (PUSH -> PULL)."""

from __future__ import annotations

from dataclasses import dataclass

from novainfer.protocol.codec import Schema

ROLE_GATEWAY = "gateway"
ROLE_SCHEDULER = "scheduler"
ROLE_WORKER = "worker"

# The first worker group of a server; each later one gets the next number. 0 is "none yet".
FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """Phase one: the process runs and its sockets are bound or connecting. `port`: a gateway's HTTP port."""

    role: str
    index: int  # gateway number, scheduler (replica) number, worker rank
    pid: int
    port: int = 0


@dataclass(frozen=True, slots=True)
class ChildReady:
    """Phase two: the process can do its part of a request (a scheduler: all ranks have loaded)."""

    role: str
    index: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a rank is with loading, for the human who waits."""

    rank: int
    stage: str  # "weights", "kv cache", "warm-up"
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ChildFault:
    """The process cannot go on; `message` is one line for the log. The process exits after it."""

    role: str
    index: int
    epoch: int
    message: str


SUPERVISOR_SCHEMA = Schema("supervisor", {1: ChildStarted, 2: ChildReady, 3: LoadProgress, 4: ChildFault})
