"""The load generator's kept connections against a server that answers well, badly, in pieces, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from bench.http_stream import RequestError
from bench.kept_connections import Pool

pytestmark = pytest.mark.unit

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = b'HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 17\r\n\r\n{"error": "full"}'
EVENTS = (
    b'data: {"choices":[{"text":"a","token_ids":[5]}]}\n\n',
    b": still here\n\n",
    b'data: {"choices":[{"text":"\\"token_ids\\":[1,2,3]","token_ids":[5,6]},{"token_ids":[7]}]}\n\n',
    b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n',
    b"data: [DONE]\n\n",
)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


WELL = CHUNKED + chunked(*EVENTS)


class Heard:
    """What came of one request: counts of tokens, then "ended" or the error's text and status."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.end: asyncio.Future[str | RequestError] = asyncio.get_running_loop().create_future()

    def tokens(self, count: int) -> None:
        assert not self.end.done()
        self.counts.append(count)

    def ended(self) -> None:
        self.end.set_result("ended")

    def failed(self, error: RequestError) -> None:
        self.end.set_result(error)


class Server:
    """Answers connection by connection what it is told, as many requests as there are answers, then closes."""

    def __init__(self, *connections: list[list[bytes]]) -> None:
        self.taken: list[int] = []  # the connection of each request
        self.bodies: list[bytes] = []
        self.handlers: set[asyncio.Task[None] | None] = set()
        self._connections = connections
        self._count = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.add(asyncio.current_task())
        number, self._count = self._count, self._count + 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the client is gone
            for pieces in self._connections[number]:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"Authorization: Bearer key\r\n" in head
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.taken.append(number)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def with_pool(server: Server, go: Callable[[Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        async with listening:
            pool = Pool(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "key")
            async with asyncio.timeout(20):
                await go(pool)
                pool.close()
                await asyncio.gather(*filter(None, server.handlers))

    asyncio.run(main())


async def ask(pool: Pool, body: bytes = b"{}") -> tuple[list[int], str | RequestError]:
    heard = Heard()
    pool.send(body, heard)
    return heard.counts, await heard.end


def test_given_answers_that_end_when_more_is_sent_then_their_connection_is_taken_until_it_is_closed() -> None:
    server = Server([[WELL], [REFUSED], [WELL]], [[WELL]])

    async def go(pool: Pool) -> None:
        assert await ask(pool, b"1") == ([1, 3], "ended")
        _, error = await ask(pool, b"22")
        assert isinstance(error, RequestError)
        assert (error.status, error.headers["retry-after"], str(error)) == (503, "1", 'HTTP 503: {"error": "full"}')
        assert await ask(pool, b"333") == ([1, 3], "ended")
        assert await ask(pool, b"4444") == ([1, 3], "ended")
        assert pool.num_resent == 1

    with_pool(server, go)
    assert server.taken == [0, 0, 0, 1]
    assert server.bodies == [b"1", b"22", b"333", b"4444"]


def test_given_two_requests_when_both_run_then_each_has_its_connection() -> None:
    server = Server([[WELL]], [[WELL]])

    async def go(pool: Pool) -> None:
        assert await asyncio.gather(ask(pool), ask(pool)) == [([1, 3], "ended")] * 2

    with_pool(server, go)
    assert sorted(server.taken) == [0, 1]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_given_an_answer_in_small_pieces_when_read_then_nothing_is_lost(size: int) -> None:
    pieces = [WELL[i : i + size] for i in range(0, len(WELL), size)]

    async def go(pool: Pool) -> None:
        counts, end = await ask(pool)
        assert (sum(counts), end) == (4, "ended")

    with_pool(Server([pieces]), go)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (CHUNKED + b"5\r\nda", "the connection ended"),
        (CHUNKED + chunked(EVENTS[0]), "the stream broke off"),
        (CHUNKED + chunked(EVENTS[0], b'data: {"error": {"message": "lost"}}\n\n', EVENTS[-1]), '{"error"'),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "the answer is no stream"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\n{}", "HTTP 401: {}"),
        (b"HTTP/1.1 ", "the connection ended"),
        (b"", "the connection ended"),
    ],
    ids=range(7),
)
def test_given_an_answer_that_breaks_when_read_then_it_is_one_failure(answer: bytes, text: str) -> None:
    async def go(pool: Pool) -> None:
        _, end = await ask(pool)
        assert isinstance(end, RequestError)
        assert str(end).startswith(text)

    with_pool(Server([[answer]]), go)


def test_given_nobody_listening_when_sent_then_it_is_a_failure() -> None:
    async def main() -> None:
        pool = Pool("http://127.0.0.1:1", None)
        _, end = await ask(pool)
        assert str(end).startswith("cannot connect")

    asyncio.run(main())


def test_given_a_closed_pool_when_answers_or_requests_come_then_nobody_hears_of_them() -> None:
    async def main() -> None:
        waits, has_ended = asyncio.Event(), asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            waits.set()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # to its end: the connection is cut off
            await close(writer)
            has_ended.set()

        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with listening, asyncio.timeout(20):
            pool = Pool(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None)
            first, second = Heard(), Heard()
            pool.send(b"{}", first)
            await waits.wait()
            pool.close()
            pool.send(b"{}", second)
            await has_ended.wait()
        assert not first.end.done()
        assert not second.end.done()

    asyncio.run(main())
