"""What a seed stands for: sizes of everything, often absurdly small ones, and the requests of the clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from novainfer.config import CacheConfig, ParallelConfig, SchedulerConfig, ServeConfig, ServerConfig
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.link import WINDOW
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams
from novainfer.sim.oracle import hash_tokens
from novainfer.sim.ranks import GroupSpec
from novainfer.sim.world import World

VOCAB_SIZE = 40
MAX_MODEL_LEN = 64
_EOS = 3
_TENANTS = ("ada", "bob")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One client: what it wants, and how it behaves. Times in seconds, of the world.

    cancel_after: it goes away so long after the request was sent.   cancel_alias_after: it asks for the end by name.
    stops_at: choice -> it finds a stop string after so many tokens.   read_every: 0 = at once.
    claims: it fetches its stream elsewhere if its gateway dies.   thief: another tenant tries so, too.
    rival: what a second reader does who fetches the stream at the same moment; '': there is none.
    """

    message: AddRequest
    arrival: float
    gateway: int
    read_every: float
    stops_at: dict[int, int]
    cancel_after: float | None
    cancel_alias_after: float | None
    claims: bool
    thief: bool
    rival: str = ""

    @property
    def salt(self) -> int:
        """The same for requests that may share a prefix, and for no others."""
        return hash_tokens((*self.message.tenant.encode(), 0, *self.message.cache_salt.encode()))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world without its faults."""

    config: ServeConfig
    group: GroupSpec
    num_gateways: int
    window: int
    gateway_latency: float
    rank_latency: float
    boot_seconds: float
    lost_timeout: float
    encodes: bool  # every message passes the codec, as on a real wire
    requests: tuple[RequestSpec, ...]

    @property
    def may_refuse(self) -> bool:
        """The queue is so short that it may be full."""
        most = sum(spec.message.params.n for spec in self.requests)
        return self.config.scheduler.max_waiting < most


def _with_rivals(requests: tuple[RequestSpec, ...], rng: Random) -> tuple[RequestSpec, ...]:
    return tuple(replace(r, rival=rng.choice(("", "", "", "gives back", "takes"))) for r in requests)


def _with_embeddings(requests: tuple[RequestSpec, ...], rng: Random) -> tuple[RequestSpec, ...]:
    """In some worlds some of them want their prompt's vector instead of tokens."""
    part = rng.choice((0.0, 0.0, 0.0, 0.4))
    return tuple(_as_embedding(request) if rng.random() < part else request for request in requests)


def _as_embedding(request: RequestSpec) -> RequestSpec:
    message = request.message
    params = SamplingParams.for_embedding(message.params.seed)
    return replace(request, message=replace(message, params=params, embed=True, eos_token_ids=[]), stops_at={})


def make_scenario(world: World) -> Scenario:
    """Draw everything from the world's seed."""
    rng = world.rng("scenario")
    requests = _with_rivals(_make_requests(rng, num_gateways := rng.choice((1, 2, 2, 3))), world.rng("rivals"))
    requests = _with_embeddings(requests, world.rng("vectors"))
    block_size = rng.choice((1, 2, 4, 4, 8))
    fewest = -(-max(len(r.message.prompt_token_ids) + r.message.params.max_tokens for r in requests) // block_size)
    max_num_seqs = rng.choice((1, 2, 4, 8, 16))
    drafts = world.rng("drafts").random() < 0.3
    info = ExecutorInfo(
        epoch=1,
        num_blocks=int(fewest * rng.choice((1.0, 1.0, 1.4, 2.0, 6.0))) + rng.randint(0, 2),
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        can_draft=drafts,
        hidden_size=2,
    )
    step_seconds = rng.choice((0.002, 0.01, 0.03))
    hang_timeout = rng.choice((0.75, 1.0, 2.0))
    config = ServeConfig(
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=rng.random() < 0.85),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, rng.choice((1, 4, 8, 16, 256))),
            max_waiting=rng.choice((2, 1024, 1024, 1024)),
            steps_in_flight=rng.choice((1, 2, 2)),
            speculation="prompt-lookup" if drafts else "none",
        ),
        parallel=ParallelConfig(tensor_parallel_size=rng.choice((1, 1, 2, 2, 3))),
        server=ServerConfig(
            num_gateways=num_gateways,
            hang_timeout=hang_timeout,
            stall_timeout=4 * hang_timeout,
            orphan_grace=rng.choice((0.5, 2.0, 5.0)),
        ),
    )
    group = GroupSpec(
        world_size=config.parallel.tensor_parallel_size,
        info=info,
        step_seconds=step_seconds,
        load_seconds=rng.choice((0.02, 0.1, 0.5)),
        hello_seconds=0.1,
        max_launched=rng.choice((1, 2)),
    )
    return Scenario(
        config=config,
        group=group,
        num_gateways=num_gateways,
        window=rng.choice((WINDOW, WINDOW, 64, 4, 2, 1)),
        gateway_latency=rng.choice((0.0001, 0.001, 0.01)),
        rank_latency=rng.choice((0.0001, 0.0001, 0.003)),
        boot_seconds=rng.choice((0.02, 0.2)),
        lost_timeout=rng.choice((20.0, 40.0)),
        encodes=rng.random() < 0.1,
        requests=requests,
    )


def _make_requests(rng: Random, num_gateways: int) -> tuple[RequestSpec, ...]:
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(24)]
    spread = rng.choice((0.0, 0.3, 2.0))
    count = rng.choice((2, 4, 7, 10, 10, 14))
    return tuple(_make_request(rng, i, shared, spread, num_gateways) for i in range(count))


def _make_request(rng: Random, i: int, shared: list[int], spread: float, num_gateways: int) -> RequestSpec:
    own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
    alike = rng.random() < 0.3  # the whole prompt may be another one's, too
    prompt = shared[: rng.choice((4, 8, 9, 24))] if alike else shared[: rng.choice((0, 4, 12, 24))] + own
    n = rng.choice((1, 1, 1, 2, 3))
    max_tokens = rng.randint(1, rng.choice((3, 12, 30)))
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        seed=10_000 + i,
        stop_token_ids=rng.choice(((), (), (5,), (5, 6, 7))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
    )
    message = AddRequest(
        f"r{i}",
        prompt,
        params,
        eos_token_ids=[_EOS],
        tenant=rng.choice(_TENANTS),
        cache_salt=rng.choice(("", "", "salt")),
        use_prefix_cache=rng.random() < 0.9,
        priority=rng.choice((0, 0, 0, -1, 1)),
        deadline=rng.choice((0.0, 0.0, 0.0, rng.uniform(0.2, 4.0))),
        aliases=[f"alias-{i}"],
        answer="a stream",
        explain=i % 2 == 1,
    )
    goes, asks = rng.random(), rng.random()
    return RequestSpec(
        message=message,
        arrival=0.3 + rng.random() * spread,
        gateway=rng.randrange(num_gateways),
        read_every=rng.choice((0.0, 0.0, 0.05, 0.5)),
        stops_at={c: rng.randint(1, max_tokens) for c in range(n) if rng.random() < 0.2},
        cancel_after=rng.choice((rng.random(), 3 * rng.random())) if goes < 0.15 else None,
        cancel_alias_after=rng.random() if asks < 0.1 else None,
        claims=rng.random() < 0.8,
        thief=rng.random() < 0.3,
    )
