"""Connections as ZeroMQ makes them: ordered, silent about what is lost when they break; and what faults do to them.

A DEALER (a gateway or a rank) keeps what it sends while the scheduler's ROUTER is away; the ROUTER learns at once that
it cannot reach a peer, but only if the connection is known to be gone. Whatever a newer connection brings comes after
what an older one brought.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from novainfer.protocol.link import Packet
from novainfer.protocol.messages import OutputBatch
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.sim.world import World

FOREVER = float("inf")


class Lane:
    """One direction of one connection. `latency`: seconds, of which up to as much again is added by chance."""

    def __init__(self, world: World, name: str, rng: Random, latency: float, deliver: Callable[[object], None]) -> None:
        self.name = name
        self.deliver = deliver
        self.copy: Callable[[object], object] = lambda message: message  # as the codec does, where it is simulated
        self.has_lost = False  # something, ever
        self.drops = self.duplicates = self.reorders = 0  # of so many of the next messages
        self.clogged_until = self.cut_until = self.delayed_until = 0.0
        self.extra_delay = 0.0
        self._world = world
        self._rng = rng
        self._latency = latency
        self._last_arrival = 0.0
        self._connection = self._oldest = 0
        self._clogged: list[tuple[object, int]] = []  # with their connections, in the order of arrival

    def break_off(self, *, lose: bool) -> None:
        """The connection ends; `lose`: with what is on its way."""
        self._connection += 1
        if lose:
            self._oldest = self._connection

    def send(self, message: object) -> None:
        """Put a message on its way."""
        world, message = self._world, self.copy(message)
        if world.now < self.cut_until or self.drops:
            self.drops = max(0, self.drops - 1)
            self._lose(message)
            return
        copies = 1
        if self.duplicates:
            self.duplicates -= 1
            copies = 2
        for _ in range(copies):
            delay = self._latency * (1.0 + self._rng.random())
            if world.now < self.delayed_until:
                delay += self.extra_delay * self._rng.random()
            arrival = world.now + delay
            if self.reorders:
                self.reorders -= 1
                arrival += 0.05 * self._rng.random()
            else:
                self._last_arrival = arrival = max(arrival, self._last_arrival)
            world.at(arrival, partial(self._arrive, message, self._connection))

    def _arrive(self, message: object, connection: int) -> None:
        if self._world.now < self.clogged_until or self._clogged:
            self._clogged.append((message, connection))
            if len(self._clogged) == 1:
                self._unclog_later()
        else:
            self._hand_over(message, connection)

    def _unclog_later(self) -> None:
        if self.clogged_until < FOREVER:
            self._world.at(self.clogged_until, self._unclog)

    def _unclog(self) -> None:
        if self._world.now < self.clogged_until:  # clogged once more
            self._unclog_later()
            return
        clogged, self._clogged = self._clogged, []
        for message, connection in clogged:
            self._hand_over(message, connection)

    def _hand_over(self, message: object, connection: int) -> None:
        if connection < self._oldest:
            self._lose(message)
            return
        self._oldest = connection
        self._world.note(f"{self.name} {describe(message)}")
        self.deliver(message)

    def _lose(self, message: object) -> None:
        self.has_lost = True
        self._world.note(f"{self.name} loses {describe(message)}")


class Wire:
    """A DEALER's connection to the scheduler: `up` leads there, `down` back."""

    def __init__(self, up: Lane, down: Lane, is_router_there: Callable[[], bool], world: World) -> None:
        self.up, self.down = up, down
        self.is_dealer_there = True
        self._is_router_there = is_router_there
        self._world = world
        self._broken_until = 0.0
        self._waiting: list[object] = []  # what the DEALER said while nobody was there

    @property
    def is_connected(self) -> bool:
        """Both ends are there, and no reset is being mended."""
        return self.is_dealer_there and self._is_router_there() and self._world.now >= self._broken_until

    def send_up(self, message: object) -> None:
        """From the DEALER: now, or when the connection is there again."""
        if self.is_connected:
            self.up.send(message)
        else:
            self._waiting.append(message)

    def send_down(self, message: object) -> bool:
        """From the ROUTER; False if there is no connection."""
        if not self.is_connected:
            return False
        self.down.send(message)
        return True

    def connected(self) -> None:
        """The connection may be there again: what has waited goes."""
        if self.is_connected:
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self.up.send(message)

    def reset(self, until: float) -> None:
        """Both ways lose what is on its way; nobody is reachable until then."""
        self.up.break_off(lose=True)
        self.down.break_off(lose=True)
        self._broken_until = max(until, self._broken_until)
        self._world.at(self._broken_until, self.connected)

    def router_died(self, *, lose: bool) -> None:
        """`lose`: what it said last is lost, too."""
        self.up.break_off(lose=True)
        self.down.break_off(lose=lose)

    def dealer_died(self) -> None:
        """What it said last is still on its way."""
        self.is_dealer_there = False
        self._waiting.clear()
        self.down.break_off(lose=True)


def describe(message: object) -> str:
    """In a line of the trace."""
    if isinstance(message, Packet):
        return f"{message.link & 0xFFFF}#{message.number} {describe(message.message)}"
    if isinstance(message, OutputBatch):
        outputs = " ".join(
            f"{o.request_id}/{o.choice}@{o.index}+{len(o.token_ids)}{o.finish_reason or ''}" for o in message.outputs
        )
        tokens = zip(message.refs, message.offsets, message.token_ids, strict=True)
        plain = " ".join(f"{ref}@{index + message.base}={token_id}" for ref, index, token_id in tokens)
        return f"OutputBatch {message.epoch} {plain} {outputs}"
    if isinstance(message, StepPlan):
        return f"StepPlan {message.epoch}/{message.step} {message.rows.tolist()}x{message.num_new_tokens.tolist()}"
    if isinstance(message, StepResult):
        return f"StepResult {message.epoch}/{message.step} {message.token_ids.tolist()}"
    parts = [type(message).__name__]
    for name in ("epoch", "group", "rank", "ready", "request_id", "choice", "query", "received", "num_steps"):
        value = getattr(message, name, None)
        if value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)
