"""All processes of a simulated server, the wires between them, and how each is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from novainfer.engine.replica import ReplicaLinks
from novainfer.protocol.link import Packet
from novainfer.protocol.step import WORKER_SCHEMA
from novainfer.protocol.supervision import ROLE_WORKER, ChildFault
from novainfer.sim.gateways import SimGateway
from novainfer.sim.ranks import Curses, SimGroup, SimRank, SimRows
from novainfer.sim.scenario import Scenario
from novainfer.sim.scheduler import SimExecutor, SimScheduler, send_to
from novainfer.sim.wires import FOREVER, Lane, Wire
from novainfer.sim.world import World


class Cluster:
    """Starts processes and connects them. `report`, `exited` and `watch` are the supervisor's and the checker's."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self.curses = Curses(salts={s.message.params.seed or 0: s.salt for s in scenario.requests})
        self.load_faults = 0  # of so many of the next groups
        self.keeps_last_words = True  # of a scheduler that dies: what it sent is still delivered
        self.scheduler: SimScheduler | None = None
        self.group: SimGroup | None = None
        self.gateways: list[SimGateway] = []
        self.report: Callable[[object], None] = lambda report: None
        self.rank_exited: Callable[[SimRank], None] = lambda rank: None
        self.watch: Callable[[SimScheduler], None] = lambda scheduler: None
        self.gateway_wires: dict[bytes, Wire] = {}
        self.rank_wires: dict[bytes, Wire] = {}
        self._num_gateways = 0
        self._newest: dict[bytes, int] = {}  # socket identity -> the newest gateway process that was heard behind it
        self.orders = self._wire("orders", self._deliver_order, lambda message: None, 0.0005)
        self.reports = self._lane("reports", 0.0005, lambda message: self.report(message))

    # -- processes ----------------------------------------------------------------------------------------------

    def start_scheduler(self, epoch: int, group: int) -> None:
        """A scheduler process that has bound its sockets."""
        executor = SimExecutor(send_to(self._to_rank), world_size=self.scenario.group.world_size, epoch=epoch)
        executor.expect(epoch, group=group)
        links = ReplicaLinks(self._to_gateway, self.reports.send)
        self.world.note(f"scheduler.{epoch} starts with group {group}")
        self.scheduler = SimScheduler(
            self.world, self.scenario.config, executor, links, epoch=epoch, window=self.scenario.window
        )
        self.watch(self.scheduler)
        for wire in self._wires():
            wire.connected()

    def end_scheduler(self) -> None:
        """SIGKILL."""
        if self.scheduler is not None:
            self.scheduler.kill()
            self.scheduler = None
            for wire in self._wires():
                wire.router_died(lose=not self.keeps_last_words)

    def start_group(self, epoch: int) -> None:
        """Rank processes that begin to load; the zombies of older groups stay connected."""
        spec = self.scenario.group
        spec = replace(spec, info=replace(spec.info, epoch=epoch))
        self.world.note(f"group {epoch} starts")
        self.group = group = SimGroup(self.world, spec, epoch, self.world.rng(f"group {epoch}"))
        fails, self.load_faults = self.load_faults > 0, max(0, self.load_faults - 1)
        for number in range(spec.world_size):
            identity = f"rank-{number}-{epoch}".encode()
            rank = SimRank(
                self.world,
                group,
                number,
                self._rank_wire(identity),
                self.reports.send,
                SimRows(spec.info, self.curses),
            )
            self.rank_wires[identity].down.deliver = rank.receive
            rank.on_exit = self.rank_exited
            group.ranks.append(rank)
            if fails:
                self.reports.send(ChildFault(ROLE_WORKER, number, epoch, "it cannot load"))
                self.world.after(0.01, rank.kill)
            else:
                self.world.after(spec.load_seconds, rank.loaded)

    def start_gateway(self, index: int) -> None:
        """A gateway process, in place of the one that was there."""
        identity, number = f"gateway-{index}".encode(), self._num_gateways
        self._num_gateways += 1
        wire = self._wire(
            f"gateway{index}.{number}",
            lambda message: self._deliver_packet(identity, number, message),
            lambda message: None,
            self.scenario.gateway_latency,
        )
        self.gateway_wires[identity] = wire
        gateway = SimGateway(self.world, index, number, wire, lost_timeout=self.scenario.lost_timeout)
        wire.down.deliver = gateway.receive
        if self.scenario.encodes:
            wire.up.copy = wire.down.copy = _copy_packet
        self.gateways[index : index + 1] = [gateway]
        self.world.note(f"{gateway.name} starts")

    def is_deaf(self, gateway_id: str) -> bool:
        """Whether nothing that is sent to this gateway process will ever arrive."""
        for gateway in self.gateways:
            lane = gateway.wire.down
            if gateway.name == gateway_id and FOREVER in (lane.cut_until, lane.clogged_until):
                return True
        return False

    # -- wires ----------------------------------------------------------------------------------------------------

    def _wires(self) -> list[Wire]:
        return [self.orders, *self.gateway_wires.values(), *self.rank_wires.values()]

    def _rank_wire(self, identity: bytes) -> Wire:
        wire = self._wire(
            identity.decode(),
            lambda message: self._deliver_from_rank(identity, message),
            lambda message: None,
            self.scenario.rank_latency,
        )
        if self.scenario.encodes:
            wire.up.copy = wire.down.copy = _copy_step
        self.rank_wires[identity] = wire
        return wire

    def _wire(self, name: str, up: Callable[[object], None], down: Callable[[object], None], latency: float) -> Wire:
        return Wire(
            self._lane(f"{name}>", latency, up),
            self._lane(f"{name}<", latency, down),
            lambda: self.scheduler is not None,
            self.world,
        )

    def _lane(self, name: str, latency: float, deliver: Callable[[object], None]) -> Lane:
        return Lane(self.world, name, self.world.rng(f"lane {name}"), latency, deliver)

    def _to_gateway(self, identity: bytes, packet: Packet) -> bool:
        wire = self.gateway_wires.get(identity)
        return wire is not None and wire.send_down(packet)

    def _to_rank(self, identity: bytes, message: object) -> bool:
        wire = self.rank_wires.get(identity)
        return wire is not None and wire.send_down(message)

    def _deliver_order(self, message: object) -> None:
        if self.scheduler is not None:
            self.scheduler.receive_order(message)

    def _deliver_packet(self, identity: bytes, number: int, message: object) -> None:
        if number < self._newest.get(identity, 0):
            return  # the ROUTER has handed the identity over
        self._newest[identity] = number
        if self.scheduler is not None:
            self.scheduler.receive_packet(identity, message)

    def _deliver_from_rank(self, identity: bytes, message: object) -> None:
        if self.scheduler is not None:
            self.scheduler.receive_from_rank(identity, message)


def _copy_packet(message: object) -> object:
    if not isinstance(message, Packet):
        return message
    return Packet.of(message.frames())


def _copy_step(message: object) -> object:
    return WORKER_SCHEMA.decode(WORKER_SCHEMA.encode(message))
