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
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import zmq

from novainfer.config import ParallelConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.protocol.supervision import FIRST_EPOCH
from novainfer.transport.addresses import RunDir
from novainfer.transport.cluster import cluster_links
from workers.launch import RankLaunch, RankPlace

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; we put nothing there
_PLACEMENT_TIMEOUT = 60.0  # seconds
_LIVENESS_INTERVAL = 0.5  # seconds
_LONGEST_TEMP_DIR = 40  # bytes; Ray appends up to 65 for its Unix sockets, which may have 107
# Read by Ray when it is imported, and by the servers of a local instance.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's C++ handler takes SIGTERM for a crash: it prints a stack and aborts us three seconds later.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray makes its workers nice to all others; on a CPU ours do the work that the others wait for.
    "RAY_worker_niceness": "0",
    # See workers/__init__.py; torch may be loaded there before it.
    "OMP_WAIT_POLICY": "passive",
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
    """The ranks of one replica and epoch as Ray actors on one host, and the Ray instance that holds them."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, *, epoch: int, replica: int = 0) -> None:
        self._config = config
        self._run_dir = run_dir
        self._epoch = epoch
        self._replica = replica
        self._watch: subprocess.Popen[bytes] | None = None
        # A file in the run directory, which only this host has, or else in that of Ray's session on the ranks' host.
        stays_here = config.parallel.cluster_host is None
        self._meeting_point = str(run_dir.path / f"ranks-{replica}-{epoch}") if stays_here else secrets.token_hex(16)
        self._placement: Any = None
        self._actors: list[Any] = []  # one actor handle per rank
        self._runs: list[Any] = []  # one object reference per rank, ready when the rank has ended

    def start(self) -> None:
        """Start Ray, or join `ray_address`, and place one actor per rank. Takes seconds, but does not wait for loading.

        Call it from a thread that lives as long as the group. Importing Ray installs its SIGTERM handler in the main
        thread. Raises `ConfigError` if there are too few GPUs, `EngineError` if Ray has no room.
        """
        parallel = self._config.parallel
        began = time.monotonic()
        for name, value in (_ENVIRONMENT if parallel.ray_address else _ENVIRONMENT | _LOCAL_ENVIRONMENT).items():
            os.environ.setdefault(name, value)
        if parallel.ray_address is None:
            _start_local(parallel, self._run_dir.path)
            self._watch = _watch_agents()
        else:
            _ray().init(address=parallel.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        logger.debug("Ray runs (%.1f s)", time.monotonic() - began)
        use_gpu = _uses_gpu(parallel)
        # All ranks must choose alike, whatever each of them sees.
        device = "cuda" if use_gpu else "cpu"
        self._config = replace(self._config, parallel=replace(parallel, device=device))
        self._place(use_gpu)

    def is_alive(self) -> bool:
        """Whether every rank still lives; the reason of the first that does not is logged. Never waits."""
        if not self._runs:
            return False
        ended, _ = _ray().wait(self._runs, timeout=0)
        for run in ended:
            logger.error("rank %d has ended: %s", self._runs.index(run), _reason(run))
        return not ended

    def stop(self, grace: float = 0.0) -> None:
        """Give ranks that were told to shut down `grace` seconds, kill the rest, end our Ray instance (idempotent).

        Other Ray instances on this host are not touched.
        """
        ray = _ray()
        if ray.is_initialized():
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)
            ray.shutdown()
        if self._watch is not None:
            self._watch.communicate()
            self._watch = None
        self._actors, self._runs, self._placement = [], [], None

    def _place(self, use_gpu: bool) -> None:
        """One actor per rank, all on one host: they meet in its file system and talk over its loopback."""
        ray = _ray()
        world_size = self._config.parallel.tensor_parallel_size
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {})}
        if self._config.parallel.cluster_host is None:  # our sockets are in this host's file system
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._placement = ray.util.placement_group([bundle] * world_size, strategy="STRICT_PACK")
        if not self._placement.wait(_PLACEMENT_TIMEOUT):
            raise EngineError(f"Ray has no room on one host for {world_size} ranks with {bundle} each")
        logger.info("the ranks are on %s", _node_of(self._placement))
        for rank in range(world_size):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placement, rank)
            actor_class = ray.remote(
                num_cpus=1,
                num_gpus=1 if use_gpu else 0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
            )(RankActor)
            self._actors.append(actor_class.remote())
            self._runs.append(self._actors[-1].run.remote(self._launch(rank).to_json()))

    def _launch(self, rank: int) -> RankLaunch:
        return RankLaunch(
            config=replace(self._config, keys=()),  # no business of a rank
            replica=self._replica,
            place=RankPlace(
                rank=rank,
                world_size=self._config.parallel.tensor_parallel_size,
                epoch=self._epoch,
                meeting_point=self._meeting_point,
            ),
            scheduler=self._run_dir.workers(self._replica).for_client(),
            supervisor=self._run_dir.rank_reports().for_client(),
        )


class RayExecutor:
    """The engine's `Executor` over Ray workers of this process's own. For the offline `LLM` with several ranks."""

    def __init__(self, config: ServeConfig, *, epoch: int = FIRST_EPOCH) -> None:
        """Start everything and wait until all ranks have loaded. Raises `EngineError` if one fails or is too late."""
        run_dir = RunDir.create(None)
        self._remove_run_dir = weakref.finalize(self, shutil.rmtree, run_dir.path, True)
        self._links = ExitStack()
        self._links.enter_context(cluster_links(run_dir, config.parallel.cluster_host))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        world_size = config.parallel.tensor_parallel_size
        self._ranks = ZmqExecutor(run_dir.workers(0), world_size=world_size, epoch=epoch, context=self._context)
        self._group = RayWorkerGroup(config, run_dir, epoch=epoch)
        try:
            self._group.start()
            self._wait_ready(time.monotonic() + config.server.start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ExecutorInfo:
        """What the ranks agreed on."""
        return self._ranks.info

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank."""
        self._ranks.submit(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest unanswered step's result. Raises `EngineError` if a rank failed or died."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            result = self._ranks.collect(min(left, _LIVENESS_INTERVAL))
            if result is not None or left <= _LIVENESS_INTERVAL:
                return result
            self._check_alive()

    def close(self) -> None:
        """End the ranks and Ray (idempotent)."""
        self._ranks.close()
        self._group.stop()
        self._context.term()
        self._links.close()
        self._remove_run_dir()

    def _wait_ready(self, deadline: float) -> None:
        while self._ranks.try_ready() is None:
            if time.monotonic() > deadline:
                raise EngineError("the ranks have not loaded within --start-timeout")
            self._ranks.socket.poll(int(_LIVENESS_INTERVAL * 1000))
            self._check_alive()

    def _check_alive(self) -> None:
        if not self._group.is_alive():
            self._ranks.collect(0)  # raises what the rank said before it died
            raise EngineError("a worker died")


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


def _watch_agents() -> subprocess.Popen[bytes]:
    """A small process that ends Ray's agents when our end of its standard input closes, however that happens.

    If this process is killed, the kernel takes the raylet and the ranks leave with it; the agents would stay a minute.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    agents = [str(agent.pid) for raylet in raylets for agent in raylet.children()]
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
