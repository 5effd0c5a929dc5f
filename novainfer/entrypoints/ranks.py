"""Rank processes of this host for the supervisor: Ray owns them, but their death is seen, and dealt, here at once.

A file descriptor of the process (Linux) becomes readable when it dies, and a signal sent through it can never reach
another process that got the same number. Elsewhere, and for ranks on other hosts, Ray alone tells and kills.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from novainfer.entrypoints.children import ChildState
from novainfer.entrypoints.vitals import STOPPED_TIMEOUT
from novainfer.protocol.supervision import RankWarning
from novainfer.transport.processes import RAY_SERVERS, StoppedProcesses, below, children_named, kill

logger = logging.getLogger(__name__)

_KILL_PATIENCE_MS = 5000


def pass_on(warning: RankWarning) -> None:
    """Into the server's log: a rank's own is a file of Ray's."""
    logger.log(warning.level, "worker %d: %s", warning.rank, warning.message)


def hold_rank(rank: ChildState) -> int | None:
    """Get hold of a rank that has reported its pid: its new `process_file`, None where that is impossible."""
    if rank.process_file is not None or not hasattr(os, "pidfd_open"):
        return None
    try:
        process_file = os.pidfd_open(rank.pid)
    except OSError:
        return None  # dead already: Ray will tell
    try:
        title = Path(f"/proc/{rank.pid}/cmdline").read_bytes()
    except OSError:
        title = b""
    if b"novainfer: worker" not in title:  # Ray's processes have other numbers for us, e.g. in another container
        os.close(process_file)
        return None
    rank.process_file = process_file
    return process_file


def let_go(rank: ChildState, unwatch: Callable[[int], None]) -> None:
    """Undo `hold_rank`. unwatch: takes its `process_file`, and closes it."""
    if rank.process_file is not None:
        unwatch(rank.process_file)
        rank.process_file = None


def dead_ranks(ranks: Sequence[ChildState]) -> list[ChildState]:
    """Those that we hold and that have died."""
    return [rank for rank in ranks if rank.process_file is not None and _is_dead(rank.process_file, 0)]


def death_of(ranks: Sequence[ChildState]) -> str:
    """Of these, in words."""
    names = ", ".join(f"{rank.name} (pid {rank.pid})" for rank in ranks)
    return f"{names} {'has' if len(ranks) == 1 else 'have'} died"


def kill_ranks(ranks: Sequence[ChildState]) -> None:
    """SIGKILL those that we hold, also stopped ones, and wait until they are dead."""
    held = [(rank, rank.process_file) for rank in ranks if rank.process_file is not None]
    for _, process_file in held:
        try:
            signal.pidfd_send_signal(process_file, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for rank, process_file in held:
        if not _is_dead(process_file, _KILL_PATIENCE_MS):
            logger.error("%s (pid %d) does not die", rank.name, rank.pid)


class StrayRanks:
    """Processes that are stopped (SIGSTOP) while ranks are started, spare ones too: who has not said a word is known to
    Ray alone. So are Ray's servers: a call that waits for one of them would keep their owner from looking.
    """

    def __init__(self) -> None:
        self._stopped = StoppedProcesses(STOPPED_TIMEOUT)

    def kill_stopped(self, now: float) -> None:
        """End those that have been stopped for a while. Ray will tell of it. To be called again and again."""
        servers = children_named(RAY_SERVERS)
        processes = [process for server in servers for process in (server, *below(server))]
        for process in self._stopped.look(processes, now):
            logger.error("a process of Ray's (pid %d) was stopped while ranks were started", process.pid)
            kill(process)


def _is_dead(process_file: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(process_file, select.POLLIN)
    return bool(poller.poll(timeout_ms))
