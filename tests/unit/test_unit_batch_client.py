"""The client of a batch against a server that says what a script says, over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from novainfer.entrypoints import batch_client
from novainfer.entrypoints.batch_client import KeptClient, NoAnswer
from novainfer.errors import ConfigError

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Cut(bytes):
    """An answer after which the connection ends."""


BREAK = Cut()


def http(status: int, body: bytes = b"{}", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


class Scripted:
    """Gives the next answer of `answers` to each request, the last one again and again; all sleeps are over at once."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.pauses: list[float] = []
        self.url = ""
        self._connections: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._connections.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                if isinstance(answer, Cut):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._connections.discard(writer)
            writer.close()

    def drop_connections(self) -> None:
        for writer in self._connections:
            writer.close()


Body = Callable[[Scripted, KeptClient], Awaitable[None]]


def with_server(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, body: Body, *, retry_for: float = 600.0, timeout: float = 20.0
) -> None:
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        scripted.pauses.append(seconds)
        await real(0)

    async def main() -> None:
        server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = KeptClient(scripted.url, "key", timeout=timeout, retry_for=retry_for)
        monkeypatch.setattr(batch_client.asyncio, "sleep", sleep)
        monkeypatch.setattr(random, "uniform", lambda low, high: low)
        try:
            async with asyncio.timeout(20):
                await body(scripted, client)
        finally:
            client.close()
            server.close()
            scripted.drop_connections()
            await server.wait_closed()

    asyncio.run(main())


def test_given_several_requests_when_asked_then_one_connection_carries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
    scripted = Scripted(http(200, b'{"a":1}', b"X-Request-Id: r"), http(400), chunked, http(200, b"9"))

    async def body(scripted: Scripted, client: KeptClient) -> None:
        first = await client.ask_patiently("/v1/x", b'{"n":1}')
        assert (first.status, first.data, first.headers["x-request-id"]) == (200, b'{"a":1}', "r")
        assert (await client.ask_patiently("/v1/x", b"{}")).status == 400
        assert (await client.ask_patiently("/v1/x", b"{}")).data == b"[1]"
        assert (await client.ask("GET", "/y")).data == b"9"
        assert scripted.num_connections == 1
        assert scripted.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
        assert b"\r\nauthorization: bearer key\r\n" in scripted.requests[0].lower()
        assert scripted.requests[0].endswith(b'\r\n\r\n{"n":1}')
        assert (scripted.pauses, client.num_retries, client.trouble) == ([], 0, None)

    with_server(monkeypatch, scripted, body)


def test_given_a_full_server_when_asked_then_it_is_asked_again_after_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = Scripted(
        http(503, b"{}", b"Retry-After: 7"),
        http(429, b"{}", b"Retry-After-Ms: 250", b"Retry-After: 1"),
        http(429, b"{}", b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT"),
        http(503, b"{}", b"Retry-After: -5"),
        http(502, b"<html>", b"Retry-After: inf"),
        http(200, b"{}"),
    )

    async def body(scripted: Scripted, client: KeptClient) -> None:
        assert (await client.ask_patiently("/v1/x", b"{}")).status == 200
        assert scripted.pauses == [7.0, 0.25, 2.0, 4.0, 8.0]
        assert client.num_retries == 5

    with_server(monkeypatch, scripted, body)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 504])
def test_given_another_status_when_asked_then_it_is_the_answer(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        assert (await client.ask_patiently("/v1/x", b"{}")).status == status
        assert len(scripted.requests) == 1

    with_server(monkeypatch, Scripted(http(status)), body)


def test_given_a_server_that_wants_no_retry_when_it_is_full_then_that_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        assert (await client.ask_patiently("/v1/x", b"{}")).status == 503
        assert len(scripted.requests) == 1

    with_server(monkeypatch, Scripted(http(503, b"{}", b"X-Should-Retry: false")), body)


def test_given_a_server_that_stays_full_when_patience_ends_then_its_last_answer_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        answer = await client.ask_patiently("/v1/x", b"{}")
        assert (answer.status, answer.data) == (429, b'{"why":1}')
        assert sum(scripted.pauses) == pytest.approx(60.0)
        assert max(scripted.pauses) <= batch_client.LONGEST_PAUSE

    with_server(monkeypatch, Scripted(http(429, b'{"why":1}')), body, retry_for=60.0)


def test_given_a_full_server_that_answers_others_when_asked_long_then_nobody_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = http(429, b"{}", b"Retry-After: 50")

    async def body(scripted: Scripted, client: KeptClient) -> None:
        statuses = await asyncio.gather(*(client.ask_patiently("/v1/x", b"{}") for _ in range(2)))
        assert [answer.status for answer in statuses] == [200, 200]
        assert sum(scripted.pauses) > 60.0

    with_server(monkeypatch, Scripted(full, full, http(200), full, http(200)), body, retry_for=60.0)


def test_given_connections_that_break_when_asked_then_it_is_asked_again_and_in_the_end_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = Cut(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{")
    scripted = Scripted(BREAK, Cut(b"nonsense\r\n\r\n"), half, http(200))

    async def body(scripted: Scripted, client: KeptClient) -> None:
        assert (await client.ask_patiently("/v1/x", b"{}")).status == 200
        assert scripted.pauses == [0.5, 1.0, 2.0]
        scripted.answers = [BREAK]
        with pytest.raises(NoAnswer, match="closed the connection"):
            await client.ask_patiently("/v1/x", b"{}")
        assert sum(scripted.pauses) == pytest.approx(63.5)

    with_server(monkeypatch, scripted, body, retry_for=60.0)


def test_given_kept_connections_that_the_server_has_closed_when_asked_then_a_new_one_is_used_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        await asyncio.gather(*(client.ask_patiently("/v1/x", b"{}") for _ in range(3)))
        scripted.drop_connections()
        assert (await client.ask_patiently("/v1/x", b"{}")).status == 200
        assert scripted.pauses == []

    with_server(monkeypatch, Scripted(http(200)), body)


def test_given_a_body_that_the_server_does_not_read_when_it_refuses_and_closes_then_the_refusal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = http(413, b'{"error":1}', b"Connection: close")

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await writer.drain()
        writer.close()

    async def body(scripted: Scripted, client: KeptClient) -> None:
        answer = await client.ask_patiently("/v1/x", b"x" * 2**25)
        assert (answer.status, answer.data) == (413, b'{"error":1}')

    scripted = Scripted(http(200))
    scripted.serve = refuse  # type: ignore[method-assign]
    with_server(monkeypatch, scripted, body, retry_for=0.0)


def test_given_a_server_that_says_nothing_when_the_time_of_a_try_is_over_then_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        with pytest.raises(NoAnswer, match="no answer in time"):
            await client.ask("POST", "/v1/x", b"{}")

    with_server(monkeypatch, Scripted(b""), body, timeout=0.05)


def test_given_a_request_that_never_ends_in_time_when_asked_patiently_then_it_is_asked_once_more_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(scripted: Scripted, client: KeptClient) -> None:
        with pytest.raises(NoAnswer, match="no answer in time"):
            await client.ask_patiently("/v1/x", b"{}")
        assert scripted.pauses == []

    with_server(monkeypatch, Scripted(b""), body, timeout=0.05, retry_for=0.04)


def test_given_a_server_that_has_gone_when_asked_then_patience_is_had_once_and_not_by_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1.0]
    monkeypatch.setattr(batch_client, "monotonic", lambda: now[0])

    async def body(scripted: Scripted, client: KeptClient) -> None:
        gone = KeptClient("http://127.0.0.1:9", None, timeout=5.0, retry_for=60.0)
        with pytest.raises(NoAnswer, match="cannot talk to"):
            await gone.ask_patiently("/v1/x", b"{}")
        assert sum(scripted.pauses) == pytest.approx(60.0)
        now[0] = 62.0
        scripted.pauses.clear()
        with pytest.raises(NoAnswer):
            await gone.ask_patiently("/v1/x", b"{}")
        assert scripted.pauses == []

    with_server(monkeypatch, Scripted(http(200)), body)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("ftp://host", None),
        ("host:80", None),
        ("http://", None),
        ("http://host:99999", None),
        ("http://host/a b", None),
        ("http://host", "a\nb"),
        ("http://host", "\u00e9"),
    ],
)
def test_given_what_is_no_url_or_no_key_when_a_client_is_made_then_it_is_refused(url: str, key: str | None) -> None:
    with pytest.raises(ConfigError):
        KeptClient(url, key, timeout=1.0, retry_for=1.0)
