"""What the supervisor waits for, in one blocking poll: signals, reports, deaths of ranks, nudges from its own threads.

Its line to the scheduler is here too.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

import zmq

from novainfer.errors import ProtocolError
from novainfer.protocol.supervision import ORDERS_SCHEMA, SUPERVISOR_SCHEMA
from novainfer.transport.addresses import Endpoint, RunDir
from novainfer.transport.channel import bind_pull, bind_rep, connect_push, start_authenticator

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Wakeups:
    """Blocks until something happens; no polling. For the main thread, which alone may set signal handlers."""

    def __init__(self, run_dir: RunDir, replica: int = 0) -> None:
        """Listen for reports; orders go to the scheduler of this number.

        Raises `ConfigError` if somebody else listens at the same address.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ranks = run_dir.rank_reports()
        # One address where the ranks are on this host, two where they are not.
        endpoints = dict.fromkeys((run_dir.supervisor(), ranks))
        self._reports = [bind_pull(self._context, endpoint) for endpoint in endpoints]
        self._authenticator = None if ranks.curve is None else start_authenticator(self._context, ranks.curve)
        self._orders_endpoint = run_dir.orders(replica)
        self._orders: zmq.Socket[bytes] | None = None
        self._report_poller = zmq.Poller()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._reader, zmq.POLLIN)
        for reports in self._reports:
            self._poller.register(reports, zmq.POLLIN)
            self._report_poller.register(reports, zmq.POLLIN)
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Wakeups:
        # The C-level handler writes the signal's number to this socket, whatever the main thread is doing.
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        for reports in self._reports:
            reports.close()
        if self._orders is not None:
            self._orders.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._reader.close()
        self._writer.close()

    def listen(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        """A socket for questions (REP), which `wait` returns for. The caller closes it, before us."""
        socket = bind_rep(self._context, endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def watch(self, process_file: int) -> None:
        """Make `wait` return when this file of a process becomes readable, until `unwatch`."""
        self._poller.register(process_file, zmq.POLLIN)

    def unwatch(self, process_file: int) -> None:
        """Undo `watch`, and close the file."""
        self._poller.unregister(process_file)
        os.close(process_file)

    def nudge(self) -> None:
        """Make `wait` return; may be called from any thread."""
        try:
            self._writer.send(b"\0")
        except OSError:
            pass  # full: it will wake anyway; closed: nobody waits any more

    def order(self, message: object) -> None:
        """Send one record of ORDERS_SCHEMA to the scheduler, or to its successor if it is dead. Never blocks."""
        if self._orders is None:
            self._orders = connect_push(self._context, self._orders_endpoint)
        self._orders.send(ORDERS_SCHEMA.encode(message))

    def wait(self, timeout: float | None) -> tuple[list[signal.Signals], list[Any]]:
        """The signals and reports that have come, after at most `timeout` seconds (None = any time)."""
        ready = dict(self._poller.poll(None if timeout is None else max(0, int(timeout * 1000))))
        signals = self._read_signals() if self._reader.fileno() in ready else []
        return signals, self.reports()

    def reports(self, patience: float = 0.0) -> list[Any]:
        """The reports that are there, or come within `patience` seconds if there is none yet."""
        messages = []
        timeout = int(patience * 1000)
        while ready := self._report_poller.poll(timeout):
            timeout = 0
            for reports, _ in ready:
                try:
                    messages.append(SUPERVISOR_SCHEMA.decode(reports.recv()))
                except ProtocolError as error:
                    logger.warning("a malformed report was dropped: %s", error)
        return messages

    def _read_signals(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(number) for number in self._reader.recv(4096) if number]
        except BlockingIOError:
            return []


def _note(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup socket to be written; the loop does the rest."""
