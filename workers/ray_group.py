"""Ray as the launcher of worker ranks: placement, life and death. Nothing of a step goes through it.

Lives in the supervisor, or in the process of the offline engine; with `ray_instance` the only module that knows Ray.
Torch is imported in the actors alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from novainfer.config import SPARES_ON_GPUS, ParallelConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.transport.addresses import RunDir
from workers.launch import RankLaunch, RankPlace
from workers.ray_instance import RayInstance, import_ray, session_dir
from workers.ray_spare import NextRanks

logger = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT = 60.0  # seconds
_KILL_PATIENCE = 5.0  # seconds
_NO_EPOCH = 0  # of a spare
_SPARE_NICENESS = 5


class RankActor:
    """What runs in an actor's process: one rank, for as long as it lives. Its calls run one after the other.

    A rank's life is `run`; that of a spare one is `stand_by`, then `ping` now and then, then perhaps `serve`.
    """

    def __init__(self) -> None:
        _keep_title()

    def prepare(self) -> None:
        """Import what a rank needs, while another process is still the rank."""
        import workers.step_loop
        import workers.worker  # noqa: F401

    def run(self, launch_json: str) -> None:
        """The life of the rank. Returns after Shutdown; whatever it raises ends the rank."""
        launch = _begin(launch_json)
        from workers.step_loop import run_rank

        run_rank(launch)

    def stand_by(self, launch_json: str) -> None:
        """Do all that a rank does before its first word; raises what makes that impossible."""
        self._launch = _begin(launch_json, " spare")
        from workers.worker import Worker

        with ThreadPoolExecutor(1, initializer=_yield_to_others) as pool:
            self._worker = pool.submit(Worker.build, self._launch.config, self._launch.place, _no_progress).result()

    def ping(self) -> None:
        """Return: it stands by."""

    def serve(self, epoch: int) -> None:
        """From now on it is a rank of this epoch; the rest is as in `run`."""
        launch = replace(self._launch, place=replace(self._launch.place, epoch=epoch))
        _set_title(launch)
        from workers.step_loop import run_rank

        run_rank(launch, self._worker)


class RayWorkerGroup:
    """The ranks of one replica as Ray actors on one host, epoch after epoch, and the Ray instance that holds them."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, *, replica: int = 0) -> None:
        self._config = config
        self._run_dir = run_dir
        self._replica = replica
        self._ray = RayInstance(config.parallel, run_dir.path)
        self._use_gpu = False
        self._placement: Any = None
        self._actors: list[Any] = []  # one actor handle per rank
        self._next: NextRanks | None = None  # on a CPU
        self._runs: list[Any] = []  # one object reference per rank, ready when the rank has ended

    def start(self, epoch: int) -> None:
        """Place one actor per rank, in the Ray instance that is there or else in a new one. Does not wait for loading.

        Call it from a thread that lives as long as the group. Importing Ray installs its SIGTERM handler in the main
        thread. Raises `ConfigError` if there are too few GPUs, `EngineError` if Ray has no room.
        """
        if self._ray.is_started and not self._ray.is_there():
            self.stop()
        if not self._ray.is_started:
            self._start_ray()
        if self._placement is None:
            self._reserve()
        self._place(epoch)

    def _start_ray(self) -> None:
        self._ray.start()
        self._use_gpu = _uses_gpu(self._config.parallel)
        if self._use_gpu and self._config.parallel.spare_workers:
            raise ConfigError(SPARES_ON_GPUS)
        # All ranks must choose alike, whatever each of them sees.
        device = "cuda" if self._use_gpu else "cpu"
        self._config = replace(self._config, parallel=replace(self._config.parallel, device=device))

    def is_alive(self) -> bool:
        """Whether every rank still lives; the reason of the first that does not is logged. Never waits."""
        if not self._runs:
            return False
        if not self._ray.is_there():
            logger.error("Ray has died")
            return False
        ended, _ = import_ray().wait(self._runs, timeout=0)
        for run in ended:
            logger.error("rank %d has ended: %s", self._runs.index(run), _reason(run))
        return not ended

    def prepare(self, num_blocks: int | None) -> None:
        """Start processes that import everything, for the next ranks, and with `num_blocks` a spare group.

        Not on GPUs: Ray deals them out at a start.
        """
        if self._use_gpu or self._next is not None:
            return
        ranks, launches = range(self._config.parallel.tensor_parallel_size), None
        if num_blocks is not None:
            meeting_point = self._meeting_point()
            launches = [self._launch(rank, _NO_EPOCH, meeting_point, num_blocks).to_json() for rank in ranks]
        server = self._config.server
        self._next = NextRanks(
            [self._new_actor(rank) for rank in ranks],
            launches,
            load_timeout=server.start_timeout,
            hang_timeout=server.hang_timeout,
        )

    def tend(self) -> bool:
        """Bring the spare group on: True once it stands by. Raises `EngineError` if it is lost. Never waits."""
        if self._next is None:
            return False
        try:
            return self._next.tend()
        except EngineError:
            self._next.kill()
            self._next = None
            raise

    def end(self) -> None:
        """Kill the ranks; on GPUs, which the next ones need, wait until Ray has seen them end."""
        if not self._ray.is_there():  # it would be waited for; `start` begins anew
            return
        for actor in self._actors:
            import_ray().kill(actor, no_restart=True)
        if self._runs and self._use_gpu:
            import_ray().wait(self._runs, num_returns=len(self._runs), timeout=_KILL_PATIENCE)
        self._actors, self._runs = [], []

    def stop(self, grace: float = 0.0) -> None:
        """Give ranks that were told to shut down `grace` seconds, kill the rest, end our Ray instance (idempotent).

        Other Ray instances on this host are not touched.
        """
        if self._ray.is_there():
            ray = import_ray()
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._next is not None:
                self._next.kill()
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)
        self._ray.stop()
        self._actors, self._next, self._runs, self._placement = [], None, [], None

    def _reserve(self) -> None:
        """Room for all ranks on one host: they meet in its file system and talk over its loopback."""
        ray = import_ray()
        world_size = self._config.parallel.tensor_parallel_size
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self._use_gpu else {})}
        if self._config.parallel.cluster_host is None:  # our sockets are in this host's file system
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._placement = ray.util.placement_group([bundle] * world_size, strategy="STRICT_PACK")
        if not self._placement.wait(_PLACEMENT_TIMEOUT):
            raise EngineError(f"Ray has no room on one host for {world_size} ranks with {bundle} each")
        logger.info("the ranks are on %s", _node_of(self._placement))

    def _place(self, epoch: int) -> None:
        """One actor per rank: those of a spare group that stands by, else new ones or those that only import."""
        following, self._next = self._next, None
        if following is not None and following.can_serve():
            self._actors = following.actors
            self._runs = [actor.serve.remote(epoch) for actor in self._actors]
            return
        if following is not None and following.has_begun_to_load:
            following.kill()
            following = None
        ranks = range(self._config.parallel.tensor_parallel_size)
        self._actors = [self._new_actor(rank) for rank in ranks] if following is None else following.actors
        meeting_point = self._meeting_point()
        launches = [self._launch(rank, epoch, meeting_point).to_json() for rank in ranks]
        self._runs = [actor.run.remote(launch) for actor, launch in zip(self._actors, launches, strict=True)]

    def _new_actor(self, rank: int) -> Any:
        ray = import_ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placement, rank)
        actor_class = ray.remote(
            num_cpus=0,  # the placement group holds the CPU, for this rank and the next one
            num_gpus=1 if self._use_gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )(RankActor)
        return actor_class.remote()

    def _meeting_point(self) -> str:
        """A new file in the run directory, which only this host has, or in that of Ray's session on the ranks' host."""
        name = f"ranks-{secrets.token_hex(16)}"
        return name if self._config.parallel.cluster_host is not None else str(self._run_dir.path / name)

    def _launch(self, rank: int, epoch: int, meeting_point: str, num_blocks: int | None = None) -> RankLaunch:
        config = replace(self._config, keys=())  # no business of a rank
        if num_blocks is not None:
            config = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
        return RankLaunch(
            config=config,
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


def _node_of(placement: Any) -> str:
    """The address and id of the one node that a placement group has been packed on."""
    ray = import_ray()
    node_id = ray.util.placement_group_table(placement)["bundles_to_node_id"][0]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return f"{addresses.get(node_id)} (Ray node {node_id})"


def _begin(launch_json: str, title: str = "") -> RankLaunch:
    """Make this process the rank that it is told to be."""
    launch = RankLaunch.from_json(launch_json)
    # A relative one is on the ranks' own host, which need not be the supervisor's.
    meeting_point = os.path.join(session_dir(), launch.place.meeting_point)
    launch = replace(launch, place=replace(launch.place, meeting_point=meeting_point))
    logging.basicConfig(level=launch.config.server.log_level.upper())
    _set_title(launch, title)
    return launch


def _yield_to_others() -> None:
    """Niceness is a thread's own on Linux, and cannot be taken back: so a thread of its own loads a spare rank."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SPARE_NICENESS)


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody waits."""


def _set_title(launch: RankLaunch, more: str = "") -> None:
    """Ray has taken the process title over, so only its own function changes it."""
    import ray._raylet

    raylet: Any = ray._raylet
    if hasattr(raylet, "setproctitle"):
        raylet.setproctitle(f"novainfer: worker {launch.replica}.{launch.place.rank}{more}")


def _keep_title() -> None:
    """Ray would give the process another title before and after each call. There is no public switch."""
    import ray._private.worker

    worker: Any = ray._private.worker
    if hasattr(worker, "_changeproctitle"):
        worker._changeproctitle = lambda title, next_title: contextlib.nullcontext()


def _uses_gpu(config: ParallelConfig) -> bool:
    """Whether every rank gets a GPU, from the configuration and what Ray sees on the host that has most."""
    if config.device == "cpu":
        return False
    found = int(max(node["Resources"].get("GPU", 0) for node in import_ray().nodes() if node["Alive"]))
    if config.device == "cuda" and found < config.tensor_parallel_size:
        wanted = config.tensor_parallel_size
        raise ConfigError(f"--tensor-parallel-size {wanted} on GPUs, but Ray sees at most {found} on one host")
    return found >= config.tensor_parallel_size


def _reason(run: Any) -> str:
    ray = import_ray()
    try:
        ray.get(run)
    except ray.exceptions.RayError as error:
        return str(error)
    return "it was told to"
