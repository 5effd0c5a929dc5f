"""The Ray instance that holds our ranks: a local one of our own, or a cluster that we join. Its start and its end.

Ray is imported when an instance starts, because its environment has to be set before. Every process of a local one
dies with ours: the kernel ends the servers when the thread that started them ends, and an actor ends with its raylet,
as agents that idle do, unless they are stopped (`_watch_agents` sees to others). It is deaf to the signals that reach
our process group, and silent on our terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from novainfer.config import ParallelConfig
from novainfer.errors import ConfigError
from novainfer.transport.addresses import check_space
from novainfer.transport.processes import RAY_SERVERS, StoppedProcesses, below, children_named, is_stopped, kill, runs
from novainfer.transport.replicas import RAY_DIR
from novainfer.transport.short_dir import make_short_dir, remove_short_dir
from workers.ray_lean import has_idle_agents, lean

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; we put nothing there
_LONGEST_TEMP_DIR = 40  # bytes; Ray appends up to 65 for its Unix sockets, which may have 107
_STOPPED_PATIENCE = 1.0  # seconds that a server may be stopped (SIGSTOP); as long as a rank
_END_PATIENCE = 5.0  # seconds that killed processes may take to be gone
# Read by Ray when it is imported, and by the servers of a local instance.
_ENVIRONMENT = {
    # See workers/__init__.py; torch may be loaded there before it.
    "OMP_WAIT_POLICY": "passive",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's C++ handler takes SIGTERM for a crash: it prints a stack and aborts us three seconds later.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray makes its workers nice to all others; on a CPU ours do the work that the others wait for.
    "RAY_worker_niceness": "0",
    # Ray's workers start while Ray itself is still starting: the zygotes of the ranks shall use that time.
    "RAY_preload_python_modules": "workers.ray_preload",
    # None: with its control store gone, Ray would try for five seconds to get rid of them before it lets us go on.
    "RAY_task_events_report_interval_ms": "0",
}
_LOCAL_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # all of a local instance listens on loopback alone
_WATCH = """
import sys, psutil
pids = set(map(int, sys.argv[1:]))
processes = [process for process in psutil.process_iter() if process.pid in pids]
sys.stdin.read()
for process in processes:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
"""


class RayInstance:
    """Started and stopped any number of times, by one thread that lives as long as it does."""

    def __init__(self, config: ParallelConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._watch: subprocess.Popen[bytes] | None = None
        self._servers: list[psutil.Process] = []  # of a local instance
        self._stopped = StoppedProcesses(_STOPPED_PATIENCE)
        self._is_broken = False  # a server has been killed
        self.is_started = False

    def start(self) -> None:
        """Start a local instance or join the cluster. Importing Ray installs its SIGTERM handler in the main thread.

        Raises `ConfigError` if this process is in an instance already: Ray knows but one.
        """
        if "ray" in sys.modules and import_ray().is_initialized():
            raise ConfigError(
                "this process uses Ray already, and can be in one Ray instance alone: end the other LLM first "
                "(its exit(), or a `with` block), or the program's own ray.init"
            )
        self.is_started = True
        began = time.monotonic()
        is_local = self._config.ray_address is None
        for name, value in (_ENVIRONMENT | _LOCAL_ENVIRONMENT if is_local else _ENVIRONMENT).items():
            os.environ.setdefault(name, value)
        # Which process must be dead for Ray's core to end ours. Not told, it takes a parent with the number 1 for that.
        os.environ["RAY_RAYLET_PID"] = str(os.getpid())
        if is_local:
            try:
                _start_local(self._config, self._run_dir)
            except BaseException:
                # One that was killed looks ended when its first thread is, before anybody can wait for it: `stop` does.
                self._servers = children_named(RAY_SERVERS, with_ended=True)
                raise
            self._servers = children_named(RAY_SERVERS)
            if not has_idle_agents():
                self._watch = _watch_agents(self._servers)
        else:
            import_ray().init(address=self._config.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        logger.debug("Ray runs (%.1f s)", time.monotonic() - began)

    def is_there(self) -> bool:
        """Whether it runs, as far as we can see: on another host we see nothing.

        A server that has been stopped for a while is killed: it may never go on, and calls wait for it.
        """
        self._break(self._stopped.look(self._servers, time.monotonic()))
        is_whole = self.is_started and not self._is_broken
        return is_whole and bool(import_ray().is_initialized()) and all(map(runs, self._servers))

    def expect_end(self) -> None:
        """Before `stop`, and before what is to be said to Ray at the end: nobody waits for a server that is stopped."""
        self._break([server for server in self._servers if is_stopped(server)])

    def _break(self, stopped: list[psutil.Process]) -> None:
        for server in stopped:
            logger.error("a server of Ray's (pid %d) was stopped", server.pid)
            kill(server)
            self._is_broken = True

    def stop(self) -> None:
        """End a local instance with all its processes, or leave the cluster (idempotent)."""
        if not self.is_started:
            return
        rest = [process for server in self._servers for process in below(server)]
        self.expect_end()
        if not self.is_there():
            for server in self._servers:
                kill(server)  # half an instance is of no use, and the rest of it would wait for the other half
        import_ray().shutdown()
        if self._watch is not None:
            try:
                self._watch.communicate(timeout=_END_PATIENCE)
            except subprocess.TimeoutExpired:  # stopped, too
                self._watch.kill()
                self._watch.communicate()
            self._watch = None
        for process in rest:
            kill(process)
        psutil.wait_procs(self._servers, timeout=_END_PATIENCE)  # also those whose start failed: Ray has forgotten them
        deadline = time.monotonic() + _END_PATIENCE
        while any(map(runs, rest)) and time.monotonic() < deadline:
            time.sleep(0.01)  # they are not our children: nothing tells us
        remove_short_dir(self._run_dir / RAY_DIR)
        self._servers = []
        self.is_started = self._is_broken = False


def import_ray() -> Any:
    """The module; its environment must have been set."""
    import ray

    return ray


def session_dir() -> str:
    """Where this node keeps the files of Ray's session."""
    import ray._private.worker

    worker: Any = ray._private.worker
    return str(worker._global_node.get_session_dir_path())


def _watch_agents(servers: list[psutil.Process]) -> subprocess.Popen[bytes]:
    """A small process that ends Ray's agents when our end of its standard input closes, however that happens.

    If this process is killed, the kernel takes the raylet and the ranks leave with it; the agents would stay a minute.
    """
    agents = [str(agent.pid) for server in servers if server.name() == "raylet" for agent in server.children()]
    return subprocess.Popen([sys.executable, "-c", _WATCH, *agents], stdin=subprocess.PIPE, start_new_session=True)


def _start_local(config: ParallelConfig, run_dir: Path) -> None:
    temp_dir = run_dir / RAY_DIR
    if len(os.fsencode(temp_dir)) > _LONGEST_TEMP_DIR:
        # Below it: Ray lets everybody into its own.
        temp_dir = make_short_dir(temp_dir, _LONGEST_TEMP_DIR - len(RAY_DIR) - 1) / RAY_DIR
    check_space(temp_dir)
    with lean(), _deaf():
        import_ray().init(
            address="local",
            num_cpus=config.tensor_parallel_size,
            num_gpus=0 if config.device == "cpu" else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(temp_dir),
        )
    _stop_at_once()


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started meanwhile hears no SIGTERM or SIGHUP: Ray's servers are in our process group, as a terminal or
    `timeout` signals it, but we say when they end. Ray itself does so with SIGINT. A signal mask is inherited.
    """
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _stop_at_once() -> None:
    """Let `ray.shutdown` kill the servers without a SIGTERM, and a second each, before."""
    import ray._private.worker

    worker: Any = ray._private.worker
    node: Any = getattr(worker, "_global_node", None)
    if hasattr(node, "kill_all_processes"):
        kill_all = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill_all(**{**how, "allow_graceful": False})
