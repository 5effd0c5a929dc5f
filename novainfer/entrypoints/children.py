"""The supervisor's child processes: how they are started, told to stop, and what is known of each. No Ray in here."""

from __future__ import annotations

import enum
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from novainfer.entrypoints.options import PLACE_VARIABLES, VARIABLE_PREFIX
from novainfer.protocol.supervision import (
    ROLE_GATEWAY,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    ChildReady,
    ChildStarted,
)
from novainfer.transport.parent import PARENT_VARIABLE

logger = logging.getLogger(__name__)

Key = tuple[str, int]  # (role, index)


class Phase(enum.IntEnum):
    """How far a process is; it only ever moves forward within an epoch."""

    SPAWNED = 0
    STARTED = 1  # its sockets are bound or connecting
    READY = 2  # it can do its part of a request
    EXITED = 3


@dataclass(slots=True)
class ChildState:
    """What the supervisor knows of one process. `process` is None for a worker rank, which Ray owns.

    epoch: the one in which it was started, for the scheduler the one it works in. A gateway counts its own starts.
    """

    role: str
    index: int
    epoch: int
    phase: Phase = Phase.SPAWNED
    pid: int = 0
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    fault: str | None = None  # its last word, if it failed
    peer_lost: bool = False  # it failed only because another rank was gone
    process_file: int | None = None  # of a rank on this host: readable once the process is dead (pidfd_open(2))
    spawned_at: float | None = None  # monotonic clock; of a child process of ours
    # As its pulses tell, on the monotonic clock. None: it has not been heard of since it was started.
    heard_at: float | None = None
    is_busy: bool = False
    progress: int = -1
    moved_at: float = 0.0  # when it was idle, or `progress` another one
    worked_at: float = 0.0  # when it was not idle, or `progress` another one; a scheduler that waits for ranks is idle
    num_blocks: int = 0  # of a rank that is ready: its KV blocks
    fingerprint: str = ""  # of rank 0 when it is ready: its group's

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


class ChildTable:
    """Every process of this server, by role and index. Written by the supervisor alone."""

    def __init__(self, *, num_gateways: int, world_size: int, epoch: int, replica: int = 0) -> None:
        keys: list[Key] = [(ROLE_SCHEDULER, replica)]
        keys += [(ROLE_GATEWAY, index) for index in range(num_gateways)]
        keys += [(ROLE_WORKER, rank) for rank in range(world_size)]
        self.children = {key: ChildState(*key, epoch) for key in keys}

    def renew(self, role: str, epoch: int) -> None:
        """All of one role are replaced by processes of this epoch, which have not been started."""
        for child in self.of(role):
            self.children[role, child.index] = ChildState(role, child.index, epoch)

    def renew_gateway(self, index: int) -> None:
        """One gateway is replaced by one that has not been started, at the same port."""
        old = self.children[ROLE_GATEWAY, index]
        self.children[ROLE_GATEWAY, index] = ChildState(ROLE_GATEWAY, index, old.epoch + 1, port=old.port)

    def leave_out_dead(self, role: str) -> None:
        """Nobody waits for successors that have not been started: none will be."""
        for child in self.of(role):
            if child.process is None:
                child.phase = Phase.EXITED

    def find(self, role: str, index: int, epoch: int) -> ChildState | None:
        """The child that a report comes from; None if it has been replaced. Raises KeyError for an unknown one."""
        child = self.children[role, index]
        return child if child.epoch == epoch else None

    def of(self, role: str) -> list[ChildState]:
        """All of one role, by index."""
        return [child for child in self.children.values() if child.role == role]

    def started(self, message: ChildStarted) -> None:
        """Phase one of one child. Raises KeyError for a child that this server does not have."""
        child = self.find(message.role, message.index, message.epoch)
        if child is None:
            return
        child.pid, child.port = message.pid, message.port
        child.phase = max(child.phase, Phase.STARTED)

    def ready(self, message: ChildReady) -> None:
        """Phase two of one child. Raises KeyError for a child that this server does not have."""
        child = self.find(message.role, message.index, message.epoch)
        if child is not None:
            child.phase = max(child.phase, Phase.READY)
            child.num_blocks, child.fingerprint = message.num_blocks, message.fingerprint

    def num_blocks(self) -> int:
        """Of the rank with the fewest: a spare group has as many, whatever the memory says by then."""
        return min(rank.num_blocks for rank in self.of(ROLE_WORKER))

    @property
    def port(self) -> int:
        """Gateway 0's; 0 where there is no gateway."""
        return next((child.port for child in self.of(ROLE_GATEWAY)), 0)

    def behind(self, phase: Phase) -> list[ChildState]:
        """The children that have not got as far as `phase`."""
        return [child for child in self.children.values() if child.phase < phase]

    def reap(self) -> list[ChildState]:
        """The child processes that have ended since the last call, now in phase EXITED. Does not wait."""
        ended = []
        for child in self.children.values():
            if child.process is not None and child.phase != Phase.EXITED and child.process.poll() is not None:
                child.phase = Phase.EXITED
                ended.append(child)
        return ended

    def alive(self, *roles: str) -> list[ChildState]:
        """The child processes of these roles that have not been seen to end."""
        return [
            child
            for child in self.children.values()
            if child.role in roles and child.process is not None and child.phase != Phase.EXITED
        ]


def spawn(child: ChildState, command: Sequence[str], standby: subprocess.Popen[bytes] | None = None) -> None:
    """Start `command` as this child; standby: a process that does what the command would."""
    child.process = start(command) if standby is None else standby
    child.pid, child.spawned_at = child.process.pid, time.monotonic()


def start(command: Sequence[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """A process, in a process group of its own: a Ctrl-C at the terminal reaches us alone.

    Call it from the main thread: on Linux the process dies with the thread that started it.
    """
    return subprocess.Popen(command, stdin=stdin, env=child_environment(os.environ), process_group=0)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's environment without our own variables: children read the resolved config from a file.

    So no key is visible in a child's environment, and no variable can contradict the file. What says where kernels and
    weights lie is in no file, and stays.
    """
    ours = {name for name in environ if name.startswith(VARIABLE_PREFIX)} - PLACE_VARIABLES
    kept = {name: value for name, value in environ.items() if name not in ours}
    return {**kept, PARENT_VARIABLE: str(os.getpid())}


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules, never one of the same name in the current directory (`-P`)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def send_signal(children: Sequence[ChildState], number: signal.Signals) -> None:
    """Signal the given child processes; those that have ended are skipped."""
    for child in children:
        if child.process is not None:
            child.process.send_signal(number)


def is_stopped(child: ChildState) -> bool:
    """A signal keeps it from running (state T). False for a rank of another host, of which we cannot know."""
    if child.process is None and child.process_file is None:
        return False
    try:
        return bool(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def kill_all(children: Sequence[ChildState], *, patience: float = 5.0) -> None:
    """SIGKILL the given child processes and wait until the system has taken them away."""
    send_signal(children, signal.SIGKILL)
    deadline = time.monotonic() + patience
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.error("%s (pid %d) does not die", child.name, child.pid)
        child.phase = Phase.EXITED


def exit_words(child: ChildState) -> str:
    """One line on how a child ended, for the log."""
    code = child.process.returncode if child.process is not None else None
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"exited with status {code}"
    return f"{child.name} {how}" + (f": {child.fault}" if child.fault else "")
