"""A closed loop of completions on raw connections, so lean that gateway and scheduler are what is measured.

No event loop of asyncio's: it takes 256 KiB of memory for each read, and three times the CPU time, which the processes
beside it feel in their caches.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_BUFFER_BYTES = 64 * 1024
# Seconds between two looks of many clients: one that sleeps is woken by who writes to it, in that process's CPU time (a
# microsecond or two for each event). Clients on other hosts are not.
_PAUSE = 0.001
_MOST_WAIT = 60.0  # seconds for the last answers
_LONGEST_END = 5  # bytes


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
    with _connected(job) as clients, select.epoll() as ready:
        for fd in clients:
            ready.register(fd, select.EPOLLIN)
        load = _Load(job)
        load.run(clients, ready)
    return load.seen


@contextmanager
def _connected(job: RawJob) -> Iterator[dict[int, _Client]]:
    """Clients by their file descriptors."""
    url = urlsplit(job.base_url)
    with ExitStack() as stack:
        clients = {}
        for number in range(job.streams):
            sock = stack.enter_context(socket.create_connection((url.hostname or "", url.port or 80)))
            clients[sock.fileno()] = _Client(sock, number)
        yield clients


@dataclass(slots=True)
class _Client:
    """One connection, and its present request."""

    sock: socket.socket
    number: int
    count: int = 0  # of requests
    sent_at: float = 0.0  # 0 once an answer has begun
    num_events: int = 0
    tail: bytes = b""


class _Load:
    """Reads no more of an answer than it must: where it ends, and how many events it has."""

    def __init__(self, job: RawJob) -> None:
        self.seen = RawSeen()
        self._job = job
        self._end = b"0\r\n\r\n" if job.is_streamed else b"}"
        self._buffer = bytearray(_BUFFER_BYTES)
        self._until = 0.0

    def run(self, clients: dict[int, _Client], ready: select.epoll) -> None:
        """Until the time is up and all answers are there, or one failed."""
        began = time.perf_counter()
        self._until = began + self._job.seconds
        for client in clients.values():
            self._send(client)
        open_clients = dict(clients)
        while open_clients and not self.seen.failures:
            time.sleep(_PAUSE if self._job.streams > 1 else 0.0)
            found = ready.poll(self._job.seconds + _MOST_WAIT)
            if not found or time.perf_counter() > self._until + _MOST_WAIT:
                self.seen.failures.append(f"{len(open_clients)} answers did not end")
            for fd, _ in found:
                if not self._read(open_clients[fd]):
                    ready.unregister(fd)
                    del open_clients[fd]
        self.seen.seconds = time.perf_counter() - began

    def _send(self, client: _Client) -> None:
        """The next request; no two have the same prompt."""
        job = self._job
        client.count += 1
        number, count = client.number, client.count
        start = [5 + number % 500, 5 + count % 500, 5 + number // 500, 5 + count // 500]
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
        client.num_events, client.tail, client.sent_at = 0, b"", time.perf_counter()
        client.sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)

    def _read(self, client: _Client) -> bool:
        """Take what has come; whether more is to come on this connection."""
        buffer, is_streamed = self._buffer, self._job.is_streamed
        num = client.sock.recv_into(buffer)
        if not num:
            self.seen.failures.append("the connection ended")
            return False
        if client.sent_at and (not is_streamed or buffer.find(b"data:", 0, num) >= 0):
            self.seen.first_bytes.append(time.perf_counter() - client.sent_at)
            client.sent_at = 0.0
        client.num_events += buffer.count(b"data: {", 0, num)
        tail = bytes(buffer[max(num - _LONGEST_END, 0) : num])
        if num < _LONGEST_END:
            tail = (client.tail + tail)[-_LONGEST_END:]
        client.tail = tail
        return not tail.endswith(self._end) or self._has_answer(client, num)

    def _has_answer(self, client: _Client, num: int) -> bool:
        if self._job.is_streamed and client.num_events < 1:
            self.seen.failures.append(self._buffer[: min(num, 200)].decode(errors="replace"))
            return False
        self.seen.num_answers += 1
        self.seen.num_events += client.num_events
        if time.perf_counter() > self._until:
            return False
        self._send(client)
        return True
