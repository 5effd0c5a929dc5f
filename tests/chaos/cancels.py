"""Clients that leave: `python -m tests.chaos.cancels --requests 20000` cancels and disconnects at random moments.

Bursts against a real server; after each one nothing may be held, and a greedy answer must be what it was. How soon what
a cancelled request held is free is measured by a request that waits for just that: see `Probe`. Exit status 1 if
anything was held, or answered wrongly, or free too late more often than not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.streams import CHAT, COMPLETIONS
from tests.servers import RunningServer

MOMENTS = ("body", "at once", "soon", "stream", "end")  # half of the body sent; ...; the last token has come
WAYS = ("reset", "fin", "cancel", "cancel by its id")
AT_ONCE = 48  # clients
BURST = 500
ROWS = 8
AIM_SECONDS = 0.1  # and two steps
_CANARY = {"messages": [{"role": "user", "content": "What is NovaInfer?"}], "temperature": 0, "max_tokens": 24}
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_LAST_TOKEN = b'"finish_reason":"length"'


@dataclass(frozen=True)
class Leaving:
    """What one client asks for, and how it goes."""

    moment: str
    way: str
    patience: float  # seconds ("soon") that it waits
    num_bytes: int  # of the answer ("stream") that it reads
    body: dict[str, Any]


def draw(rng: random.Random) -> Leaving:
    """Any of them. A cancel needs a request that was sent; its id in the answer needs a stream that has begun."""
    moment = rng.choice(MOMENTS)
    way = rng.choice({"body": WAYS[:2], "stream": WAYS, "end": WAYS}.get(moment, WAYS[:3]))
    question = f"Is {rng.randrange(1000)} more than {rng.randrange(1000)}? " * rng.choice([1, 1, 1, 60])
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": moment in ("stream", "end") or rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 2, 4]),
        "max_tokens": rng.randrange(1, 6) if moment == "end" else 1000,  # longer than anybody waits
        "ignore_eos": True,
    }
    return Leaving(moment, way, rng.random() * 0.08, rng.randrange(1, 6000), body)


class Connection:
    """One HTTP request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = b""

    @classmethod
    async def open(cls, base_url: str) -> Connection:
        address = urlsplit(base_url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def send(self, path: str, body: object = None, *, request_id: str = "", share: float = 1.0) -> None:
        """The head, and so much of the body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        head += f"X-Request-Id: {request_id}\r\n" if request_id else ""
        self._writer.write(head.encode() + b"Connection: close\r\n\r\n" + data[: int(len(data) * share)])
        await self._writer.drain()

    async def read(self, until: bytes | None = None, count: int | None = None) -> bytes:
        """All that was heard, up to something in it, or so many bytes of it, or the end."""
        while (until is None or until not in self.heard) and (count is None or len(self.heard) < count):
            piece = await self._reader.read(65536 if count is None else count - len(self.heard))
            if not piece:
                break
            self.heard += piece
        return self.heard

    async def read_on(self) -> None:
        """Whatever comes next."""
        self.heard += await self._reader.read(65536)

    def leave(self, way: str) -> None:
        """Close the connection: RST, or FIN."""
        if way == "reset":
            end = self._writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._writer.transport.abort()
        self._writer.close()


async def leave(base_url: str, leaving: Leaving, request_id: str) -> None:
    """Be that client. Raises AssertionError if the server does not keep to its manners."""
    client = await Connection.open(base_url)
    await client.send(CHAT, leaving.body, request_id=request_id, share=0.5 if leaving.moment == "body" else 1.0)
    if leaving.moment == "soon":
        reading = asyncio.ensure_future(client.read(count=1))
        await asyncio.wait([reading], timeout=leaving.patience)
        reading.cancel()
        await asyncio.wait([reading])
    elif leaving.moment == "stream":
        await client.read(count=leaving.num_bytes)
    elif leaving.moment == "end":
        assert _LAST_TOKEN in await client.read(until=_LAST_TOKEN)
    if leaving.way.startswith("cancel"):
        if leaving.way == "cancel by its id":
            answer = await client.read(until=b'"id":"')
            answer = await client.read(count=len(answer) + 100)
            request_id = answer.split(b'"id":"')[1].split(b'"')[0].decode()
        if await cancel(base_url, request_id):
            answer = await client.read()
            end = b"data: [DONE]" if leaving.body["stream"] else b'"usage"'
            assert end in answer, f"cancelled, but not ended: {answer[-300:]!r}"
    client.leave(leaving.way)


async def cancel(base_url: str, request_id: str) -> bool:
    """By the route; whether there was such a request."""
    asking = await Connection.open(base_url)
    await asking.send(f"/v1/requests/{request_id}/cancel")
    answer = await asking.read()
    asking.leave("fin")
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404")), answer
    return answer.startswith(b"HTTP/1.1 200")


async def burst(base_url: str, rng: random.Random, count: int) -> Counter[str]:
    """So many clients, `AT_ONCE` at a time; how many left when and how."""
    gate = asyncio.Semaphore(AT_ONCE)
    leavings = [draw(rng) for _ in range(count)]
    salt = rng.getrandbits(64)

    async def one(number: int) -> None:
        async with gate:
            await leave(base_url, leavings[number], f"leave-{salt:x}-{number}")

    await asyncio.gather(*(one(number) for number in range(count)))
    return Counter(f"{leaving.moment}, {leaving.way}" for leaving in leavings)


@dataclass(frozen=True)
class Probe:
    """One cancel on a full server. Times in seconds.

    freed: until the answer of a request of one token that waited for the row and blocks of the cancelled one: that is
    until these are free, and then a step of its own and the way back.
    """

    way: str
    freed: float
    step: float


async def probe(server: RunningServer, way: str) -> Probe:
    """Fill the `ROWS` rows of a server that holds nothing, let one more wait, and cancel one."""
    url = server.base_url
    runners = [await Connection.open(url) for _ in range(ROWS)]
    for number, runner in enumerate(runners):
        body = {"prompt": f"Row {number}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        await runner.send(COMPLETIONS, body, request_id=f"probe-{number}")
    await asyncio.gather(*(runner.read(until=b"data: ") for runner in runners))
    waiter = await Connection.open(url)
    await waiter.send(COMPLETIONS, {"prompt": "Wait", "max_tokens": 1})
    while not await asyncio.to_thread(server.metric, "novainfer_num_requests_waiting"):
        pass
    step = await _step_seconds(runners[-1])
    began = time.monotonic()
    if way == "cancel":
        assert await cancel(url, "probe-0")
    else:
        runners[0].leave(way)
    answer = await waiter.read(until=b'"usage"')
    freed = time.monotonic() - began
    assert answer.startswith(b"HTTP/1.1 200"), answer
    for each in (*runners, waiter):
        each.leave("fin")
    return Probe(way, freed, step)


async def _step_seconds(runner: Connection) -> float:
    """The usual time between two events of a stream."""
    times = []
    for _ in range(20):
        await runner.read_on()
        times.append(time.monotonic())
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def summary(ways: Counter[str], probes: list[Probe]) -> bool:
    """Print what was done and how long it took; True if that was soon enough, mostly."""
    is_soon = True
    print(f"cancels and disconnects: {ways.total()}, after each {BURST} nothing held")
    for way, count in sorted(ways.items()):
        print(f"  {way:28} {count:6}")
    for way in ("fin", "reset", "cancel"):
        group = [one for one in probes if one.way == way]
        if group:
            freed, aims = sorted(one.freed for one in group), [2 * one.step + AIM_SECONDS for one in group]
            late = sum(one.freed > aim for one, aim in zip(group, aims, strict=True))
            is_soon &= 2 * late <= len(group)
            print(f"  {way:7} until the next one's answer: median {1000 * statistics.median(freed):.0f} ms, longest "
                  f"{1000 * freed[-1]:.0f} ms; two steps and {1000 * AIM_SECONDS:.0f} ms: "
                  f"{1000 * statistics.median(aims):.0f} ms, later {late} of {len(group)}")  # fmt: skip
    return is_soon


def canary(server: RunningServer) -> str:
    """What one greedy request is answered."""
    with server.http() as http:
        answer: str = http.post(CHAT, json=_CANARY).json()["choices"][0]["message"]["content"]
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, ways, probes = random.Random(options.seed), Counter[str](), list[Probe]()
    flags = ("--max-num-seqs", str(ROWS))
    with (
        tempfile.TemporaryDirectory(prefix="cancels-") as folder,
        RunningServer(*flags, log=Path(folder) / "log") as server,
    ):
        said = canary(server)
        while ways.total() < options.requests:
            ways += asyncio.run(burst(server.base_url, rng, min(BURST, options.requests - ways.total())))
            server.wait_until_nothing_is_held()
            for way in ("fin", "reset", "cancel"):
                probes.append(asyncio.run(probe(server, way)))
                server.wait_until_nothing_is_held()
            assert canary(server) == said, "the canary's answer has changed"
            print(f"{ways.total():6}", file=sys.stderr, flush=True)
        is_soon = summary(ways, probes)
        server.stop()
    return 0 if is_soon else 1


if __name__ == "__main__":
    raise SystemExit(main())
