"""Requests that are refused at the door: the same answers as the application's, whatever a request looks like."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway import limits
from gateway.door import Door
from novainfer.text.tokenizer import Tokenizer
from tests.online.gateways import GatewayThread, start_pair

pytestmark = pytest.mark.stage2

IS_GUARDED = Door.is_guarded
BODY = b'{"prompt": "hello", "max_tokens": 100}'
VARYING = re.compile(
    rb"(date: |(?:x-)?request-id: req-|processing-ms: |retry-after(-ms)?: |x-ratelimit-[a-z-]+: )[^\r]*"
)


@dataclass
class Full:
    """A gateway whose queue is full."""

    gateway: GatewayThread
    refused_at_door: list[bytes] = field(default_factory=list)  # the answers

    def talk(self, *pieces: bytes) -> bytes:
        """Send each piece once the one before is answered; all that comes until the last is, or the end."""
        with socket.create_connection(("127.0.0.1", self.gateway.port), timeout=20) as client:
            data = b""
            for count, piece in enumerate(pieces, 1):
                client.sendall(piece)
                while len(parse(data)) < count and (part := client.recv(1 << 16)):
                    data += part
        return data


def parse(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each whole answer."""
    found = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            break
        found.append((int(first.split()[1]), headers, rest[:length]))
        data = rest[length:]
    return found


def message(*headers: str, path: str = "/v1/completions", key: str = "key-f", body: bytes = BODY) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    if not any(line.lower().startswith("content-type") for line in lines):
        lines.append("Content-Type: application/json")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def full_gateway(model: Path, folder: Path, **server: object) -> Iterator[Full]:
    (folder / "keys").write_text("limited:key-l max-requests=1\nfree:key-f\n")
    vocab_size = Tokenizer.load(model).vocab_size
    settings = {"api_key_file": str(folder / "keys"), "max_queued_tokens": 110, **server}
    scheduler, gateway = start_pair(model, folder / "run", vocab_size, **settings)
    try:
        scheduler.tokens_before_pause = 0
        body = b'{"prompt": "hello", "max_tokens": 100, "stream": true}'
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as waiting:
            waiting.sendall(message(key="key-l", body=body))
            scheduler.wait_for(lambda: len(scheduler.added) == 1)
            yield Full(gateway)
    finally:
        gateway.close()
        scheduler.close()


@pytest.fixture(scope="module")
def full_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    with full_gateway(tiny_model, tmp_path_factory.mktemp("full")) as full:
        yield full


@pytest.fixture
def full(full_pair: Full, monkeypatch: pytest.MonkeyPatch) -> Full:
    refusal = Door.refusal
    full_pair.refused_at_door.clear()

    def watch(door: Door, *args: Any) -> bytes | None:
        answer = refusal(door, *args)
        if answer is not None:
            full_pair.refused_at_door.append(answer)
        return answer

    monkeypatch.setattr(Door, "refusal", watch)
    monkeypatch.setattr(Door, "is_guarded", True)
    return full_pair


def test_given_a_door_that_is_open_when_a_request_has_no_room_then_the_next_one_is_refused_at_the_door(
    full_pair: Full, full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GUARD_SECONDS", 60.0)
    monkeypatch.setattr(Door, "is_guarded", IS_GUARDED)
    monkeypatch.setattr(full.gateway.service.limits, "_guarded_until", 0.0)
    inside, at_door = full.talk(message()), full.talk(message())
    assert full.refused_at_door == [at_door]
    assert [parse(answer)[0][0] for answer in (inside, at_door)] == [503, 503]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"],
)
@pytest.mark.parametrize(
    ("key", "status", "code"), [("key-f", 503, "overloaded"), ("key-l", 429, "rate_limit_exceeded")]
)
def test_given_no_room_when_refused_at_the_door_then_the_answer_is_the_applications(
    full: Full, monkeypatch: pytest.MonkeyPatch, path: str, key: str, status: int, code: str
) -> None:
    sent = message(path=path, key=key)
    at_door = full.talk(sent)
    assert full.refused_at_door == [at_door]
    monkeypatch.setattr(Door, "is_watched", lambda *_: False)
    inside = full.talk(sent)
    assert len(full.refused_at_door) == 1
    assert sorted(VARYING.sub(rb"\1", at_door).split(b"\r\n")) == sorted(VARYING.sub(rb"\1", inside).split(b"\r\n"))
    ((seen, headers, body),) = parse(at_door)
    error = json.loads(body)["error"]
    if path == "/v1/messages":  # of another form
        wanted = "overloaded_error" if status == 503 else "rate_limit_error"
        assert (seen, error["type"]) == (status, wanted)
        assert headers["request-id"] == headers["x-request-id"]
    else:
        assert (seen, error["code"]) == (status, code)
    assert int(headers["retry-after"]) >= 1


def test_given_a_request_id_when_refused_at_the_door_then_it_comes_back(full: Full) -> None:
    ((_, headers, _),) = parse(full.talk(message("X-Request-Id: mine-1")))
    assert headers["x-request-id"] == "mine-1"
    assert len(full.refused_at_door) == 1


def test_given_refusals_when_they_follow_each_other_then_all_go_over_one_connection_and_are_counted(full: Full) -> None:
    with full.gateway.http() as http:
        before = count(http.get("/metrics", headers={"x-api-key": "key-f"}).text)
        answers = parse(full.talk(*[message()] * 4))
        after = count(http.get("/metrics", headers={"x-api-key": "key-f"}).text)
    assert [status for status, _, _ in answers] == [503] * 4
    assert len(full.refused_at_door) == 4
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]


def count(text: str) -> tuple[float, float]:
    """Answers of the completions' path with 503, and refusals for lack of room."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    answers = [line for line in lines if 'handler="/v1/completions"' in line and 'status="503"' in line]
    refusals = [line for line in lines if "admission_rejections_total" in line and '"overloaded"' in line]
    return (sum(float(line.split()[-1]) for line in answers), sum(float(line.split()[-1]) for line in refusals))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (message(key=""), 401),
        (message(key="wrong"), 401),
        (message("Content-Type: text/plain"), 415),
        (message("Content-Type: application/json; charset=utf-8"), 503),
        (message("Connection: close"), 503),
        (message().replace(b"HTTP/1.1", b"HTTP/1.0", 1), 503),
        (message("Content-Type: application/json", "Content-Type: text/plain"), 415),
        (message("X-Request-Timeout: soon"), 400),
        (message(path="/tokenize"), 200),
        (message(path="/v1/completion"), 404),
        (message().replace(b"POST", b"GET", 1), 405),
        (message().replace(b"POST", b"PUT", 1), 405),
    ],
    ids=range(12),
)
def test_given_what_is_not_plain_when_sent_then_the_application_answers(full: Full, sent: bytes, status: int) -> None:
    ((seen, _, _),) = parse(full.talk(sent))
    assert seen == status
    assert not full.refused_at_door


def test_given_pages_of_other_origins_when_refused_then_they_may_read_why(tiny_model: Path, tmp_path: Path) -> None:
    with full_gateway(tiny_model, tmp_path, cors_origins=("https://a.example",)) as full:
        ((status, headers, _),) = parse(full.talk(message("Origin: https://a.example")))
    assert (status, headers["access-control-allow-origin"]) == (503, "https://a.example")
