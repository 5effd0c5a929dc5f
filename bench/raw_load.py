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
_EVENT = b"data: {"
_END = b"0\r\n\r\n"  # of a streamed body
_LENGTH = b"content-length: "


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
    tail: bytes = b""  # the last bytes that came: what is looked for may come in two reads
    left: int = -1  # bytes of a whole answer that are still to come; unknown before its head


class _Load:
    """Reads no more of an answer than it must: where it ends, and how many events it has."""

    def __init__(self, job: RawJob) -> None:
        self.seen = RawSeen()
        self._job = job
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
                try:
                    goes_on = self._read(open_clients[fd])
                except OSError as error:
                    self.seen.failures.append(f"the connection failed: {error}")
                    return
                if not goes_on:
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
        client.num_events, client.tail, client.left, client.sent_at = 0, b"", -1, time.perf_counter()
        client.sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)

    def _read(self, client: _Client) -> bool:
        """Take what has come; whether more is to come on this connection."""
        buffer = self._buffer
        num = client.sock.recv_into(buffer)
        if not num:
            return self._fail("the connection ended")
        if client.sent_at:
            if not buffer.startswith(b"HTTP/1.1 200"):
                return self._fail(self._words(num))
            self.seen.first_bytes.append(time.perf_counter() - client.sent_at)
            client.sent_at = 0.0
        return self._read_events(client, num) if self._job.is_streamed else self._read_whole(client, num)

    def _read_events(self, client: _Client, num: int) -> bool:
        buffer, reach = self._buffer, len(_EVENT) - 1
        edge = client.tail + buffer[: min(num, reach)]  # too short at either side to hold one that is counted below
        client.num_events += buffer.count(_EVENT, 0, num) + edge.count(_EVENT)
        if buffer.find(b'data: {"error"', 0, num) >= 0:
            return self._fail(self._words(num))
        client.tail = (client.tail + bytes(buffer[max(num - reach, 0) : num]))[-reach:]
        return not client.tail.endswith(_END) or self._has_answer(client)

    def _read_whole(self, client: _Client, num: int) -> bool:
        if client.left < 0:  # the head comes at once, with a part of the body
            place, end = self._buffer.find(_LENGTH, 0, num), self._buffer.find(b"\r\n\r\n", 0, num)
            if not 0 <= place < end:
                return self._fail(self._words(num))
            length = int(self._buffer[place + len(_LENGTH) : self._buffer.index(b"\r", place)])
            client.left = end + 4 + length
        client.left -= num
        return client.left > 0 or self._has_answer(client)

    def _has_answer(self, client: _Client) -> bool:
        if self._job.is_streamed and client.num_events < 1:
            return self._fail("an answer without an event")
        self.seen.num_answers += 1
        self.seen.num_events += client.num_events
        if time.perf_counter() > self._until:
            return False
        self._send(client)
        return True

    def _fail(self, words: str) -> bool:
        self.seen.failures.append(words)
        return False

    def _words(self, num: int) -> str:
        return bytes(self._buffer[: min(num, 500)]).decode(errors="replace")
