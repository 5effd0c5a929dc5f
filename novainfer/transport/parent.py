"""A child process must not outlive its supervisor, whatever kills it. Called first in every child; knows no message."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# Set by the supervisor: closes the gap between the fork and the call below, in which the parent may have died.
PARENT_VARIABLE = "NOVAINFER_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL = 0.5  # seconds


def die_with_parent() -> None:
    """From now on this process is killed when the process that started it ends, even by SIGKILL.

    Linux does it itself (`prctl(PR_SET_PDEATHSIG)`, for the *thread* that started us: supervisors spawn from their main
    thread). Elsewhere a daemon thread watches the parent's pid. Ends the process at once if the parent is gone already.
    """
    # Taken out of the environment: this process's own children have another parent.
    parent = int(os.environ.pop(PARENT_VARIABLE, "") or os.getppid())
    if not (sys.platform == "linux" and _ask_kernel()):
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        _die()


def _ask_kernel() -> bool:
    try:
        result: int = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return False
    return result == 0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
