"""Load of several tenants, in processes of their own: what `bench.overload` runs, and what comes back from there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import uvloop

from bench.http_stream import RequestError
from bench.kept_connections import Pool

_NUM_TOKENS = 1 << 17  # of which prompts are cut
_MOST_INPUT = 1 << 15


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients with one key, each sending one request after the other, or (`rate` > 0) new ones all the time."""

    api_key: str | None
    streams: int
    num_input: int  # tokens
    num_output: int
    rate: float = 0.0  # requests per second, whatever comes of them
    spread: float = 0.0  # of the output: each request's differs from `num_output` by up to this part of it


@dataclass(slots=True)
class Seen:
    """What one tenant saw, in seconds from the start of the load."""

    ttfts: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    sent: int = 0
    resent: int = 0  # of those: again, as the server had closed the kept connection
    completed: int = 0
    refusals: list[float] = field(default_factory=list)  # how long each took
    num_retry_after: int = 0  # refusals that carried the header
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job:
    """One load: all of these tenants together for so many seconds; what runs then is cut off."""

    base_url: str
    model: str
    tenants: tuple[Tenant, ...]
    seconds: float
    vocab_size: int
    seed: int = 0


class LoadProcesses:
    """Runs jobs, each in a process that ends with the block."""

    def __init__(self, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=give_way)

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, job: Job) -> Future[list[Seen]]:
        """The tenants' results, in their order."""
        return self._pool.submit(run_job, job)


def give_way() -> None:
    """Clients on machines of their own would not stop a server's threads in mid-work."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_job(job: Job) -> list[Seen]:
    """Run it in this process."""
    return uvloop.run(_run(job))


async def _run(job: Job) -> list[Seen]:
    draw = random.Random(job.seed)
    seen = [Seen() for _ in job.tenants]
    pools = [Pool(job.base_url, tenant.api_key) for tenant in job.tenants]
    bodies = Bodies(job.model, job.vocab_size, draw)
    began = time.perf_counter()  # from here on there is load: to draw the prompts takes a moment
    tasks = []
    for tenant, pool, mine in zip(job.tenants, pools, seen, strict=True):
        client = _Client(tenant, pool, bodies, mine, random.Random(draw.random()), began)
        if tenant.rate > 0:
            tasks.append(asyncio.create_task(client.arrivals()))
        for _ in range(tenant.streams):
            client.send()
    await asyncio.sleep(job.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for pool, mine in zip(pools, seen, strict=True):
        pool.close()
        mine.resent = pool.num_resent
    return seen


class Bodies:
    """Requests with prompts of random tokens, no two the same among the first `_NUM_TOKENS`."""

    def __init__(self, model: str, vocab_size: int, draw: random.Random) -> None:
        self._model = json.dumps(model)
        # Each token in it begins another prompt, which is cut out of the text: to draw or join tokens one by one would
        # cost as much as to send them.
        tokens = [str(draw.randrange(vocab_size)) for _ in range(_NUM_TOKENS)]
        tokens += tokens[:_MOST_INPUT]
        self._text = ",".join(tokens)
        self._places = array("L", itertools.accumulate((len(token) + 1 for token in tokens), initial=0))
        self._starts = itertools.cycle(draw.sample(range(_NUM_TOKENS), _NUM_TOKENS))

    def body(self, num_input: int, num_output: int) -> bytes:
        """A greedy, streamed completion of so many tokens."""
        start = next(self._starts)
        prompt = self._text[self._places[start] : self._places[start + num_input] - 1]
        return (
            f'{{"model":{self._model},"prompt":[{prompt}],"max_tokens":{num_output},"temperature":0,'
            '"ignore_eos":true,"stream":true,"return_token_ids":true}'
        ).encode()


class _Client:
    """What a tenant's clients do, each one request after the other, or one new client after the other."""

    def __init__(
        self, tenant: Tenant, pool: Pool, bodies: Bodies, seen: Seen, draw: random.Random, began: float
    ) -> None:
        self.seen = seen
        self.began = began
        self._tenant = tenant
        self._pool = pool
        self._bodies = bodies
        self._draw = draw

    async def arrivals(self) -> None:
        """Send for ever, at the tenant's rate."""
        due = time.perf_counter()
        while True:
            due += self._draw.expovariate(self._tenant.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.send()

    def send(self) -> None:
        """One request."""
        tenant = self._tenant
        num_output = round(tenant.num_output * self._draw.uniform(1.0 - tenant.spread, 1.0 + tenant.spread))
        body = self._bodies.body(tenant.num_input, num_output)
        self.seen.sent += 1
        self._pool.send(body, _Request(self))

    def has_ended(self, pause: float = 0.0) -> None:
        """One of those who send one after the other has its answer, and goes on after so many seconds."""
        if self._tenant.rate == 0:
            asyncio.get_running_loop().call_later(pause, self.send)


class _Request:
    """Writes down what comes of one request."""

    __slots__ = ("_client", "_is_first", "_sent")

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._sent = time.perf_counter()
        self._is_first = True

    def tokens(self, count: int) -> None:
        now, seen = time.perf_counter(), self._client.seen
        if self._is_first:
            self._is_first = False
            seen.ttfts.append(now - self._sent)
        seen.token_times += [now - self._client.began] * count

    def ended(self) -> None:
        self._client.seen.completed += 1
        self._client.has_ended()

    def failed(self, error: RequestError) -> None:
        seen = self._client.seen
        if error.status not in (429, 503):
            seen.failures.append(str(error))
            self._client.has_ended(pause=0.2)
            return
        seen.refusals.append(time.perf_counter() - self._sent)
        retry_after = int(error.headers["retry-after"] or 0)
        seen.num_retry_after += retry_after >= 1
        self._client.has_ended(pause=max(retry_after, 0.2))


def tokens_per_second(seen: Sequence[Seen], start: float, end: float) -> float:
    """Output tokens that came between two times, per second."""
    return sum(start <= at < end for one in seen for at in one.token_times) / (end - start)
