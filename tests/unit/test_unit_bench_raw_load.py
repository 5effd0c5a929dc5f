"""The lean load: what it counts, and that it takes nothing for an answer that is none."""

from __future__ import annotations

import socket
import threading

import pytest

from bench.raw_load import RawJob, RawSeen, _Client, _Load, run_raw

pytestmark = pytest.mark.unit

OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"transfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[]}\n\n'
EVENTS = b"%x\r\n%b\r\n0\r\n\r\n" % (3 * len(EVENT) + 14, 3 * EVENT + b"data: [DONE]\n\n")


def whole(body: bytes, status: bytes = OK) -> bytes:
    return status + b"content-length: %d\r\n\r\n" % len(body) + body


def read(*parts: bytes, is_streamed: bool) -> tuple[RawSeen, list[bool]]:
    """What is seen of an answer that comes in these parts, and after which of them more is waited for."""
    load = _Load(RawJob("http://h", "m", 1, 4, 3, 0.0, is_streamed))  # whose time is up: no further request
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client, waits = _Client(ours, 0, sent_at=1.0), []
        for part in parts:
            if part:
                theirs.sendall(part)
            else:
                theirs.close()
            waits.append(load._read(client))
    return load.seen, waits


@pytest.mark.parametrize("cut", range(1, len(EVENTS)))
def test_given_events_in_two_parts_when_read_then_each_is_counted_once_and_the_end_is_seen(cut: int) -> None:
    seen, waits = read(STREAM + EVENTS[:cut], EVENTS[cut:], is_streamed=True)
    assert seen.failures == []
    assert (seen.num_answers, seen.num_events, len(seen.first_bytes)) == (1, 3, 1)
    assert waits == [True, False]


def test_given_events_byte_by_byte_when_read_then_each_is_counted_once() -> None:
    seen, waits = read(STREAM, *[EVENTS[i : i + 1] for i in range(len(EVENTS))], is_streamed=True)
    assert (seen.num_answers, seen.num_events) == (1, 3)
    assert waits[-2:] == [True, False]


def test_given_a_whole_answer_in_parts_when_read_then_it_ends_where_its_length_says() -> None:
    data = whole(b'{"usage":{},"choices":[{}]}')
    seen, waits = read(data[:-4], data[-4:-3], data[-3:], is_streamed=False)
    assert (seen.num_answers, seen.failures) == (1, [])
    assert waits == [True, True, False]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("status", [b"HTTP/1.1 429 Too Many Requests\r\n", b"HTTP/1.1 500 Internal Server Error\r\n"])
def test_given_a_refusal_when_read_then_it_is_no_answer(status: bytes, is_streamed: bool) -> None:
    seen, waits = read(whole(b'{"error":{"message":"no"}}', status), is_streamed=is_streamed)
    assert (seen.num_answers, waits) == (0, [False])
    assert '"no"' in seen.failures[0]


def test_given_an_error_within_a_stream_when_read_then_it_is_no_answer() -> None:
    seen, waits = read(STREAM + b"2\r\n" + EVENT, b'14\r\ndata: {"error":{}}\n\n', is_streamed=True)
    assert (seen.num_answers, len(seen.failures)) == (0, 1)
    assert waits == [True, False]


def test_given_a_connection_that_ends_when_read_then_that_is_a_failure() -> None:
    seen, waits = read(STREAM + b"2\r\n" + EVENT, b"", is_streamed=True)
    assert seen.failures == ["the connection ended"]
    assert waits == [True, False]


def test_given_a_server_when_the_load_runs_then_each_request_that_it_got_is_an_answer() -> None:
    num_requests = 0

    def serve(listener: socket.socket) -> None:
        nonlocal num_requests
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            while lines.readline().startswith(b"POST "):
                head = iter(lines.readline, b"\r\n")
                length = next(int(line[15:]) for line in list(head) if line.startswith(b"Content-Length:"))
                lines.read(length)
                num_requests += 1
                connection.sendall(STREAM + EVENTS)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        seen = run_raw(RawJob(f"http://127.0.0.1:{listener.getsockname()[1]}", "m", 1, 4, 3, 0.05))
        thread.join(30)
    assert not thread.is_alive()
    assert seen.failures == []
    assert seen.num_answers == num_requests >= 1
    assert seen.num_events == 3 * num_requests
