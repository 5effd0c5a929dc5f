"""Processes that are there at once: forked from a *zygote*, which has imported and read what they need.

A zygote has one thread and takes no work: so it may fork, and lives long. Whoever starts it holds a `ZygoteProcess`
and gets a socket to each process that it orders. All of them die with the zygote, and the zygote ends when the
`ZygoteProcess` is closed, or the process that has it ends in whatever way.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from novainfer.errors import EngineError
from novainfer.transport.parent import PARENT_VARIABLE, die_with_parent

log = logging.getLogger(__name__)

CLOSE_LIMIT = 2.0  # seconds, for a zygote to end its children and itself


class Zygote:
    """Serves the orders on `control`: the number of a slot, with a socket if a process shall be forked for it.

    The one that is there is killed. become: `become(slot, socket)` is the life of the next one.
    tell_end: the last line that comes through its socket is `end_words`, told by the zygote.
    """

    def __init__(
        self, control: socket.socket, become: Callable[[int, socket.socket], None], *, tell_end: bool = False
    ) -> None:
        self._control = control
        self._become = become
        self._tell_end = tell_end
        self._children: dict[int, tuple[int, socket.socket | None]] = {}  # by slot: pid, our copy of its socket
        self._deaths, self._wakeup = socket.socketpair()
        for end in (self._deaths, self._wakeup):
            end.setblocking(False)

    def run(self) -> int:
        """Serve until the other end of `control` is closed; the exit status."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # a collection in a child must not copy what it shares with us
        while True:
            ready, _, _ = select.select([self._control, self._deaths], [], [])
            if self._deaths in ready:
                self._deaths.recv(4096)
                self._reap()
            if self._control in ready:
                try:
                    order, files, _, _ = socket.recv_fds(self._control, 1, 1)
                except ConnectionResetError:  # it was closed before our last word was read
                    break
                if not order:
                    break
                self._kill(order[0])
                if files:
                    self._fork(order[0], socket.socket(fileno=files[0]))
        for slot in list(self._children):
            self._kill(slot)
        return 0

    def _reap(self) -> None:
        for slot, (pid, _) in list(self._children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._bury(slot, status)

    def _kill(self, slot: int) -> None:
        if slot in self._children:
            pid = self._children[slot][0]
            os.kill(pid, signal.SIGKILL)  # nobody but us waits for it, so the pid is still its own
            self._bury(slot, os.waitpid(pid, 0)[1])

    def _bury(self, slot: int, status: int) -> None:
        _, ours = self._children.pop(slot)
        if ours is not None:
            try:
                ours.send(f"{end_words(status)}\n".encode(), socket.MSG_DONTWAIT)
            except OSError:
                pass  # nobody listens
            ours.close()

    def _fork(self, slot: int, connection: socket.socket) -> None:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        pid = os.fork()
        if pid:
            self._children[slot] = pid, connection if self._tell_end else None
            if not self._tell_end:
                connection.close()
            return
        status = 1
        try:
            self._begin()
            self._become(slot, connection)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _begin(self) -> None:
        """In the child: leave what is the zygote's."""
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        others = [ours for _, ours in self._children.values() if ours is not None]
        for end in (self._control, self._deaths, self._wakeup, *others):
            end.close()


def end_words(status: int) -> str:
    """How a process ended, from what wait(2) says of it; empty if all was well."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with status {code}" if code else ""


class ZygoteProcess:
    """A zygote from outside: started at once, and anew whenever it is needed and gone.

    module: what is run, with `arguments` and `--control FD`; it calls `Zygote.run`.
    environ: more of its environment.   control: our end of its orders; what it says itself comes here.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._environ = dict(environ or {})
        self._is_closed = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, slot: int) -> socket.socket:
        """Have it kill the process in this slot, if there is one, and start the next: our end of its socket.

        Does not wait: if that cannot be done, the socket ends before anything has come. Raises `EngineError` once it
        is closed, `OSError` where the system has no sockets or process left.
        """
        if self._is_closed:
            raise EngineError("The server is shutting down.")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if self._process.poll() is not None or not self._order(slot, [theirs.fileno()]):
                    log.warning("a zygote is started again")
                    self.kill()
                    self.control.close()
                    self._start()
                    self._order(slot, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def kill_child(self, slot: int) -> None:
        """Have it kill the process in this slot, if there is one. Does not wait."""
        self._order(slot, [])

    def kill(self) -> None:
        """Its children die with it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and its children. Idempotent."""
        self._is_closed = True
        self.control.close()
        try:
            self._process.wait(CLOSE_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()

    def _start(self) -> None:
        environ = {**os.environ, **self._environ, PARENT_VARIABLE: str(os.getpid())}
        self.control, theirs = socket.socketpair()
        with theirs:
            command = [*self._command, "--control", str(theirs.fileno())]
            files = (theirs.fileno(),)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ, pass_fds=files)

    def _order(self, slot: int, files: list[int]) -> bool:
        try:
            socket.send_fds(self.control, [bytes([slot])], files, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True
