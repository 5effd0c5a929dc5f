"""Ray as the launcher of worker ranks: placement, life and death. Nothing of a step goes through it.

Lives in the supervisor, or in the process of the offline engine; with `ray_instance` the only module that knows Ray.
Torch is imported in the processes of the ranks alone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from novainfer.config import SPARES_ON_GPUS, ParallelConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.transport.addresses import RunDir
from workers.launch import RankLaunch, RankPlace
from workers.rank_host import MAX_CALLS, RankHost
from workers.ray_instance import RayInstance, import_ray
from workers.ray_spare import SpareRanks

logger = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT = 60.0  # seconds; for a Ray instance of our own, which gets no more room with time
_PLACEMENT_LOOK = 1.0  # seconds between two looks at whether there is room, or no need of it any more
_PLACEMENT_WORDS = 30.0  # seconds between two words about it
_KILL_PATIENCE = 5.0  # seconds
_END_PATIENCE = 0.5  # seconds
_NO_EPOCH = 0  # of a spare


class RayWorkerGroup:
    """The ranks of one replica, epoch after epoch: their hosts as Ray actors on one node, and the Ray instance."""

    def __init__(self, config: ServeConfig, run_dir: RunDir, *, replica: int = 0) -> None:
        self._config = config
        self._run_dir = run_dir
        self._replica = replica
        self._ray = RayInstance(config.parallel, run_dir.path)
        self._use_gpu = False
        self._placement: Any = None
        self._is_placed = False
        self._hosts: list[Any] = []  # an actor handle per rank
        self._epoch = _NO_EPOCH  # of the newest ranks
        self._spare: SpareRanks | None = None
        self._num_spares = 0  # groups that there have been
        self._runs: list[Any] = []  # one object reference per rank, ready when the rank has ended

    def start(
        self,
        epoch: int,
        known: Sequence[str] = (),
        is_wanted: Callable[[], bool] = lambda: True,
        num_blocks: int | None = None,
    ) -> None:
        """Start all ranks, in the Ray instance that is there or else in a new one. Does not wait for loading.

        known: the fingerprints that the group may have; none: any.
        is_wanted: whether to go on waiting for a cluster that has no room yet (its hosts may still be on their way).
        num_blocks: KV blocks of each rank; None: what there is room for.
        Call it from a thread that lives as long as the group. Importing Ray installs its SIGTERM handler in the main
        thread. Raises `ConfigError` if there are too few GPUs, `EngineError` if our own Ray instance has no room.
        """
        if self._ray.is_started and not self._ray.is_there():
            self.stop()
        if not self._ray.is_started:
            self._start_ray()
        if self._placement is None:
            self._reserve()
        if any(_has_lost_its_host(run) for run in self._runs):
            self._is_placed = False
        if self._is_placed or self._wait_for_room(is_wanted):
            self._is_placed = True
            self._place(epoch, known, num_blocks)

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

    def prepare(self, num_blocks: int, known: Sequence[str] = ()) -> None:
        """Begin to load a spare group whose ranks have so many KV blocks each, unless there is one."""
        if self._spare is not None:
            return
        server, meeting_point = self._config.server, self._meeting_point()
        launches = [
            self._launch(rank, _NO_EPOCH, meeting_point, known, num_blocks).to_json()
            for rank in range(len(self._hosts))
        ]
        self._num_spares += 1
        timeouts = {"load_timeout": server.start_timeout, "hang_timeout": server.hang_timeout}
        self._spare = SpareRanks(self._num_spares, self._hosts, launches, **timeouts)

    def tend(self) -> bool:
        """Bring the spare group on: True once it stands by. Raises `EngineError` if it is lost. Never waits."""
        if self._spare is None:
            return False
        try:
            return self._spare.tend()
        except EngineError:
            self._drop_spare()
            raise

    def end(self) -> None:
        """Kill the ranks; on GPUs, which the next ones need, wait until they are dead. A spare group lives on."""
        if not self._ray.is_there():  # `start` begins anew
            return
        for host in self._hosts:
            host.end.remote(self._epoch)
        if self._runs and self._use_gpu:
            import_ray().wait(self._runs, num_returns=len(self._runs), timeout=_KILL_PATIENCE)

    def stop(self, grace: float = 0.0) -> None:
        """Give ranks that were told to shut down `grace` seconds, kill the rest, end our Ray instance (idempotent).

        Other Ray instances on this host are not touched.
        """
        self._ray.expect_end()
        if self._ray.is_there():
            ray = import_ray()
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
            for host in self._hosts:
                ray.kill(host, no_restart=True)
            if self._placement is not None:
                ray.util.remove_placement_group(self._placement)
        self._ray.stop()
        self._hosts, self._spare, self._runs, self._placement, self._is_placed = [], None, [], None, False

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _reserve(self) -> None:
        """Room for all ranks on one host: they meet in its file system and talk over its loopback."""
        ray = import_ray()
        world_size = self._config.parallel.tensor_parallel_size
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self._use_gpu else {})}
        if self._config.parallel.cluster_host is None:  # our sockets are in this host's file system
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._placement = ray.util.placement_group([bundle] * world_size, strategy="STRICT_PACK")

    def _wait_for_room(self, is_wanted: Callable[[], bool]) -> bool:
        """Whether there is room, at once or (in a cluster) some day. For ranks of a lost host Ray looks for another."""
        is_local = self._config.parallel.ray_address is None
        began = time.monotonic()
        words_at = began + _PLACEMENT_LOOK
        while not self._placement.wait(_PLACEMENT_LOOK):
            if not is_wanted():
                return False
            now = time.monotonic()
            if is_local and now - began > _PLACEMENT_TIMEOUT:
                raise EngineError(f"Ray has no room on one host for {self._wish()}")
            if now >= words_at:
                words_at = now + _PLACEMENT_WORDS
                logger.warning("waiting for room on one host of the Ray cluster for %s", self._wish())
        logger.info("the ranks are on %s", _node_of(self._placement))
        return True

    def _wish(self) -> str:
        return f"{len(self._placement.bundle_specs)} ranks with {self._placement.bundle_specs[0]} each"

    def _place(self, epoch: int, known: Sequence[str], num_blocks: int | None) -> None:
        """Start all ranks: those of a spare group that stands by, else new ones."""
        self._epoch = epoch
        if self._spare is not None and self._spare.can_serve():
            self._runs, self._spare = self._spare.serve(epoch), None
            return
        self._drop_spare()
        ranks = range(self._config.parallel.tensor_parallel_size)
        if not self._hosts:
            self._hosts = [self._new_host(rank) for rank in ranks]
        if self._runs:  # they end at once, unless their hosts are being started or are stopped
            import_ray().wait(self._runs, num_returns=len(self._runs), timeout=_END_PATIENCE)
        for rank, run in enumerate(self._runs):
            if _has_lost_its_host(run):
                self._hosts[rank] = self._new_host(rank)
        meeting_point = self._meeting_point()
        launches = [self._launch(rank, epoch, meeting_point, known, num_blocks).to_json() for rank in ranks]
        self._runs = [host.run.remote(launch) for host, launch in zip(self._hosts, launches, strict=True)]

    def _new_host(self, rank: int) -> Any:
        ray = import_ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placement, rank)
        actor_class = ray.remote(
            num_cpus=0,  # the placement group holds the CPU
            num_gpus=1 if self._use_gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=strategy,
        )(RankHost)
        return actor_class.remote()

    def _meeting_point(self) -> str:
        """A new file in the run directory, which only this host has, or in that of Ray's session on the ranks' host."""
        name = f"ranks-{secrets.token_hex(16)}"
        return name if self._config.parallel.cluster_host is not None else str(self._run_dir.path / name)

    def _launch(
        self,
        rank: int,
        epoch: int,
        meeting_point: str,
        known: Sequence[str],
        num_blocks: int | None = None,
    ) -> RankLaunch:
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
                known=known,
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


def _uses_gpu(config: ParallelConfig) -> bool:
    """Whether every rank gets a GPU, from the configuration and what Ray sees on the host that has most.

    A cluster may yet get hosts with GPUs, if they are what is asked for.
    """
    if config.device == "cpu":
        return False
    if config.device == "cuda" and config.ray_address is not None:
        return True
    found = int(max(node["Resources"].get("GPU", 0) for node in import_ray().nodes() if node["Alive"]))
    if config.device == "cuda" and found < config.tensor_parallel_size:
        wanted = "a GPU" if config.tensor_parallel_size == 1 else f"{config.tensor_parallel_size} GPUs"
        seen = f"only {found}" if found else "none"
        raise ConfigError(f"--device cuda needs {wanted}, and Ray sees {seen} on this host (--device cpu needs none)")
    return found >= config.tensor_parallel_size


def _has_lost_its_host(run: Any) -> bool:
    ray = import_ray()
    if not ray.wait([run], timeout=0)[0]:
        return False
    try:
        ray.get(run)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        pass
    return False


def _reason(run: Any) -> str:
    ray = import_ray()
    try:
        return ray.get(run) or "it was told to"
    except ray.exceptions.RayError as error:
        return str(error)
