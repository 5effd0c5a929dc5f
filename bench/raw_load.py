"""A closed loop of completions on raw connections, so lean that gateway and scheduler are what is measured."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class RawJob:
    """`streams` clients, each with its own connection, sending one request after the other for `seconds`."""

    base_url: str
    model: str
    streams: int
    num_input: int  # tokens
    num_output: int
    seconds: float
    is_streamed: bool = True


@dataclass(slots=True)
class RawSeen:
    """What they saw. Times in seconds; `num_events` counts those of answers that have ended."""

    num_answers: int = 0
    num_events: int = 0
    seconds: float = 0.0
    first_bytes: list[float] = field(default_factory=list)  # from the request to the first of its answer's body
    failures: list[str] = field(default_factory=list)


def run_raw(job: RawJob) -> RawSeen:
    """Run it in this process."""
    return asyncio.run(_run(job))


async def _run(job: RawJob) -> RawSeen:
    seen = RawSeen()
    loop = asyncio.get_running_loop()
    url = urlsplit(job.base_url)
    clients = [_Client(job, seen, number) for number in range(job.streams)]
    for client in clients:
        await loop.create_connection(partial(_same, client), url.hostname or "", url.port or 80)
    began = time.perf_counter()
    for client in clients:
        client.send()
    await asyncio.sleep(job.seconds)
    for client in clients:
        client.is_over = True
    await asyncio.wait([client.ended for client in clients], timeout=60)
    seen.seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return seen


def _same(client: _Client) -> _Client:
    return client


class _Client(asyncio.Protocol):
    """Reads no more of an answer than it must: where it ends, and how many events it has."""

    def __init__(self, job: RawJob, seen: RawSeen, number: int) -> None:
        self.is_over = False
        self.ended = asyncio.get_running_loop().create_future()
        self._job = job
        self._seen = seen
        self._number = number
        self._count = 0
        self._sent_at = 0.0
        self._events = 0
        self._tail = b""
        self._end = b"0\r\n\r\n" if job.is_streamed else b"}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def send(self) -> None:
        """The next request; no two have the same prompt."""
        job = self._job
        self._count += 1
        start = [5 + self._number % 500, 5 + self._count % 500, 5 + self._number // 500, 5 + self._count // 500]
        prompt = (start + [7] * job.num_input)[: job.num_input]
        body: dict[str, Any] = {
            "model": job.model,
            "prompt": prompt,
            "max_tokens": job.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": job.is_streamed,
        }
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(payload)}\r\n"
        self._events, self._tail, self._sent_at = 0, b"", time.perf_counter()
        self._transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)

    def data_received(self, data: bytes) -> None:
        if self._sent_at and (not self._job.is_streamed or b"data:" in data):
            self._seen.first_bytes.append(time.perf_counter() - self._sent_at)
            self._sent_at = 0.0
        self._events += data.count(b"data: {")
        self._tail = (self._tail + data)[-16:] if len(data) < 16 else data[-16:]
        if self._tail.endswith(self._end):
            self._has_answer(data)

    def _has_answer(self, data: bytes) -> None:
        if self._job.is_streamed and self._events < 1:
            self._fail(data)
            return
        self._seen.num_answers += 1
        self._seen.num_events += self._events
        if self.is_over:
            self._finish()
        else:
            self.send()

    def _fail(self, data: bytes) -> None:
        self._seen.failures.append(data[:200].decode(errors="replace"))
        self._finish()

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._seen.failures.append(f"the connection ended: {exc}")
            self._finish()

    def close(self) -> None:
        """End the connection."""
        self._transport.close()
