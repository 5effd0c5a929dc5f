"""How the parts of a server are started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from novainfer.config import ServeConfig
from novainfer.entrypoints.children import python_module
from novainfer.entrypoints.worker_thread import WorkerGroup
from novainfer.protocol.supervision import ROLE_GATEWAY, ROLE_SCHEDULER
from novainfer.transport.addresses import RunDir

GATEWAY_MODULE = "gateway.process"
SCHEDULER_MODULE = "novainfer.engine.server"
REPLICA_MODULE = "novainfer.entrypoints.replica_process"


@dataclass(frozen=True, slots=True)
class Launch:
    """Makes what the supervisor runs; tests put small scripts here."""

    gateway: Callable[[int, int, int], Sequence[str]]  # index, its epoch, port or 0 -> command
    scheduler: Callable[[int, int], Sequence[str]]  # its epoch, that of the worker group -> command
    workers: Callable[[], WorkerGroup]  # not started; called in its own thread
    standbys: Mapping[str, str] = field(default_factory=dict)  # see `Standbys`


def standard_launch(config: ServeConfig, run_dir: RunDir, replica: int = 0) -> Launch:
    """The real gateway, scheduler and Ray workers."""
    where = ("--run-dir", str(run_dir.path))
    has_gateways = config.server.num_gateways > 0  # else we are one of several replicas

    def ray_workers() -> WorkerGroup:
        from workers.ray_group import RayWorkerGroup

        return RayWorkerGroup(config, run_dir, replica=replica)

    def scheduler(epoch: int, group: int) -> list[str]:
        number = ("--replica", str(replica))
        return python_module(SCHEDULER_MODULE, *where, *number, "--epoch", str(epoch), "--group", str(group))

    def gateway(index: int, epoch: int, port: int) -> list[str]:
        again = ("--port", str(port)) if port else ()
        return python_module(GATEWAY_MODULE, *where, "--index", str(index), "--epoch", str(epoch), *again)

    return Launch(
        gateway=gateway,
        scheduler=scheduler,
        workers=ray_workers,
        standbys={ROLE_SCHEDULER: SCHEDULER_MODULE} | ({ROLE_GATEWAY: GATEWAY_MODULE} if has_gateways else {}),
    )


@dataclass(frozen=True, slots=True)
class FleetLaunch:
    """Makes what the supervisor of several replicas runs; tests put small scripts here."""

    gateway: Callable[[int, int, int], Sequence[str]]  # index, its epoch, port or 0 -> command
    replica: Callable[[int, int], Sequence[str]]  # number, its epoch -> command
    standbys: Mapping[str, str] = field(default_factory=dict)  # see `Standbys`


def fleet_launch(config: ServeConfig, run_dir: RunDir) -> FleetLaunch:
    """The real gateways, and replicas that start the rest."""

    def replica(number: int, epoch: int) -> list[str]:
        where = ("--server-dir", str(run_dir.path))
        return python_module(REPLICA_MODULE, *where, "--index", str(number), "--epoch", str(epoch))

    gateway = standard_launch(config, run_dir).gateway
    return FleetLaunch(gateway=gateway, replica=replica, standbys={ROLE_GATEWAY: GATEWAY_MODULE})
