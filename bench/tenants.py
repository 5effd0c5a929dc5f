"""Load of several tenants, in processes of their own: what `bench.overload` runs, and what comes back from there."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from bench.http_stream import RequestError, Target


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients with one key, each sending one request after the other, or (`rate` > 0) new ones all the time."""

    api_key: str | None
    streams: int
    num_input: int  # tokens
    num_output: int
    rate: float = 0.0  # requests per second, whatever comes of them


@dataclass(slots=True)
class Seen:
    """What one tenant saw, in seconds from the start of the load."""

    ttfts: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
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
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, job: Job) -> Future[list[Seen]]:
        """The tenants' results, in their order."""
        return self._pool.submit(run_job, job)


def run_job(job: Job) -> list[Seen]:
    """Run it in this process."""
    return asyncio.run(_run(job))


async def _run(job: Job) -> list[Seen]:
    began = time.perf_counter()
    draw = random.Random(job.seed)
    seen = [Seen() for _ in job.tenants]
    tasks, targets = [], []
    for tenant, mine in zip(job.tenants, seen, strict=True):
        targets.append(target := Target(job.base_url, tenant.api_key, idle=[]))
        client = _Client(job, tenant, target, mine, random.Random(draw.random()), began)
        if tenant.rate > 0:
            tasks.append(asyncio.create_task(client.arrivals()))
        else:
            tasks += [asyncio.create_task(client.one_after_the_other()) for _ in range(tenant.streams)]
    await asyncio.sleep(job.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for target in targets:
        await target.close()
    return seen


class _Client:
    def __init__(self, job: Job, tenant: Tenant, target: Target, seen: Seen, draw: random.Random, began: float) -> None:
        self._job = job
        self._tenant = tenant
        self._target = target
        self._seen = seen
        self._draw = draw
        self._began = began

    async def one_after_the_other(self) -> None:
        while True:
            if not await self._send():
                await asyncio.sleep(0.2)  # it was refused: a client that waits a little

    async def arrivals(self) -> None:
        live: set[asyncio.Task[bool]] = set()
        due = time.perf_counter()
        try:
            while True:
                due += self._draw.expovariate(self._tenant.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                task = asyncio.create_task(self._send())
                live.add(task)
                task.add_done_callback(live.discard)
        finally:
            for task in list(live):
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)

    async def _send(self) -> bool:
        """Whether it was accepted."""
        job, tenant, seen = self._job, self._tenant, self._seen
        body = {
            "model": job.model,
            "prompt": [self._draw.randrange(job.vocab_size) for _ in range(tenant.num_input)],
            "max_tokens": tenant.num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        sent = time.perf_counter()
        first = True
        try:
            async for event in self._target.events("/v1/completions", body):
                now = time.perf_counter()
                for choice in event.get("choices", ()):
                    count = len(choice.get("token_ids") or ())
                    if count and first:
                        first = False
                        seen.ttfts.append(now - sent)
                    seen.token_times += [now - self._began] * count
            seen.completed += 1
        except RequestError as error:
            if error.status not in (429, 503):
                seen.failures.append(str(error))
            else:
                seen.refusals.append(time.perf_counter() - sent)
                seen.num_retry_after += int(error.headers.get("retry-after", "0")) >= 1
            return False
        return True


def tokens_per_second(seen: Sequence[Seen], start: float, end: float) -> float:
    """Output tokens that came between two times, per second."""
    return sum(start <= at < end for one in seen for at in one.token_times) / (end - start)
