"""Real processes around a real supervisor, without a model: `python fake_children.py server|child ...`.

A child reports like a real one, writes what happens to it into a log file, and misbehaves as told.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from novainfer.config import ParallelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints.fleet import Fleet
from novainfer.entrypoints.launch import FleetLaunch, Launch
from novainfer.entrypoints.serve import run_directory
from novainfer.entrypoints.supervisor import Supervisor
from novainfer.errors import EngineError
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    GIVE_UP_SIGNAL,
    ORDERS_SCHEMA,
    ROLE_SCHEDULER,
    ROLE_WORKER,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
    RankWarning,
)
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import bind_pull, connect_push
from novainfer.transport.parent import die_with_parent

RANK = "import signal; from novainfer.transport.parent import *; die_with_parent(); print(flush=True); signal.pause()"


def note(log: Path, *words: object) -> None:
    """One line, appended in one write."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


class FakeWorkers:
    """A worker group that never computes.

    `die-once` kills the first one when it is to prepare a spare, `die-twice` the next one too; a file `die` beside the
    log kills whichever is there. `processes`: each rank is a process.

    Rank r has room for 8 - r blocks. `spare-fails`: no spare ever stands by. Groups have the `fingerprints` in turn.
    """

    def __init__(self, run_dir: RunDir, log: Path, behaviour: str, world_size: int, fingerprints: str) -> None:
        self._run_dir, self._log, self._behaviour, self._world_size = run_dir, log, behaviour, world_size
        self._has_spare = False
        self._deaths_left = {"die-once": 1, "die-twice": 2}.get(behaviour, 0)
        self._fingerprints = fingerprints
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, epoch: int, known: Sequence[str], is_wanted: Callable[[], bool], num_blocks: int | None = None
    ) -> None:
        note(self._log, "workers of epoch", epoch)
        note(self._log, "known", "".join(known))
        fingerprint = self._fingerprints[min(epoch, len(self._fingerprints)) - 1]
        self._is_alive = True
        if self._behaviour == "no-start":
            raise RuntimeError("no room for the ranks")
        with zmq.Context() as context:
            reports = connect_push(context, self._run_dir.supervisor())
            for rank in range(self._world_size):
                pid = self._start_process(rank) if self._behaviour == "processes" else os.getpid()
                reports.send(SUPERVISOR_SCHEMA.encode(ChildStarted(ROLE_WORKER, rank, pid, epoch=epoch)))
                reports.send(SUPERVISOR_SCHEMA.encode(LoadProgress(rank, "weights", 1, 2)))
                if self._behaviour == "warn":
                    warning = RankWarning(rank, epoch, logging.WARNING, "slow kernels")
                    reports.send(SUPERVISOR_SCHEMA.encode(warning))
                if self._behaviour == "fault":
                    reports.send(SUPERVISOR_SCHEMA.encode(ChildFault(ROLE_WORKER, rank, epoch, "out of memory")))
                if rank == 0 and known and fingerprint not in known:
                    strange = ChildFault(ROLE_WORKER, rank, epoch, "it is strange", fingerprint=fingerprint)
                    reports.send(SUPERVISOR_SCHEMA.encode(strange))
                    continue
                ready = ChildReady(ROLE_WORKER, rank, epoch, 8 - rank, "" if rank else fingerprint)
                reports.send(SUPERVISOR_SCHEMA.encode(ready))
            reports.close()

    def _start_process(self, rank: int) -> int:
        process = subprocess.Popen([sys.executable, "-c", RANK, "novainfer: worker"], stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        note(self._log, "worker", rank, "pid", process.pid)
        return process.pid

    def is_alive(self) -> bool:
        order = self._log.with_name("die")
        if order.exists():
            order.unlink()
            self._is_alive = False
        return self._is_alive and self._behaviour != "die"

    def prepare(self, num_blocks: int, known: Sequence[str]) -> None:
        note(self._log, "prepare", num_blocks)
        note(self._log, "known", "".join(known))
        self._has_spare = True
        if self._deaths_left > 0:
            self._deaths_left, self._is_alive = self._deaths_left - 1, False

    def tend(self) -> bool:
        if self._has_spare and self._behaviour == "spare-fails":
            self._has_spare = False
            raise EngineError("it will not stand")
        return self._has_spare

    def end(self) -> None:
        self._kill_processes()
        note(self._log, "workers ended")

    def stop(self) -> None:
        self._kill_processes()
        note(self._log, "workers stopped")

    def _kill_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def run_server(options: argparse.Namespace) -> int:
    """A supervisor over fake children; `--behave {"gateway": ..., "scheduler": ..., "worker": ...}`."""
    logging.basicConfig(level=options.log_level)
    behaviour = json.loads(options.behave)
    log = Path(options.log)
    config = ServeConfig(
        server=ServerConfig(
            port=1,
            num_gateways=2,
            run_dir=options.run_dir,
            start_timeout=options.start_timeout,
            max_restarts=options.max_restarts,
            hang_timeout=600.0,  # nobody here sends a pulse
            stall_timeout=600.0,
        ),
        parallel=ParallelConfig(tensor_parallel_size=2, spare_workers=options.spare_workers, replicas=options.replicas),
    )
    with run_directory(config) as run_dir:

        def child(role: str, index: int) -> list[str]:
            what = behaviour.get(f"{role} {index}", behaviour.get(role, "normal"))
            place = ("--run-dir", str(run_dir.path), "--log", str(log), "--role", role, "--index", str(index))
            return [options.program, __file__, "child", *place, "--behave", what]

        def gateway(index: int, epoch: int, port: int) -> list[str]:
            return [*child("gateway", index), "--epoch", str(epoch)]

        if options.replicas is not None:
            replicas = FleetLaunch(gateway, lambda index, epoch: [*child("replica", index), "--epoch", str(epoch)])
            with Fleet(config, run_dir, replicas) as fleet:
                return fleet.run()
        launch = Launch(
            gateway=gateway,
            scheduler=lambda epoch, group: [*child("scheduler", 0), "--epoch", str(epoch), "--group", str(group)],
            workers=lambda: FakeWorkers(
                run_dir, log, behaviour.get("worker", "normal"), 2, behaviour.get("prints", "a")
            ),
        )
        with Supervisor(config, run_dir, launch) as supervisor:
            return supervisor.run()


def run_child(options: argparse.Namespace) -> int:
    """Report, wait for SIGTERM, exit 0; unless told otherwise. `drain`: when a file `drained` is beside the log.

    `late`: it is never ready; `once`: no successor is.
    """
    die_with_parent()
    stop, give_up = threading.Event(), threading.Event()
    name = f"{options.role} {options.index}"

    def obey_signal(number: int, frame: object) -> None:
        stop.set()
        if number == GIVE_UP_SIGNAL:
            give_up.set()

    for number in (signal.SIGTERM, GIVE_UP_SIGNAL):
        signal.signal(number, obey_signal)
    note(Path(options.log), name, "pid", os.getpid())
    run_dir = RunDir(Path(options.run_dir))
    with zmq.Context() as context:
        reports = connect_push(context, run_dir.supervisor())
        started = ChildStarted(options.role, options.index, os.getpid(), 4321, options.epoch)
        reports.send(SUPERVISOR_SCHEMA.encode(started))
        if options.behave == "exit":
            reports.send(SUPERVISOR_SCHEMA.encode(ChildFault(options.role, options.index, 1, "the disk is full")))
            reports.close()
            return 7
        if options.role == ROLE_SCHEDULER:  # before it is ready: then it may be told to end at once
            note(Path(options.log), name, "epoch", options.epoch, "group", options.group)
        if options.behave != "late" and (options.behave != "once" or options.epoch == FIRST_EPOCH):
            reports.send(SUPERVISOR_SCHEMA.encode(ChildReady(options.role, options.index, options.epoch)))
        if options.role == ROLE_SCHEDULER:
            obey(bind_pull(context, run_dir.orders(0)), reports, stop)
        reports.close()
        while not stop.wait(0.05) or options.behave == "stubborn":
            pass
        if options.behave == "drain":
            sys.stderr.write(f"{name} drains\n")
            while not Path(options.log).with_name("drained").exists() and not give_up.wait(0.05):
                pass
            note(Path(options.log), name, "gave up" if give_up.is_set() else "drained")
    if options.role == ROLE_SCHEDULER and give_up.is_set():
        note(Path(options.log), name, "ends its ranks")
    note(Path(options.log), name, "stopped")
    return 0


def obey(orders: zmq.Socket[bytes], reports: zmq.Socket[bytes], stop: threading.Event) -> None:
    """A scheduler whose ranks are always there."""
    while not stop.is_set():
        if orders.poll(50):
            epoch = ORDERS_SCHEMA.decode(orders.recv()).epoch
            reports.send(SUPERVISOR_SCHEMA.encode(ChildReady(ROLE_SCHEDULER, 0, epoch)))
    orders.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("server", "child"))
    for flag in ("--run-dir", "--log", "--role"):
        parser.add_argument(flag)
    parser.add_argument("--program", default=sys.executable)  # what runs the children
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=FIRST_EPOCH)
    parser.add_argument("--group", type=int, default=FIRST_EPOCH)
    parser.add_argument("--behave", default="{}")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--spare-workers", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=600.0)
    parser.add_argument("--max-restarts", type=int, default=ServerConfig().max_restarts)
    parsed = parser.parse_args()
    sys.exit(run_server(parsed) if parsed.what == "server" else run_child(parsed))
