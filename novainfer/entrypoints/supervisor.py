"""The supervisor: starts every process of a server, watches them, and ends them in order. Knows no request.

Start is in two phases: every process reports that it runs (`ChildStarted`), then that it can serve (`ChildReady`).
Stop: gateways first (they drain), then the scheduler, then the workers. A death that nobody asked for stops all.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from novainfer.config import ServeConfig
from novainfer.entrypoints.children import (
    ChildState,
    ChildTable,
    Phase,
    child_environment,
    exit_words,
    kill_all,
    python_module,
    send_signal,
    spawn,
)
from novainfer.entrypoints.notify import notify
from novainfer.entrypoints.progress import StartProgress
from novainfer.entrypoints.wakeups import Wakeups
from novainfer.entrypoints.worker_thread import WorkerGroup, WorkerThread
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    ROLE_GATEWAY,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
)
from novainfer.transport.addresses import RunDir

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
DRAIN_MARGIN = 5.0  # seconds beyond drain_timeout that a gateway may take to exit
STOP_TIMEOUT = 10.0  # seconds for a scheduler to exit
FAULT_PATIENCE = 5.0  # seconds for the gateways to end their streams when the engine is gone
WORKERS_TIMEOUT = 30.0  # seconds for Ray to take the workers down
_LAST_WORD_PATIENCE = 0.2  # seconds that a dead child's last report may still be on its way


@dataclass(frozen=True, slots=True)
class Launch:
    """How the parts are started; tests put small scripts here."""

    gateway: Callable[[int], Sequence[str]]  # index -> command
    scheduler: Callable[[int], Sequence[str]]  # replica -> command
    workers: Callable[[int], WorkerGroup]  # epoch -> a group that is not started; called in its own thread


def standard_launch(config: ServeConfig, run_dir: RunDir) -> Launch:
    """The real gateway, scheduler and Ray workers."""
    where = ("--run-dir", str(run_dir.path))

    def ray_workers(epoch: int) -> WorkerGroup:
        from workers.ray_executor import RayWorkerGroup

        return RayWorkerGroup(config, run_dir, epoch=epoch)

    return Launch(
        gateway=lambda index: python_module("gateway.process", *where, "--index", str(index)),
        scheduler=lambda replica: python_module("novainfer.engine.server", *where, "--replica", str(replica)),
        workers=ray_workers,
    )


class Supervisor:
    """One server's life, from the first process to the last. All state is in these fields; one thread changes them."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self.epoch = FIRST_EPOCH
        self.table = ChildTable(
            num_gateways=config.server.num_gateways,
            world_size=config.parallel.tensor_parallel_size,
            epoch=self.epoch,
        )
        self._wakeups = Wakeups(run_dir)
        self._workers = WorkerThread(lambda: launch.workers(self.epoch), self._wakeups.nudge)
        self._progress = StartProgress()
        self._began = time.monotonic()
        self._fault: str | None = None
        self._stop_signals = 0  # SIGTERM, SIGINT or SIGHUP so far; the second ends the patience
        self._is_stopping = False
        self._phase = Phase.SPAWNED  # what all children have reached

    def __enter__(self) -> Supervisor:
        self._wakeups.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing that was started may live on, whatever went wrong."""
        kill_all(self.table.alive(ROLE_GATEWAY, ROLE_SCHEDULER))
        self._wakeups.__exit__(kind, error, trace)

    def run(self) -> int:
        """Start, serve until a signal or a fault, stop. Returns the exit status of the process."""
        self._start()
        try:
            self._serve()
        finally:
            self._stop()
        return EXIT_OK if self._fault is None else EXIT_FAULT

    # -- starting and watching --------------------------------------------------------------------------------

    def _start(self) -> None:
        environ = child_environment(os.environ)
        self._workers.start()
        for child in self.table.of(ROLE_SCHEDULER):
            spawn(child, self._launch.scheduler(child.index), environ)
        for child in self.table.of(ROLE_GATEWAY):
            spawn(child, self._launch.gateway(child.index), environ)

    def _serve(self) -> None:
        deadline = self._began + self._config.server.start_timeout
        while self._fault is None and not self._stop_signals:
            self._advance_phase()
            if self._phase == Phase.READY:
                self._turn(None)
            elif time.monotonic() >= deadline:
                late = ", ".join(child.name for child in self.table.behind(Phase.READY))
                self._fail(f"not ready after {self._config.server.start_timeout:g} s; still waiting for {late}")
            else:
                self._turn(deadline - time.monotonic())

    def _advance_phase(self) -> None:
        if self._phase == Phase.SPAWNED and not self.table.behind(Phase.STARTED):
            self._phase = Phase.STARTED
            logger.info("all processes have started (%.1f s)", self._seconds())
        if self._phase == Phase.STARTED and not self.table.behind(Phase.READY):
            self._phase = Phase.READY
            self._announce()

    def _announce(self) -> None:
        self._progress.close()
        world_size = self._config.parallel.tensor_parallel_size
        workers = "1 worker" if world_size == 1 else f"{world_size} workers"
        text = f"ready on {self._url()} (model {self._config.model.model}, {workers}, {self._seconds():.1f} s)"
        print(f"NovaInfer is {text}", flush=True)
        notify("READY=1", f"STATUS={text}")

    def _url(self) -> str:
        host = self._config.server.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{shown}:{self.table.of(ROLE_GATEWAY)[0].port or self._config.server.port}"

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    # -- one turn of the loop -----------------------------------------------------------------------------------

    def _turn(self, timeout: float | None) -> None:
        """Wait for something to happen and take note of it."""
        signals, reports = self._wakeups.wait(timeout)
        for number in signals:
            if number != signal.SIGCHLD:
                self._stop_signals += 1
                logger.info("got %s", number.name)
        for report in reports:
            self._take(report)
        if self._workers.failure is not None and self._fault is None:
            self._fail(self._workers.failure)
        for child in self.table.reap():
            self._note_exit(child)

    def _take(self, report: object) -> None:
        try:
            if isinstance(report, ChildStarted):
                self.table.started(report)
                logger.debug("%s %d has started (%.2f s)", report.role, report.index, self._seconds())
            elif isinstance(report, ChildReady):
                self.table.ready(report)
                logger.debug("%s %d is ready (%.2f s)", report.role, report.index, self._seconds())
            elif isinstance(report, ChildFault):
                self.table.children[report.role, report.index].fault = report.message
                if report.role == ROLE_WORKER:  # it has no exit status that we could wait for
                    self._fail(f"{report.role} {report.index}: {report.message}")
            elif isinstance(report, LoadProgress) and self._phase < Phase.READY:
                self._progress.show(report)
        except KeyError:
            logger.warning("a report came from an unknown process: %s", report)

    def _note_exit(self, child: ChildState) -> None:
        if child.fault is None:
            for report in self._wakeups.reports(0.0 if self._is_stopping else _LAST_WORD_PATIENCE):
                self._take(report)
        if not self._is_stopping:
            self._fail(exit_words(child))
        elif child.process is not None and child.process.returncode != 0:
            logger.warning("%s", exit_words(child))

    def _fail(self, words: str) -> None:
        """The server cannot go on. The first cause counts; what it drags along is only logged."""
        if self._is_stopping:
            logger.debug("while stopping: %s", words)
            return
        self._progress.close()
        if self._fault is None:
            self._fault = words
            logger.error("%s", words)

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Gateways drain, then the scheduler goes, then the workers. A second signal, or a fault, shortens it."""
        self._is_stopping = True
        self._workers.expect_end()
        self._progress.close()
        notify("STOPPING=1")
        was_ready = self._phase == Phase.READY and self._fault is None
        drain = self._config.server.drain_timeout + DRAIN_MARGIN if was_ready else FAULT_PATIENCE
        self._end(ROLE_GATEWAY, drain)
        self._end(ROLE_SCHEDULER, STOP_TIMEOUT)
        if not self._workers.stop(WORKERS_TIMEOUT):
            logger.error("the workers did not stop within %g s", WORKERS_TIMEOUT)

    def _end(self, role: str, timeout: float) -> None:
        """SIGTERM to all of a role; SIGKILL to those that are still there after `timeout` seconds."""
        send_signal(self.table.alive(role), signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while self.table.alive(role) and not self._is_hurried() and time.monotonic() < deadline:
            self._turn(deadline - time.monotonic())
        late = self.table.alive(role)
        if late:
            logger.warning("killing %s", ", ".join(child.name for child in late))
            kill_all(late)

    def _is_hurried(self) -> bool:
        return self._stop_signals > 1


def run_supervisor(config: ServeConfig, run_dir: RunDir) -> int:
    """Serve with the real processes until a signal; returns the exit status."""
    with Supervisor(config, run_dir, standard_launch(config, run_dir)) as supervisor:
        status = supervisor.run()
    sys.stdout.flush()
    return status
