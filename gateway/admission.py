"""What a generation holds while it is answered: its room, and its names, by which it can be cancelled.

Contexts that are plain classes: one that is written as a generator takes six calls, for each request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from gateway.context import RequestInfo
from gateway.errors import to_api_error
from gateway.generation import Generation
from gateway.limits import NO_PERMIT, Cost, Limits, Room
from gateway.metrics import GatewayMetrics
from novainfer.errors import InvalidRequestError, OverloadedError


class Refusals:
    """Counts the requests that are refused, and has the door guarded."""

    def __init__(self, metrics: GatewayMetrics, limits: Limits) -> None:
        self._metrics = metrics
        self._limits = limits

    def count(self, error: BaseException) -> None:
        """One of them, if it is a refusal."""
        if isinstance(error, OverloadedError):
            self._limits.guard()
            self._metrics.rejected(error.status)
        elif isinstance(error, InvalidRequestError):
            self._metrics.rejected(to_api_error(error).status)


class Admission:
    """A context that holds room for a request; counts a refusal, also one that comes later."""

    __slots__ = ("_cost", "_info", "_limits", "_permit", "_refusals", "_room")

    def __init__(
        self, limits: Limits, refusals: Refusals, info: RequestInfo, cost: Cost | None = None, room: Room | None = None
    ) -> None:
        self._limits = limits
        self._refusals = refusals
        self._info = info
        self._cost = cost
        self._room = room
        self._permit = NO_PERMIT

    def __enter__(self) -> None:
        info = self._info
        try:
            self._permit = info.permit = self._limits.reserve(info.tenant, self._cost, self._room)
        except Exception as error:
            self._refusals.count(error)
            raise
        finally:
            info.headers |= self._limits.headers(info.tenant)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        self._permit.release()
        if error is not None:
            self._refusals.count(error)


class LiveGenerations:
    """Those that are being answered, by their names."""

    def __init__(self, ended: Callable[[Generation, RequestInfo], None]) -> None:
        """ended: called with each that has been closed."""
        self.ended = ended
        self.by_name: dict[str, list[tuple[str, Generation]]] = {}  # with the tenant

    def __len__(self) -> int:
        """Their names."""
        return len(self.by_name)

    def find(self, name: str, tenant: str) -> list[Generation]:
        """The tenant's with this name: a client may have given the same one to several."""
        return [generation for owner, generation in self.by_name.get(name, ()) if owner == tenant]


class Live:
    """A context in which a generation can be found by its response's id, or its request's; afterwards it is closed."""

    __slots__ = ("_all", "_generation", "_info", "_names", "_timer")

    def __init__(self, all_: LiveGenerations, generation: Generation, response_id: str, info: RequestInfo) -> None:
        self._all = all_
        self._generation = generation
        self._info = info
        self._names = {response_id, info.request_id}
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        info = self._info
        if info.time_limit != math.inf:
            self._timer = asyncio.get_running_loop().call_later(info.time_left, self._generation.expire)
        for name in self._names:
            self._all.by_name.setdefault(name, []).append((info.tenant, self._generation))

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        generation, by_name = self._generation, self._all.by_name
        generation.close()
        self._info.permit.use(generation.num_tokens)
        self._all.ended(generation, self._info)
        for name in self._names:
            known = by_name[name]
            known.remove((self._info.tenant, generation))
            if not known:
                del by_name[name]
