"""The supervisor: starts every process of a server, watches and replaces them, ends them in order. Knows no request.

Start is in two phases: every process reports that it runs (`ChildStarted`), then that it can serve (`ChildReady`).
Once all have served, a worker group or scheduler that dies or hangs is replaced, and the epoch raised each time; a
gateway that dies is started again. A death before that, or again and again, stops all.
Stop: gateways first (they drain, and the engine is mended for them as before), then the scheduler, then the workers.
"""

from __future__ import annotations

import logging
import signal
import time
from types import TracebackType

from novainfer.config import ServeConfig
from novainfer.entrypoints.children import (
    ChildState,
    ChildTable,
    Phase,
    exit_words,
    is_stopped,
    kill_all,
    send_signal,
)
from novainfer.entrypoints.fingerprints import Fingerprints
from novainfer.entrypoints.launch import Launch, standard_launch
from novainfer.entrypoints.progress import Progress, StartProgress, exit_status
from novainfer.entrypoints.ranks import StrayRanks, dead_ranks, death_of, hold_rank, kill_ranks, let_go, pass_on
from novainfer.entrypoints.replacements import Replacements
from novainfer.entrypoints.standby import FIRST_DELAY, Standbys
from novainfer.entrypoints.vitals import Pulse, Watch, heard, take_pulse
from novainfer.entrypoints.wakeups import Wakeups
from novainfer.entrypoints.worker_thread import WorkerThread
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    GIVE_UP_SIGNAL,
    ROLE_GATEWAY,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
    RankWarning,
    WorkersFault,
    WorkersLost,
)
from novainfer.transport.addresses import RunDir

logger = logging.getLogger(__name__)

DRAIN_MARGIN = 5.0  # seconds beyond drain_timeout that a gateway may take to exit
STOP_TIMEOUT = 10.0  # seconds for a scheduler to exit
FAULT_PATIENCE = 5.0  # seconds for the gateways to end their streams when the engine is gone
WORKERS_TIMEOUT = 30.0  # seconds for Ray to take the workers down
_LAST_WORD_PATIENCE = 0.2  # seconds that a dead child's last report may still be on its way
_TICK = 0.25  # seconds between two looks at who is silent


class Supervisor:
    """One server's life, from the first process to the last. All state is in these fields; one thread changes them."""

    def __init__(
        self,
        config: ServeConfig,
        run_dir: RunDir,
        launch: Launch,
        progress: Progress | None = None,
        replica: int = 0,
        first_epoch: int = FIRST_EPOCH,
    ) -> None:
        self._config = config
        self._launch = launch
        self.epoch = first_epoch
        self.table = ChildTable(
            num_gateways=config.server.num_gateways,
            world_size=config.parallel.tensor_parallel_size,
            epoch=self.epoch,
            replica=replica,
        )
        self._wakeups = Wakeups(run_dir, replica)
        self._workers = WorkerThread(launch.workers, self._wakeups.nudge, num_spares=config.parallel.spare_workers)
        self._standbys = Standbys(launch.standbys, FIRST_DELAY)
        self._replacements = Replacements(config.server, time.monotonic())
        self._watch = Watch(config.server, is_stopped)
        self._strays = StrayRanks()
        self._progress = progress or StartProgress()
        self._fingerprints = Fingerprints()
        self.fault: str | None = None  # why it ends, if nobody asked for that
        self._stop_signals = 0  # SIGTERM, SIGINT or SIGHUP so far; the second ends the patience
        self._is_draining = False  # no gateway is replaced any more
        self._is_stopping = False  # nor anything else
        self._phase = Phase.SPAWNED  # what all children have once reached; READY from the moment in which any drains

    def __enter__(self) -> Supervisor:
        self._wakeups.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing that was started may live on, whatever went wrong."""
        kill_all(self.table.alive(ROLE_GATEWAY, ROLE_SCHEDULER))
        self._standbys.close()
        self._wakeups.__exit__(kind, error, trace)

    def run(self) -> int:
        """Start, serve until a signal or a fault, stop. Returns the exit status of the process."""
        self._start()
        try:
            self._serve()
        finally:
            self._stop()
        return exit_status(self.fault)

    # -- starting and watching --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._workers.start(self.epoch)
        for child in (self._scheduler, *self.table.of(ROLE_GATEWAY)):
            self._spawn(child)

    def _spawn(self, child: ChildState) -> None:
        if child.role == ROLE_SCHEDULER:
            command = self._launch.scheduler(self.epoch, self._worker_epoch)
        else:
            command = self._launch.gateway(child.index, child.epoch, child.port)
        try:
            self._standbys.spawn(child, command)
        except OSError as error:  # no process or memory is left: as if it had died at once
            self._lose(child, f"{child.name} cannot be started: {error}")

    @property
    def _scheduler(self) -> ChildState:
        return self.table.of(ROLE_SCHEDULER)[0]

    @property
    def _worker_epoch(self) -> int:  # in which the group was started that is there, or is on its way
        return self.table.of(ROLE_WORKER)[0].epoch

    def _serve(self) -> None:
        while self.fault is None and not self._stop_signals:
            self._tend(_TICK)
            self._progress.turn(not self.table.behind(Phase.READY))

    def _tend(self, timeout: float) -> None:
        """One turn; what hangs, or is late, is replaced."""
        self._advance_phase()
        self._turn(timeout)
        self._find_hang()
        now = time.monotonic()
        for key in self._replacements.take_due(now):
            if key[0] != ROLE_GATEWAY or not self._is_draining:
                self._spawn(self.table.children[key])
        if self._phase == Phase.READY and not (self._is_draining or self._replacements.is_going_on):
            self._standbys.prepare(now)
        if now >= self._replacements.ready_by and self.table.behind(Phase.READY):
            self._give_up_late()

    def _give_up_late(self) -> None:
        late = self.table.behind(Phase.READY)
        names = ", ".join(child.name for child in late)
        words = f"not ready after {self._config.server.start_timeout:g} s; still waiting for {names}"
        if all(child.role == ROLE_GATEWAY for child in late):
            self._fail(words)
        else:
            self._lose_workers(words)

    def _advance_phase(self) -> None:
        if self._phase == Phase.SPAWNED and not self.table.behind(Phase.STARTED):
            self._phase = Phase.STARTED
            logger.info("all processes have started (%.1f s)", self._progress.seconds())
        if self._phase == Phase.STARTED and not self.table.behind(Phase.READY):
            self._phase = Phase.READY
            self._progress.announce(self._config, self.table.port)
            self._prepare()
        if self._replacements.is_going_on and not self.table.behind(Phase.READY):
            seconds = self._replacements.all_ready(time.monotonic())
            logger.info("serving again after %.2f s (epoch %d)", seconds, self.epoch)
            self._prepare()

    def _prepare(self) -> None:
        """Get ready for the next death."""
        self._fingerprints.serves(self.table.of(ROLE_WORKER)[0].fingerprint)
        self._workers.prepare(self.table.num_blocks(), self._fingerprints.known())

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
        while self._workers.losses:
            epoch, words = self._workers.losses.popleft()
            if epoch == self._worker_epoch:
                self._lose_workers(words)
        for child in self.table.reap():
            self._note_exit(child)
        dead = dead_ranks([rank for rank in self.table.of(ROLE_WORKER) if rank.phase != Phase.EXITED])
        for rank in dead:
            rank.phase = Phase.EXITED
            let_go(rank, self._wakeups.unwatch)
        if dead:  # one loss, however many of the group
            self._lose_workers(death_of(dead), patience=0.0)

    def _take(self, report: object) -> None:
        try:
            if isinstance(report, ChildStarted | ChildReady):
                self._note_phase(report)
            elif isinstance(report, ChildFault):
                self._note_fault(report)
            elif isinstance(report, Pulse):
                child = take_pulse(self.table, report, time.monotonic())
                if child is not None and child.role == ROLE_SCHEDULER and child.progress:
                    self._replacements.step_ended()
            elif isinstance(report, WorkersFault):
                if self.table.find(ROLE_SCHEDULER, report.replica, report.epoch) is not None:
                    self._lose_workers(f"workers: {report.message}")
            elif isinstance(report, LoadProgress) and self._phase < Phase.READY:
                self._progress.show(report)
            elif isinstance(report, RankWarning):
                pass_on(report)
        except KeyError:
            logger.warning("a report came from an unknown process: %s", report)

    def _note_phase(self, report: ChildStarted | ChildReady) -> None:
        child = self.table.find(report.role, report.index, report.epoch)
        if child is None:
            return
        if isinstance(report, ChildStarted):
            self.table.started(report)
            if child.role == ROLE_WORKER:
                heard(child, time.monotonic())  # it may stop or hang before its first pulse
            # Ranks behind --cluster-host may be on another host, where their pids mean nothing to us.
            if child.role == ROLE_WORKER and self._config.parallel.cluster_host is None:
                process_file = hold_rank(child)
                if process_file is not None:
                    self._wakeups.watch(process_file)
        else:
            self.table.ready(report)
            if child.role != ROLE_GATEWAY:
                heard(child, time.monotonic())
        logger.debug("%s is %s (%.2f s)", child.name, child.phase.name, self._progress.seconds())

    def _note_fault(self, report: ChildFault) -> None:
        child = self.table.children[report.role, report.index]
        self._fingerprints.refused(report.fingerprint)
        if report.role == ROLE_WORKER and report.epoch != child.epoch:
            return
        child.fault, child.peer_lost = report.message, report.peer_lost
        if report.role == ROLE_WORKER:  # it has no exit status that we could wait for
            self._lose_workers(f"{report.role} {report.index}: {report.message}")

    def _note_exit(self, child: ChildState) -> None:
        is_told = self._is_stopping or (self._is_draining and child.role == ROLE_GATEWAY)
        if child.fault is None:
            was_killed = child.process is not None and (child.process.returncode or 0) < 0  # it had no time for words
            self._hear_last_words(0.0 if is_told or was_killed else _LAST_WORD_PATIENCE)
        if is_told:
            if child.process is not None and child.process.returncode not in (0, -GIVE_UP_SIGNAL):
                logger.warning("%s", exit_words(child))
        else:
            self._lose(child, exit_words(child))

    def _hear_last_words(self, patience: float) -> None:
        for report in self._wakeups.reports(patience):
            self._take(report)

    # -- replacing ------------------------------------------------------------------------------------------------

    def _find_hang(self) -> None:
        """What has not been heard of for too long is killed and replaced."""
        if self._workers.prepares_spare or any(r.phase == Phase.SPAWNED for r in self.table.of(ROLE_WORKER)):
            self._strays.kill_stopped(time.monotonic())
        for child, words in self._watch.look(list(self.table.children.values()), time.monotonic()):
            if child.role == ROLE_WORKER:
                self._lose_workers(words, patience=0.0)
            else:
                kill_all([child])
                self._lose(child, words)

    def _lose_workers(self, words: str, patience: float = _LAST_WORD_PATIENCE) -> None:
        """The worker group cannot go on: kill it, tell the scheduler, start another one in a new epoch."""
        if self._phase < Phase.READY or self._is_stopping:
            self._fail(words)
            return
        epoch = self.epoch
        ranks = self.table.of(ROLE_WORKER)
        if not any(rank.fault for rank in ranks):
            self._hear_last_words(patience)  # perhaps a rank says why; then we come here again, and are done
            if self.epoch != epoch or self.fault is not None:
                return
        faulted = any(rank.fault is not None and not rank.peer_lost for rank in ranks)
        kill_ranks(ranks)
        delay = self._begin_recovery(words)
        if delay is None:
            return
        for rank in ranks:
            let_go(rank, self._wakeups.unwatch)
        self.table.renew(ROLE_WORKER, self.epoch)
        self._scheduler.epoch = self.epoch
        if self._scheduler.phase == Phase.READY:
            self._scheduler.phase = Phase.STARTED
        self._wakeups.order(WorkersLost(self.epoch, faulted))
        self._workers.replace(self.epoch, delay, self._fingerprints.known())

    def _lose(self, child: ChildState, words: str) -> None:
        if self._phase < Phase.READY:
            self._fail(words)
        elif child.role == ROLE_SCHEDULER:
            self._lose_scheduler(words)
        else:
            self._lose_gateway(child, words)

    def _lose_scheduler(self, words: str) -> None:
        """The scheduler is dead: start another one in a new epoch. The worker group stays."""
        delay = self._begin_recovery(words)
        if delay is not None:
            self.table.renew(ROLE_SCHEDULER, self.epoch)
            self._replacements.schedule(ROLE_SCHEDULER, self._scheduler.index, time.monotonic() + delay)

    def _lose_gateway(self, child: ChildState, words: str) -> None:
        """A gateway is dead, its connections with it: start another one. Nothing else is concerned."""
        logger.error("%s", words)
        if self._is_draining:  # another one would take no requests
            return
        now = time.monotonic()
        delay = self._replacements.gateway_died(now)
        if delay is None:
            self._fail(f"given up: gateways die again and again ({words})")
            return
        self.table.renew_gateway(child.index)
        self._replacements.schedule(ROLE_GATEWAY, child.index, now + delay)

    def _begin_recovery(self, words: str) -> float | None:
        """Raise the epoch; seconds until the replacement may start, None if that was once too often."""
        logger.error("%s", words)
        delay = self._replacements.engine_died(time.monotonic(), counts=not self._fingerprints.was_refused())
        if delay is None:
            self._fail(f"given up: nothing worked between one death and the next, again and again ({words})")
            return None
        self.epoch += 1
        return delay

    def _fail(self, words: str) -> None:
        """The server cannot go on. The first cause counts; what it drags along is only logged."""
        if self._is_stopping:
            logger.debug("while stopping: %s", words)
            return
        self._progress.close()
        if self.fault is None:
            self.fault = words
            logger.error("%s", words)

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Gateways drain, then the scheduler goes, then the workers. A second signal, or a fault, shortens it."""
        self._progress.stopping()
        gateways = self.table.of(ROLE_GATEWAY)
        if self.fault is None and (self._phase == Phase.READY or any(one.phase == Phase.READY for one in gateways)):
            # Who is late is not waited for: a gateway that is ready may have streams, and the engine serves them.
            self._phase, self._is_draining = Phase.READY, True
            self.table.leave_out_dead(ROLE_GATEWAY)
            self._end(ROLE_GATEWAY, self._config.server.drain_timeout + DRAIN_MARGIN)
        self._is_stopping = True
        self._workers.expect_end()
        self._end(ROLE_GATEWAY, FAULT_PATIENCE, signal.SIGTERM if self.fault is None else GIVE_UP_SIGNAL)
        self._end(ROLE_SCHEDULER, STOP_TIMEOUT, GIVE_UP_SIGNAL)  # there is no next one for its ranks
        if not self._workers.stop(WORKERS_TIMEOUT):
            logger.error("the workers did not stop within %g s", WORKERS_TIMEOUT)

    def _end(self, role: str, timeout: float, number: signal.Signals = signal.SIGTERM) -> None:
        """A signal to all of a role; SIGKILL to those that are still there after `timeout` seconds."""
        send_signal(self.table.alive(role), number)
        deadline = time.monotonic() + timeout
        while self.table.alive(role) and self._stop_signals <= 1 and (left := deadline - time.monotonic()) > 0:
            if self._is_stopping:
                self._turn(left)
                continue
            self._tend(min(left, _TICK))
            if self.fault is not None:  # nobody can drain any more: those that wait are told so
                return
        late = self.table.alive(role)
        if late:
            logger.warning("killing %s", ", ".join(child.name for child in late))
            kill_all(late)


def run_supervisor(config: ServeConfig, run_dir: RunDir) -> int:
    """Serve with the real processes until a signal; returns the exit status."""
    with Supervisor(config, run_dir, standard_launch(config, run_dir)) as supervisor:
        return supervisor.run()
