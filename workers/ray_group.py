"""Ray as the launcher of worker ranks: placement, life and death. Nothing of a step goes through it.

Lives in the supervisor, or in the process of the offline engine; with `ray_instance` the only module that knows Ray.
Torch is imported in the actors alone.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from typing import Any

from novainfer.config import ParallelConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.transport.addresses import RunDir
from workers.launch import RankLaunch, RankPlace
from workers.ray_instance import RayInstance, import_ray, session_dir

logger = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT = 60.0  # seconds
_KILL_PATIENCE = 5.0  # seconds


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
        meeting_point = os.path.join(session_dir(), launch.place.meeting_point)
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
        self._ray = RayInstance(config.parallel, run_dir.path)
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

    def prepare(self) -> None:
        """Start processes that import everything, for the next ranks. Not on GPUs: Ray deals them out at a start."""
        if not self._use_gpu and not self._spares:
            self._spares = [self._new_actor(rank) for rank in range(self._config.parallel.tensor_parallel_size)]
            for spare in self._spares:
                spare.prepare.remote()

    def end(self) -> None:
        """Kill the ranks, and wait until Ray has seen them end."""
        if not self._ray.is_there():  # it would be waited for; `start` begins anew
            return
        for actor in self._actors:
            import_ray().kill(actor, no_restart=True)
        if self._runs:
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
            for actor in self._actors + self._spares:
                ray.kill(actor, no_restart=True)
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)
        self._ray.stop()
        self._actors, self._spares, self._runs, self._placement = [], [], [], None

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
        """One actor per rank: the spare ones, if there are any."""
        meeting_point = self._meeting_point(epoch)
        self._actors = self._spares or [
            self._new_actor(rank) for rank in range(self._config.parallel.tensor_parallel_size)
        ]
        self._spares = []
        for rank, actor in enumerate(self._actors):
            self._runs.append(actor.run.remote(self._launch(rank, epoch, meeting_point).to_json()))

    def _new_actor(self, rank: int) -> Any:
        ray = import_ray()
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


def _node_of(placement: Any) -> str:
    """The address and id of the one node that a placement group has been packed on."""
    ray = import_ray()
    node_id = ray.util.placement_group_table(placement)["bundles_to_node_id"][0]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return f"{addresses.get(node_id)} (Ray node {node_id})"


def _set_title(title: str) -> None:
    """Ray has taken the process title over, so only its own function changes it."""
    import ray._raylet

    raylet: Any = ray._raylet
    if hasattr(raylet, "setproctitle"):
        raylet.setproctitle(title)


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
