"""No way past the keys: every route of the application, under every odd name that a request line can give it."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any

import pytest

from gateway.app import ROUTES
from gateway.auth import OPEN_PATHS, PAGE_PATHS
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer
from tests.online.gateways import GatewayThread, start_pair

pytestmark = pytest.mark.stage2

KEY = "key-main"
OPEN_BODY = b'{"status":"ok"}'
TOGETHER = 8  # connections

HOSTS: dict[str, bytes] = {
    "plain": b"Host: a\r\n",
    "with a path": b"Host: a/livez?\r\n",
    "with a fragment": b"Host: a/livez#\r\n",
    "with a name and a password": b"Host: livez:80@a\r\n",
    "empty": b"Host:\r\n",
    "missing": b"",
    "two": b"Host: a\r\nHost: a/livez?\r\n",
    "forwarded": b"Host: a\r\nX-Forwarded-Host: a/livez?\r\nX-Forwarded-Prefix: /livez\r\nForwarded: host=livez\r\n",
    "rewritten": b"Host: a\r\nX-Original-URL: /livez\r\nX-Rewrite-URL: /livez\r\nX-Forwarded-Path: /livez\r\n",
}
AUTHORIZATIONS: tuple[bytes, ...] = (
    b"Authorization:",
    b"Authorization: Bearer",
    b"Authorization: Bearer ",
    b"Authorization: key-main",
    b"Authorization: Basic key-main",
    b"Authorization: Bearer: key-main",
    b"Authorization: Bearer\tkey-main",
    b"Authorization: Bearer Bearer key-main",
    b"Authorization: Bearer key-main,key-main",
    b"Authorization: Bearer key-main key-main",
    b"Authorization: Bearer key-mai",
    b"Authorization: Bearer KEY-MAIN",
    b'Authorization: Bearer "key-main"',
    b"Authorization: Bearer key-main;",
    b"Authorization: Bearer x' OR '1'='1' --",
    b"Authorization: Bearer key-main\x00",
    b"Authorization: Bearer key-main\x7f",
    b"Authorization: Bearer \xff\xfe",
    b"Authorization: Bearer k\xc3\xa9y-main",
    b"Authorization: Bearer ${KEY}%s%n{}",
    b"Authorization: Bearer " + b"x" * 50_000,
    b"Authorization: Bearer x\r\n key-main",
    b"Authorization: Bearer key-main\r\nAuthorization: Bearer x",
    b"Authorization: Bearer x\r\nAuthorization: Bearer key-main",
    b"Authorization: Bearer key-main\r\nAuthorization: Bearer key-main",
    b"Authorization: Bearer x\r\nX-Api-Key: key-main",
    b"X-Api-Key: key-main\r\nX-Api-Key: x",
    b"X-Api-Key: x\r\nApi-Key: key-main",
    b"X-Api-Key: Bearer key-main",
    b"X-Api-Key:",
    b"Authorization : Bearer key-main",
    b"Proxy-Authorization: Bearer key-main",
    b"Cookie: authorization=Bearer key-main; x-api-key=key-main",
    b"X-Forwarded-For: 127.0.0.1\r\nX-Real-IP: 127.0.0.1",
    b"X-HTTP-Method-Override: OPTIONS\r\nX-Method-Override: OPTIONS",
    b"Origin: null\r\nAccess-Control-Request-Method: POST",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Expect: 100-continue",
    b"Transfer-Encoding: identity",
)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "get", "G ET")


@pytest.fixture(scope="module", params=["httptools", "h11"])
def locked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[GatewayThread]:
    """A gateway with one key, with either parser of HTTP."""
    folder = tmp_path_factory.mktemp("locked")
    model = write_tokenizer(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11":
            patch.setattr("gateway.process._http_protocol", lambda *_: "h11")
        scheduler, gateway = start_pair(model, folder / "run", Tokenizer.load(model).vocab_size, api_key=(KEY,))
    assert gateway.server.config.http_protocol_class.__module__.endswith(
        {"h11": "h11_impl"}.get(request.param, "connection")
    )
    yield gateway
    gateway.close()
    scheduler.close()


def paths_of(routes: Iterable[Any], prefix: str = "") -> Iterator[str]:
    """Every path of an application, those of what is mounted in it too."""
    for route in routes:
        path = prefix + route.path
        yield from paths_of(route.routes, path) if getattr(route, "routes", None) else [path]


def closed_paths(gateway: GatewayThread) -> list[str]:
    """The routes that want a key, as a client would write them."""
    app: Any = gateway.server.config.app
    paths = {re.sub(r"{\w+:path}", "a", path) for path in paths_of(app.routes)}
    return sorted(paths - OPEN_PATHS - PAGE_PATHS)


def spellings(path: str) -> list[str]:
    """Targets that some server or other takes for `path`, or for an open one."""
    name = path[1:]
    ways = [
        "/{0}", "//{0}", "///{0}", "/v1/../{0}", "/./{0}", "/{0}/", "/{0}.", "/{0}/.", "/{0}/..;/", "/{0};a", "/{0}%00",
        "/{0}%20", "/{0}?", "/{0}?/livez", "/{0}#/livez", "/{0}%3f/livez", "/%2f{0}", "%2f{0}", "@livez/{0}", "{0}",
        "http://a/{0}", "http://livez/{0}", "https://a:b@livez//{0}", "http:/{0}", "http:///{0}", "livez:/{0}",
        "//livez/{0}", "/livez/{0}", "/livez/../{0}", "/livez%2f../{0}", "/livez/%2e%2e/{0}", "/livez;/{0}",
        "/livez\\..\\{0}", "/livez/..;/{0}", "\\{0}", "*/{0}", "/{0}\t", "/{0}?api_key=key-main", "/{0}?key=key-main",
    ]  # fmt: skip
    return [
        *(way.format(name) for way in ways),
        path.upper(),
        path.replace("/", "%2f"),
        f"/%{ord(name[0]):x}{name[1:]}",
    ]


def ask(gateway: GatewayThread, request: bytes) -> bytes:
    """Everything that the server says until it closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        data = b""
        with suppress(ConnectionError):  # it has heard enough, and closed while we still talk
            connection.sendall(request)
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                data += part
        return data


def spelled(target: str, host: bytes, more: bytes = b"", method: str = "GET") -> bytes:
    """A request without a key; HTTP/1.0 where there is no host."""
    line = f"{method} {target} HTTP/{'1.1' if host else '1.0'}\r\n".encode()
    return line + host + (more + b"\r\n" if more else b"") + b"Content-Length: 0\r\nConnection: close\r\n\r\n"


def passes(gateway: GatewayThread, requests: list[bytes]) -> tuple[list[bytes], Counter[int]]:
    """The requests that were let in, and how often each status came; 0 is none."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = list(pool.map(lambda one: ask(gateway, one), requests))
    statuses = [int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0 for answer in answers]
    let_in = []
    for sent, answer, status in zip(requests, answers, statuses, strict=True):
        # `http://a/livez?...` is the open route, under its own name.
        is_open = b"livez" in sent and answer.endswith(b"\r\n\r\n" + OPEN_BODY)
        if status not in (0, 400, 401) and not (status == 200 and is_open):
            let_in.append(sent[:200] + b" -> " + answer[:200])
    return let_in, Counter(statuses)


def test_given_the_application_when_its_routes_are_walked_then_they_are_known_and_two_and_the_page_are_open(
    locked: GatewayThread,
) -> None:
    app: Any = locked.server.config.app
    assert sorted(paths_of(app.routes)) == sorted({spec.path for spec in ROUTES} | PAGE_PATHS)
    assert {"/livez", "/readyz"} == OPEN_PATHS
    for path in OPEN_PATHS:
        assert ask(locked, spelled(path, HOSTS["plain"])).endswith(OPEN_BODY)


def test_given_no_key_when_any_route_is_asked_for_under_any_name_then_nobody_is_let_in(locked: GatewayThread) -> None:
    paths = closed_paths(locked)
    assert len(paths) > 10
    requests = [spelled(name, host) for path in paths for name in spellings(path) for host in HOSTS.values()]
    let_in, statuses = passes(locked, requests)
    assert let_in == []
    assert sum(statuses.values()) >= 1500
    assert statuses[401] > statuses[400]


def test_given_hostile_headers_when_any_route_is_asked_for_then_nobody_is_let_in(locked: GatewayThread) -> None:
    requests = [
        spelled(path, HOSTS["plain"], header, method)
        for path in closed_paths(locked)
        for header in AUTHORIZATIONS
        for method in ("GET", "POST")
    ]
    requests += [spelled(path, HOSTS["plain"], b"", method) for path in closed_paths(locked) for method in METHODS]
    let_in, statuses = passes(locked, requests)
    assert let_in == []
    assert statuses[401] > len(requests) // 2


def test_given_a_connection_that_was_let_in_when_the_next_request_has_no_key_then_that_is_refused(
    locked: GatewayThread,
) -> None:
    keep = b"Host: a\r\nContent-Length: 0\r\n"
    key = b"Authorization: Bearer key-main\r\n"
    for first in (b"GET /livez HTTP/1.1\r\n" + keep, b"GET /v1/models HTTP/1.1\r\n" + keep + key):
        with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as connection:
            answers = []
            for request in (first + b"\r\n", spelled("/v1/models", HOSTS["plain"])):
                connection.sendall(request)
                answer = HTTPResponse(connection)
                answer.begin()
                answers.append((answer.status, bool(answer.read())))
        assert answers == [(200, True), (401, True)]


CHUNKED = b"Transfer-Encoding: chunked\r\n"
SECOND = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
# Where two parsers, a proxy's and ours, could see different requests in the same bytes.
AMBIGUOUS = {
    "length and chunks": b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "chunks and length": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 0\r\nContent-Length: 5\r\n\r\nabcde",
    "two lengths in one": b"Content-Length: 0, 5\r\n\r\nabcde",
    "a negative length": b"Content-Length: -1\r\n\r\n",
    "a length with a sign": b"Content-Length: +5\r\n\r\nabcde",
    "a hexadecimal length": b"Content-Length: 0x5\r\n\r\nabcde",
    "a length without end": b"Content-Length: 99999999999999999999999\r\n\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n",
    "chunks before another coding": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "bytes after a chunk": CHUNKED + b"\r\n2\r\nabXX\r\n0\r\n\r\n",
    "a chunk that is no number": CHUNKED + b"\r\nz\r\nab\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"\r\n-2\r\nab\r\n0\r\n\r\n",
    "a space before the colon": b"Content-Length : 5\r\n\r\nabcde",
    "a name with a line feed": b"X\nContent-Length: 5\r\n\r\nabcde",
    "a value with a NUL": b"X-A: a\x00b\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_given_bytes_that_two_parsers_could_read_differently_when_sent_then_no_second_request_is_seen_in_them(
    locked: GatewayThread, rest: bytes
) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nX-Api-Key: key-main\r\nContent-Type: application/json\r\n"
    answer = ask(locked, head + rest + SECOND)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")


LARGE = {
    "one header": b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Large: " + b"x" * 1_000_000 + b"\r\n\r\n",
    "very many headers": b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 50_000 + b"\r\n",
    "the target": b"GET /livez?" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "the method": b"G" * 1_000_000,
}


@pytest.mark.parametrize("request_", LARGE.values(), ids=LARGE.keys())
def test_given_a_head_of_a_megabyte_when_sent_then_it_is_refused_or_the_connection_is_cut(
    locked: GatewayThread, request_: bytes
) -> None:
    answer = ask(locked, request_)
    assert not answer or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert ask(locked, spelled("/livez", HOSTS["plain"])).endswith(OPEN_BODY)
