"""Ray as the launcher of worker ranks: placement, life and death. Nothing of a step goes through it.

Lives in the supervisor, or in the process of the offline engine; the only module that knows Ray. Ray is imported when
the first group starts, because its environment has to be set before, and torch in the actors alone. Every Ray process
dies with ours: the kernel ends the servers when the thread that started them ends, and an actor ends with its raylet
(`_watch_agents` sees to the rest).
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from novainfer.config import ParallelConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.transport.addresses import RunDir
from workers.launch import RankLaunch, RankPlace

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; we put nothing there
_PLACEMENT_TIMEOUT = 60.0  # seconds
_KILL_PATIENCE = 5.0  # seconds
_RAY_SERVERS = ("raylet", "gcs_server")
_LONGEST_TEMP_DIR = 40  # bytes; Ray appends up to 65 for its Unix sockets, which may have 107
# Read by Ray when it is imported, and by the servers of a local instance.
_ENVIRONMENT = {
    # See workers/__init__.py; torch may be loaded there before it.
    "OMP_WAIT_POLICY": "passive",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's C++ handler takes SIGTERM for a crash: it prints a stack and aborts us three seconds later.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray makes its workers nice to all others; on a CPU ours do the work that the others wait for.
    "RAY_worker_niceness": "0",
    # A rank's process starts while Ray itself is still starting: let it use the time for the heaviest imports.
    "RAY_preload_python_modules": "torch,transformers.models.auto.configuration_auto",
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


class RankActor:
    """What runs in an actor's process: one rank, for as long as it lives."""

    def prepare(self) -> None:
        """Import what a rank needs, while another process is still the rank."""
        import workers.step_loop
        import workers.worker  # noqa: F401

    def run(self, launch_json: str) -> None:
        """The life of the rank. Returns after Shutdown; whatever it raises ends the rank."""
        launch = RankLaunch.from_json(launch_json)
        # A relative one is on the ranks' own host, which need not be the supervisor's.
        meeting_point = os.path.join(_session_dir(), launch.place.meeting_point)
        launch = replace(launch, place=replace(launch.place, meeting_point=meeting_point))
        logging.basicConfig(level=launch.config.server.log_level.upper())
        _set_title(f"novainfer: worker {launch.replica}.{launch.place.rank}")
        from workers.step_loop import run_rank

        run_rank(launch)


class RayWorkerGroup:
    """The ranks of one replica as Ray actors on one host, epoch after epoch, and the Ray instance that holds them."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, *, replica: int = 0) -> None:
        self._config = config
        self._run_dir = run_dir
        self._replica = replica
        self._watch: subprocess.Popen[bytes] | None = None
        self._servers: list[psutil.Process] = []  # of our own Ray instance
        self._is_started = False
        self._use_gpu = False
        self._placement: Any = None
        self._actors: list[Any] = []  # one actor handle per rank
        self._spares: list[Any] = []  # the same for the next group, on a CPU
        self._runs: list[Any] = []  # one object reference per rank, ready when the rank has ended

    def start(self, epoch: int) -> None:
        """Place one actor per rank, in the Ray instance that is there or else in a new one. Does not wait for loading.

        Call it from a thread that lives as long as the group. Importing Ray installs its SIGTERM handler in the main
        thread. Raises `ConfigError` if there are too few GPUs, `EngineError` if Ray has no room.
        """
        if self._is_started and not self._has_ray():
            self.stop()
        if not self._is_started:
            self._start_ray()
        if self._placement is None:
            self._reserve()
        self._place(epoch)

    def _has_ray(self) -> bool:
        """Whether the Ray instance is there, as far as we can see: on another host we see nothing."""
        return self._is_started and bool(_ray().is_initialized()) and all(_runs(process) for process in self._servers)

    def _start_ray(self) -> None:
        self._is_started = True
        parallel = self._config.parallel
        began = time.monotonic()
        for name, value in (_ENVIRONMENT if parallel.ray_address else _ENVIRONMENT | _LOCAL_ENVIRONMENT).items():
            os.environ.setdefault(name, value)
        if parallel.ray_address is None:
            _start_local(parallel, self._run_dir.path)
            self._servers = [child for child in psutil.Process().children() if child.name() in _RAY_SERVERS]
            self._watch = _watch_agents(self._servers)
        else:
            _ray().init(address=parallel.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        logger.debug("Ray runs (%.1f s)", time.monotonic() - began)
        self._use_gpu = _uses_gpu(parallel)
        # All ranks must choose alike, whatever each of them sees.
        device = "cuda" if self._use_gpu else "cpu"
        self._config = replace(self._config, parallel=replace(parallel, device=device))

    def is_alive(self) -> bool:
        """Whether every rank still lives; the reason of the first that does not is logged. Never waits."""
        if not self._runs:
            return False
        if not self._has_ray():
            logger.error("Ray has died")
            return False
        ended, _ = _ray().wait(self._runs, timeout=0)
        for run in ended:
            logger.error("rank %d has ended: %s", self._runs.index(run), _reason(run))
        return not ended

    def prepare(self) -> None:
        """Start processes that import everything, for the next ranks. Not on GPUs: Ray deals them out at a start."""
        if not self._use_gpu and not self._spares:
            self._spares = [self._new_actor(rank) for rank in range(self._config.parallel.tensor_parallel_size)]
            for spare in self._spares:
                spare.prepare.remote()

    def end(self) -> None:
        """Kill the ranks, and wait until Ray has seen them end."""
        if not self._has_ray():  # it would be waited for; `start` begins anew
            return
        for actor in self._actors:
            _ray().kill(actor, no_restart=True)
        if self._runs:
            _ray().wait(self._runs, num_returns=len(self._runs), timeout=_KILL_PATIENCE)
        self._actors, self._runs = [], []

    def stop(self, grace: float = 0.0) -> None:
        """Give ranks that were told to shut down `grace` seconds, kill the rest, end our Ray instance (idempotent).

        Other Ray instances on this host are not touched.
        """
        has_ray = self._has_ray()
        for server in self._servers if not has_ray else ():
            _kill(server)  # half a Ray instance is of no use, and the rest of it would wait for the other half
        if has_ray:
            ray = _ray()
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
            for actor in self._actors + self._spares:
                ray.kill(actor, no_restart=True)
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)
        if self._is_started:
            _ray().shutdown()
        if self._watch is not None:
            self._watch.communicate()
            self._watch = None
        self._actors, self._spares, self._runs, self._placement, self._servers = [], [], [], None, []
        self._is_started = False

    def _reserve(self) -> None:
        """Room for all ranks on one host: they meet in its file system and talk over its loopback."""
        ray = _ray()
        world_size = self._config.parallel.tensor_parallel_size
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self._use_gpu else {})}
        if self._config.parallel.cluster_host is None:  # our sockets are in this host's file system
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._placement = ray.util.placement_group([bundle] * world_size, strategy="STRICT_PACK")
        if not self._placement.wait(_PLACEMENT_TIMEOUT):
            raise EngineError(f"Ray has no room on one host for {world_size} ranks with {bundle} each")
        logger.info("the ranks are on %s", _node_of(self._placement))

    def _place(self, epoch: int) -> None:
        """One actor per rank: the spare ones, if there are any."""
        meeting_point = self._meeting_point(epoch)
        self._actors = self._spares or [
            self._new_actor(rank) for rank in range(self._config.parallel.tensor_parallel_size)
        ]
        self._spares = []
        for rank, actor in enumerate(self._actors):
            self._runs.append(actor.run.remote(self._launch(rank, epoch, meeting_point).to_json()))

    def _new_actor(self, rank: int) -> Any:
        ray = _ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placement, rank)
        actor_class = ray.remote(
            num_cpus=0,  # the placement group holds the CPU, for this rank and its spare
            num_gpus=1 if self._use_gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )(RankActor)
        return actor_class.remote()

    def _meeting_point(self, epoch: int) -> str:
        """A file in the run directory, which only this host has, or in that of Ray's session on the ranks' host."""
        stays_here = self._config.parallel.cluster_host is None
        return str(self._run_dir.path / f"ranks-{self._replica}-{epoch}") if stays_here else secrets.token_hex(16)

    def _launch(self, rank: int, epoch: int, meeting_point: str) -> RankLaunch:
        return RankLaunch(
            config=replace(self._config, keys=()),  # no business of a rank
            replica=self._replica,
            place=RankPlace(
                rank=rank,
                world_size=self._config.parallel.tensor_parallel_size,
                epoch=epoch,
                meeting_point=meeting_point,
            ),
            scheduler=self._run_dir.workers(self._replica).for_client(),
            supervisor=self._run_dir.rank_reports().for_client(),
        )


def _ray() -> Any:
    import ray

    return ray


def _node_of(placement: Any) -> str:
    """The address and id of the one node that a placement group has been packed on."""
    ray = _ray()
    node_id = ray.util.placement_group_table(placement)["bundles_to_node_id"][0]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return f"{addresses.get(node_id)} (Ray node {node_id})"


def _session_dir() -> str:
    """Where this node keeps the files of Ray's session."""
    import ray._private.worker

    worker: Any = ray._private.worker
    return str(worker._global_node.get_session_dir_path())


def _set_title(title: str) -> None:
    """Ray has taken the process title over, so only its own function changes it."""
    import ray._raylet

    raylet: Any = ray._raylet
    if hasattr(raylet, "setproctitle"):
        raylet.setproctitle(title)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _watch_agents(servers: list[psutil.Process]) -> subprocess.Popen[bytes]:
    """A small process that ends Ray's agents when our end of its standard input closes, however that happens.

    If this process is killed, the kernel takes the raylet and the ranks leave with it; the agents would stay a minute.
    """
    agents = [str(agent.pid) for server in servers if server.name() == "raylet" for agent in server.children()]
    return subprocess.Popen([sys.executable, "-c", _WATCH, *agents], stdin=subprocess.PIPE, start_new_session=True)


def _start_local(config: ParallelConfig, run_dir: Path) -> None:
    temp_dir = run_dir / "ray"
    with _without_dashboard():
        _ray().init(
            address="local",
            num_cpus=config.tensor_parallel_size,
            num_gpus=0 if config.device == "cpu" else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            # None is Ray's default, /tmp/ray.
            _temp_dir=str(temp_dir) if len(os.fsencode(temp_dir)) <= _LONGEST_TEMP_DIR else None,
        )


@contextmanager
def _without_dashboard() -> Iterator[None]:
    """Let `ray.init` start no dashboard, autoscaler or log forwarder: half of its start time, and we use none of them.

    `include_dashboard=False` still starts the dashboard's process and waits for it. There is no public switch, so its
    private ones are turned for the time of the call; a Ray version that has them no more starts everything.
    """
    try:
        import ray._private.node
        import ray._private.parameter
    except ImportError:
        yield
        return
    parameter: Any = ray._private.parameter
    node: Any = ray._private.node.Node
    modules: dict[str, Any] = sys.modules
    params, start_api_server = parameter.RayParams, node.start_api_server

    def lean_params(**kwargs: Any) -> Any:
        return params(**kwargs, no_monitor=True, include_log_monitor=False)

    def no_api_server(self: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = ""

    optional = "ray.dashboard.optional_deps"  # if it cannot be imported, the agents start as in a minimal installation
    modules[optional] = None
    parameter.RayParams, node.start_api_server = lean_params, no_api_server
    try:
        yield
    finally:
        parameter.RayParams, node.start_api_server = params, start_api_server
        del modules[optional]


def _uses_gpu(config: ParallelConfig) -> bool:
    """Whether every rank gets a GPU, from the configuration and what Ray sees on the host that has most."""
    if config.device == "cpu":
        return False
    found = int(max(node["Resources"].get("GPU", 0) for node in _ray().nodes() if node["Alive"]))
    if config.device == "cuda" and found < config.tensor_parallel_size:
        wanted = config.tensor_parallel_size
        raise ConfigError(f"--tensor-parallel-size {wanted} on GPUs, but Ray sees at most {found} on one host")
    return found >= config.tensor_parallel_size


def _reason(run: Any) -> str:
    ray = _ray()
    try:
        ray.get(run)
    except ray.exceptions.RayError as error:
        return str(error)
    return "it was told to"
