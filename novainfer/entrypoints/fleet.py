"""The supervisor of a server with several replicas: owns them and the gateways. Knows no request.

Each replica is a supervisor of its own (`replica_process.py`), which mends what it can; here is mended what it cannot.
`roster.py` has what is known of each replica, and what is to become of it.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from types import TracebackType

import zmq

from novainfer.config import ServeConfig
from novainfer.engine.restarts import GATEWAY_STABLE_SECONDS, Restarts
from novainfer.entrypoints.children import ChildState, Phase, exit_words, is_stopped, kill_all, send_signal, spawn
from novainfer.entrypoints.launch import FleetLaunch, fleet_launch
from novainfer.entrypoints.progress import StartProgress, exit_status
from novainfer.entrypoints.roster import Replica, Roster
from novainfer.entrypoints.standby import FIRST_DELAY, Standbys
from novainfer.entrypoints.vitals import forgive, hang, heard
from novainfer.entrypoints.wakeups import Wakeups
from novainfer.errors import ConfigError, ProtocolError
from novainfer.protocol.supervision import (
    ADD,
    CONTROL_SCHEMA,
    DRAIN,
    FIRST_EPOCH,
    GIVE_UP_SIGNAL,
    LIST,
    RESTART,
    ROLE_GATEWAY,
    ROLE_REPLICA,
    ChildFault,
    ChildReady,
    ChildStarted,
    GatewayPulse,
    Refused,
    ReplicaCommand,
    ReplicaPulse,
)
from novainfer.transport.addresses import RunDir

logger = logging.getLogger(__name__)

DRAIN_MARGIN = 5.0  # seconds beyond drain_timeout that a gateway may take to exit
REPLICA_TIMEOUT = 45.0  # seconds for a replica to end its scheduler and workers
FAULT_PATIENCE = 5.0  # seconds for the gateways to end their streams when the engines are gone
_TICK = 0.25  # seconds between two looks at who is silent
_AWAY = 0.5  # seconds without a look, after which nobody's silence counts


class Fleet:
    """One server's life, from the first process to the last. One thread changes its state."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, launch: FleetLaunch) -> None:
        self._config = config
        self._launch = launch
        self._wakeups = Wakeups(run_dir)
        self._control = self._wakeups.listen(run_dir.control())
        self._gateways = {
            index: ChildState(ROLE_GATEWAY, index, FIRST_EPOCH) for index in range(config.server.num_gateways)
        }
        self._roster = Roster(config, run_dir)
        self._standbys = Standbys(launch.standbys, FIRST_DELAY)
        self._gateway_restarts = Restarts(config.server.max_restarts, GATEWAY_STABLE_SECONDS)
        self._due: dict[int, float] = {}  # gateways, and when they are to be started
        self._misses_gateway = False  # one has died, and not all are ready again
        self._progress = StartProgress()
        self._ready_by = time.monotonic() + config.server.start_timeout
        self._has_served = False
        self._last_look = float("inf")
        self._stop_signals = 0  # SIGTERM, SIGINT or SIGHUP so far; the second ends the patience
        self._is_draining = False  # no gateway is replaced any more
        self._is_stopping = False  # nor a replica
        self._fault: str | None = None

    def __enter__(self) -> Fleet:
        self._wakeups.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing that was started may live on, whatever went wrong."""
        kill_all(self._alive())
        self._standbys.close()
        self._control.close(linger=200)
        self._wakeups.__exit__(kind, error, trace)

    def run(self) -> int:
        """Start, serve until a signal or a fault, stop. Returns the exit status of the process."""
        for _ in range(self._config.parallel.replicas or 1):
            self._roster.add()
        self._start_replicas(time.monotonic())
        for gateway in self._gateways.values():
            self._start_gateway(gateway)
        try:
            while self._fault is None and not self._stop_signals:
                self._turn(_TICK)
                self._look_around(time.monotonic())
                self._carry_out(time.monotonic())
        finally:
            self._stop()
        return exit_status(self._fault)

    def _start_gateway(self, gateway: ChildState) -> None:
        try:
            self._standbys.spawn(gateway, self._launch.gateway(gateway.index, gateway.epoch, gateway.port))
        except OSError as error:  # no process or memory is left: as if it had died at once
            self._lose_gateway(gateway, f"{gateway.name} cannot be started: {error}")

    def _start_replicas(self, now: float) -> None:
        self._roster.catch_up(now)
        for replica in self._roster.take_due(now):
            child = replica.child
            try:
                self._roster.furnish(replica)
                spawn(child, self._launch.replica(child.index, child.epoch))
            except (OSError, ConfigError) as error:  # its files, or the process: as if it had died at once
                self._lose_replica(replica, f"{child.name} cannot be started: {error}")

    def _alive(self, role: str | None = None) -> list[ChildState]:
        children = [*self._gateways.values(), *(replica.child for replica in self._roster)]
        return [c for c in children if role in (None, c.role) and c.process is not None and c.phase != Phase.EXITED]

    # -- one turn -----------------------------------------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen and take note of it."""
        signals, reports = self._wakeups.wait(timeout)
        for number in signals:
            if number != signal.SIGCHLD:
                self._stop_signals += 1
                logger.info("got %s", number.name)
        for report in reports:
            self._take(report)
        self._answer_commands()
        for child in self._alive():
            if child.process is not None and child.process.poll() is not None:
                child.phase = Phase.EXITED
                self._note_exit(child)

    def _look_around(self, now: float) -> None:
        """What is due, what hangs, who serves."""
        self._progress.turn(self._has_served)
        self._start_replicas(now)
        for index in [index for index, at in self._due.items() if at <= now]:
            del self._due[index]
            if not self._is_draining:
                self._start_gateway(self._gateways[index])
        self._find_hang(now)
        gateways_serve = all(child.phase == Phase.READY for child in self._gateways.values())
        if not self._has_served and gateways_serve and self._roster.all_ready():
            self._has_served = True
            self._progress.announce(self._config, self._gateways[0].port)
        elif not self._has_served and now > self._ready_by:
            late = [c.name for c in self._alive() if c.phase < Phase.READY]
            self._fail(f"not ready after {self._config.server.start_timeout:g} s; still waiting for {', '.join(late)}")
        if self._has_served and gateways_serve and not self._is_draining:
            self._prepare(now)

    def _carry_out(self, now: float) -> None:
        """What has become of the replicas that are to go."""
        for child in self._roster.drained(list(self._gateways.values()), now):
            send_signal([child], signal.SIGTERM)

    def _prepare(self, now: float) -> None:
        """Get ready for the next death of a gateway, whatever replicas do."""
        self._gateway_restarts.serves(now)
        self._standbys.prepare(now)
        if self._misses_gateway:
            self._misses_gateway = False
            logger.info("all gateways serve again")

    def _find_hang(self, now: float) -> None:
        away, self._last_look = now - self._last_look, now
        children = self._alive()
        if away > _AWAY:
            forgive(children, now)
        for child in children:
            found = hang([child], self._config.server, now, is_stopped=is_stopped)
            if found is not None:
                logger.error("%s", found[1])
                kill_all([child])
                self._note_exit(child)

    def _take(self, report: object) -> None:
        now = time.monotonic()
        if isinstance(report, GatewayPulse):
            gateway = self._child(ROLE_GATEWAY, report.index, report.epoch)
            if gateway is not None:
                heard(gateway, now)
                self._roster.note_gateway(report)
        elif isinstance(report, ReplicaPulse):
            replica = self._child(ROLE_REPLICA, report.index, report.epoch)
            if replica is not None:
                heard(replica, now)
                self._roster.note_pulse_of(report.index, serves=report.serves)
        elif isinstance(report, ChildStarted | ChildReady | ChildFault):
            child = self._child(report.role, report.index, report.epoch)
            if child is not None:
                self._note_phase(child, report)
        else:
            logger.warning("a report that no gateway or replica sends: %s", report)

    def _child(self, role: str, index: int, epoch: int) -> ChildState | None:
        """Who a report comes from; None if it has been replaced."""
        found = self._gateways.get(index) if role == ROLE_GATEWAY else self._roster.child(index)
        return found if found is not None and found.epoch == epoch else None

    def _note_phase(self, child: ChildState, report: ChildStarted | ChildReady | ChildFault) -> None:
        if isinstance(report, ChildFault):
            child.fault = report.message
            return
        phase = Phase.STARTED if isinstance(report, ChildStarted) else Phase.READY
        child.phase = max(child.phase, phase)
        if isinstance(report, ChildStarted):
            child.pid, child.port = report.pid, report.port
        elif child.role == ROLE_REPLICA:
            self._roster.serves(child.index, time.monotonic())
        logger.debug("%s is %s (%.2f s)", child.name, child.phase.name, self._progress.seconds())

    def _answer_commands(self) -> None:
        while True:
            try:
                command = CONTROL_SCHEMA.decode(self._control.recv(zmq.NOBLOCK))
                answer = self._obey(command)
            except zmq.Again:
                return
            except (ProtocolError, ConfigError) as error:
                answer = Refused(str(error))
            self._control.send(CONTROL_SCHEMA.encode(answer))

    def _obey(self, command: object) -> object:
        if not isinstance(command, ReplicaCommand):
            return Refused("this is not a command")
        refusal = None
        if command.action == ADD:
            logger.info("replica %d is added", self._roster.add().child.index)
        elif command.action == DRAIN:
            refusal = self._roster.drain(command.replicas)
        elif command.action == RESTART:
            refusal = self._roster.restart(command.replicas)
        elif command.action != LIST:
            refusal = f"there is no command {command.action!r}"
        return self._roster.listing() if refusal is None else Refused(refusal)

    # -- deaths -------------------------------------------------------------------------------------------------

    def _note_exit(self, child: ChildState) -> None:
        for report in self._wakeups.reports():  # its last words
            self._take(report)
        words = exit_words(child)
        if self._is_stopping or (self._is_draining and child.role == ROLE_GATEWAY):
            if child.process is not None and child.process.returncode not in (0, -GIVE_UP_SIGNAL):
                logger.warning("%s", words)
        elif child.role == ROLE_GATEWAY:
            self._lose_gateway(child, words)
        else:
            self._lose_replica(self._roster[child.index], words)

    def _lose_gateway(self, child: ChildState, words: str) -> None:
        now = time.monotonic()
        delay = self._gateway_restarts.delay(now)
        if not self._has_served or delay is None:
            self._fail(words if delay is not None else f"given up: gateways die again and again ({words})")
            return
        logger.error("%s", words)
        self._roster.gateway_lost(child.index, now)
        self._gateways[child.index] = ChildState(ROLE_GATEWAY, child.index, child.epoch + 1, port=child.port)
        self._due[child.index] = now + delay
        self._misses_gateway = True

    def _lose_replica(self, replica: Replica, words: str) -> None:
        if not self._has_served and not replica.is_late:
            self._fail(words)
        elif self._roster.ended(replica, time.monotonic()):
            logger.info("%s has ended, as it was told to", replica.child.name)
        else:
            logger.error("%s", words)
            if self._roster.is_hopeless():
                self._fail(f"given up: no replica serves, and they die again and again ({words})")

    def _fail(self, words: str) -> None:
        """The server cannot go on. The first cause counts."""
        self._progress.close()
        if self._fault is None and not self._is_stopping:
            self._fault = words
            logger.error("%s", words)

    # -- stopping -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Gateways drain, then the replicas go. A second signal, or a fault, shortens it."""
        self._progress.stopping()
        gateways = self._gateways.values()
        if self._fault is None and (self._has_served or any(one.phase == Phase.READY for one in gateways)):
            # Who is late is not waited for: a gateway that is ready may have streams, and some replica serves them.
            self._has_served = self._is_draining = True
            self._end(ROLE_GATEWAY, self._config.server.drain_timeout + DRAIN_MARGIN, signal.SIGTERM)
        self._is_stopping = True
        self._end(ROLE_GATEWAY, FAULT_PATIENCE, signal.SIGTERM if self._fault is None else GIVE_UP_SIGNAL)
        self._end(ROLE_REPLICA, REPLICA_TIMEOUT, signal.SIGTERM)

    def _end(self, role: str, timeout: float, number: signal.Signals) -> None:
        """A signal to all of a role; SIGKILL to those that are still there after `timeout` seconds."""
        send_signal(self._alive(role), number)
        deadline = time.monotonic() + timeout
        while self._alive(role) and self._stop_signals <= 1 and (left := deadline - time.monotonic()) > 0:
            if self._is_stopping:
                self._turn(left)
                continue
            self._turn(min(left, _TICK))
            self._look_around(time.monotonic())
            if self._fault is not None:  # nobody can drain any more: those that wait are told so
                return
        late = self._alive(role)
        if late:
            logger.warning("killing %s", ", ".join(child.name for child in late))
            kill_all(late)


def run_fleet(config: ServeConfig, run_dir: RunDir) -> int:
    """Serve with the real processes until a signal; returns the exit status."""
    with Fleet(config, run_dir, fleet_launch(config, run_dir)) as fleet:
        status = fleet.run()
    sys.stdout.flush()
    return status
