"""Where requests and answers begin and end, on real connections: clients that offer more, and ones that know less."""

from __future__ import annotations

import json
import socket
from typing import Any, BinaryIO

import pytest

from tests.online.conftest import Pair

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def read_answer(reader: BinaryIO) -> bytes:
    """The body of the next one."""
    headers = b"".join(iter(reader.readline, b"\r\n"))
    length = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return reader.read(length)


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_given_clients_that_offer_another_protocol_when_they_send_a_body_then_it_is_read_and_http_1_goes_on(
    pair: Pair, offer: str
) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 2, "user": "\r\nUpgrade: no"}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    offered = f"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: {offer}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as client:
        reader = client.makefile("rb")
        for _ in range(2):  # on one connection
            client.sendall(head.encode() + offered.encode() + body)
            assert json.loads(read_answer(reader))["usage"]["completion_tokens"] == 2


def test_given_a_client_that_asks_before_it_sends_its_body_when_it_may_then_it_is_told_so(pair: Pair) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as client:
        client.sendall(head.encode() + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"] == 2


def test_given_a_client_of_http_1_0_when_it_streams_then_it_gets_the_events_and_nothing_else(pair: Pair) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "seed": 1, "stream": True}).encode()
    wanted = pair.post(CHAT, {"messages": HELLO, "max_tokens": 4, "seed": 1}).json()["choices"][0]["message"]["content"]
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as client:
        client.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    headers, text = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in headers
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == wanted
