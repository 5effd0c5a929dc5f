"""Which replica a request goes to: by what each has cached of its prompt, by load, and by tenant. Pure; in a gateway.

What a replica has cached is what this gateway sent there: an approximation that costs a wrong guess, never a wrong
token. After the power of two choices (Mitzenmacher 2001) few are looked at, not all: figures are a quarter of a second
old, and several gateways that all chose the one best would swamp it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from novainfer.kv.prefix_index import chain_key, root_key
from novainfer.protocol.columns import column
from novainfer.protocol.messages import AddRequest

CHUNK = 64  # tokens that are looked up as one
MAX_CHUNKS = 64  # of a prompt; two that are equal so far are taken for equal
MAX_KEPT = 65536  # chunks that are remembered of each replica; the least recently used are forgotten
SEQUENCE_COST = 32  # prompt tokens that a sequence, running or waiting, counts for
TENANT_COST = 32  # and one of the same tenant besides

HOW_ONLY, HOW_PREFIX, HOW_LOAD = "only", "prefix", "load"


@dataclass(frozen=True, slots=True)
class Load:
    """A replica that may be chosen. of_tenant: this gateway's live requests of the tenant there."""

    replica: int
    num_sequences: int  # running and waiting, of all gateways
    of_tenant: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """The replica chosen, how (see `HOW_*`), and how many prompt tokens are thought to be cached there."""

    replica: int
    how: str
    num_cached: int


class Router:
    """One gateway's memory of what it sent where."""

    def __init__(self) -> None:
        self._kept: dict[int, OrderedDict[bytes, None]] = {}  # by replica: keys of chunks, least recently used first

    def route(self, request: AddRequest, loads: Sequence[Load]) -> Route:
        """Choose among `loads`, of which there is at least one, and remember it."""
        if len(loads) == 1:
            return Route(loads[0].replica, HOW_ONLY, 0)
        if not request.use_prefix_cache:
            return self._cheapest(request, {}, self._shortlist(request, [], {}, loads))
        keys = list(_keys(request))
        cached = {load.replica: self._num_cached(load.replica, keys) for load in loads}
        route = self._cheapest(request, cached, self._shortlist(request, keys, cached, loads))
        self._remember(route.replica, keys)
        return route

    def forget(self, replica: int) -> None:
        """Its cache is gone."""
        self._kept.pop(replica, None)

    def _shortlist(
        self, request: AddRequest, keys: Sequence[bytes], cached: dict[int, int], loads: Sequence[Load]
    ) -> list[Load]:
        """Those that hold some of the prompt, the one where its beginning belongs, and two by chance."""
        best = max(cached.values(), default=0)
        holders = [load for load in loads if best and cached[load.replica]]
        if not holders and keys:
            holders = _ranked(keys[0], loads)[:1]
        return list(dict.fromkeys([*holders, *_ranked(request.request_id.encode(), loads)[:2]]))

    def _cheapest(self, request: AddRequest, cached: dict[int, int], shortlist: Sequence[Load]) -> Route:
        def cost(load: Load) -> int:
            held = SEQUENCE_COST * load.num_sequences + TENANT_COST * load.of_tenant
            return len(request.prompt_token_ids) - cached.get(load.replica, 0) + held

        chosen = min(shortlist, key=cost)
        num_cached = cached.get(chosen.replica, 0)
        return Route(chosen.replica, HOW_PREFIX if num_cached else HOW_LOAD, num_cached)

    def _num_cached(self, replica: int, keys: Sequence[bytes]) -> int:
        kept = self._kept.get(replica, OrderedDict[bytes, None]())
        for number, key in enumerate(keys):
            if key not in kept:
                return number * CHUNK
        return len(keys) * CHUNK

    def _remember(self, replica: int, keys: Sequence[bytes]) -> None:
        kept = self._kept.setdefault(replica, OrderedDict())
        for key in reversed(keys):  # a prompt's end goes before its beginning, which others share
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)


def _keys(request: AddRequest) -> Iterator[bytes]:
    """One for each whole chunk: of all tokens up to its end, and of what separates prefix caches."""
    key = root_key(request.tenant, request.cache_salt)
    token_ids = request.prompt_token_ids
    for start in range(0, min(len(token_ids) // CHUNK, MAX_CHUNKS) * CHUNK, CHUNK):
        key = chain_key(key, column(token_ids[start : start + CHUNK]))
        yield key


def _ranked(key: bytes, loads: Sequence[Load]) -> list[Load]:
    """In an order that depends on the key alone (rendezvous hashing): the same in every gateway."""

    def weight(load: Load) -> bytes:
        return blake2b(key, digest_size=8, salt=load.replica.to_bytes(4, "little")).digest()

    return sorted(loads, key=weight, reverse=True)
