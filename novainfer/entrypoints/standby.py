"""Processes that have imported what a child runs, and wait to be told its arguments (`-m ... TITLE MODULE`).

To import takes most of a gateway's start; who is to replace one that died has done it by then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from setproctitle import setproctitle

from novainfer.entrypoints.children import ChildState, python_module, spawn, start
from novainfer.entrypoints.leisure import Leisure
from novainfer.transport.parent import die_with_parent

logger = logging.getLogger(__name__)

FIRST_DELAY = 5.0  # seconds: the first requests come just then, and have the processors for themselves
_PAUSE = 10.0  # seconds until the next one for a module, if one could not be started, or died


class Standbys:
    """At most one process for each module. They are children of this process, which must have one thread to start them.

    modules: by the title of its standby. Such a module has a `main(argv)` that gives the exit status.
    first_delay: seconds until the first ones start, if there is leisure: imports cost a load some of its steps.
    """

    def __init__(self, modules: Mapping[str, str], first_delay: float = 0.0) -> None:
        self._modules = dict(modules)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._not_before: dict[str, float] = {}  # by module; on the clock of those who call
        self._leisure = Leisure(first_delay)
        self._has_failed = False  # to start one, the last time

    def prepare(self, now: float) -> None:
        """Start those that are missing, once there is leisure. Does not wait.

        To be called again and again: without one all goes on, a little slower.
        """
        if not self._leisure.has_come(now):
            return
        for title, module in self._modules.items():
            process = self._processes.get(module)
            if process is not None and process.poll() is not None:
                self._processes.pop(module).communicate()  # closes our end of its pipe
            if module not in self._processes and now >= self._not_before.get(module, now):
                self._not_before[module] = now + _PAUSE
                self._start(python_module("novainfer.entrypoints.standby", title, module), module)

    def _start(self, command: Sequence[str], module: str) -> None:
        try:
            self._processes[module] = start(command, stdin=subprocess.PIPE)
        except OSError as error:  # no process, memory or file descriptor is left
            if not self._has_failed:
                logger.warning("no process stands by for the next death: %s", error)
            self._has_failed = True
        else:
            self._has_failed = False

    def spawn(self, child: ChildState, command: Sequence[str]) -> None:
        """Start this child: the process that waits for such a command, or a new one. Raises `OSError`."""
        spawn(child, command, self._take(command))

    def _take(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        for module in self._modules.values():
            start = python_module(module)
            if list(command[: len(start)]) == start and (process := self._processes.pop(module, None)) is not None:
                if not _tell(process, command[len(start) :]):
                    return None
                del self._not_before[module]  # nothing was wrong with it: the next one may come at once
                return process
        return None

    def close(self) -> None:
        """End those that still wait."""
        for process in self._processes.values():
            process.kill()
            process.communicate()
        self._processes.clear()


def _tell(process: subprocess.Popen[bytes], arguments: Sequence[str]) -> bool:
    """Whether it lives to hear its arguments."""
    if process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
    return process.poll() is None


def main(argv: list[str]) -> int:
    """Wait for the arguments, then be what the module is: its exit status; 0 if nothing is to be done any more."""
    title, module = argv
    die_with_parent()
    setproctitle(f"novainfer: standby {title}")
    run: Any = importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return 0
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    status: int = run.main(json.loads(line))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
