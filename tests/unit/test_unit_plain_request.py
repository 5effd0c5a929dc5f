"""Requests read from their bytes: never otherwise than by the parser that reads all the others."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.plain_request import MAX_HEAD_BYTES, PlainRequest, read_plain_head

pytestmark = pytest.mark.unit

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"


class Parsed:
    """What httptools makes of it."""

    def __init__(self, data: bytes) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.num_complete = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.num_complete += 1


def check(data: bytes) -> PlainRequest | None:
    """If it is plain, the parser agrees in everything, up to the last byte."""
    request = read_plain_head(data)
    if request is not None:
        body = b"x" * min(request.body_bytes, 1000)
        whole = data[: request.head_bytes] + body
        parsed = Parsed(whole)
        assert (parsed.url, parsed.headers) == (request.path.encode(), request.headers)
        assert parsed.num_complete == (request.body_bytes == len(body))
        assert parsed.body == body
        assert parsed.parser.should_keep_alive()
        assert parsed.parser.get_method() == b"POST"
        assert parsed.parser.get_http_version() == "1.1"
    return request


def test_given_a_plain_request_when_read_then_its_parts_are_there() -> None:
    request = check(HEAD + b"{}")
    assert request == PlainRequest("/v1/completions", [(b"host", b"h"), (b"content-length", b"2")], len(HEAD), 2)
    assert request.num_bytes == len(HEAD) + 2


names = st.sampled_from(
    b"Content-Length;content-length;Connection;Transfer-Encoding;Expect;Upgrade;X-A;Te;Authorization;X Y;;A:;"
    b" folded;X\x00;\xff;Trailer;Keep-Alive".split(b";")
)
values = st.one_of(
    st.sampled_from([b" 2", b"2", b"+2", b"0x2", b"2, 2", b" 10 ", b"\t7\t", b"-1", b"", b"close", b"Keep-Alive"])
    | st.sampled_from([b"chunked", b"keep-alive", b"upgrade", b"100-continue", b"9" * 20, b"a\rb", b"a\nb", b"\xc3"]),
    st.binary(max_size=12),
)
ends = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n", b"\r\n "])
lines = st.sampled_from(
    [
        *[b"POST /v1/completions HTTP/1.1"] * 6,
        b"POST  /v1/completions HTTP/1.1",
        b"POST /v1/completions HTTP/1.0",
        b"POST /v1/completions?a=1 HTTP/1.1",
        b"GET /v1/completions HTTP/1.1",
        b"POST http://h/v1/completions HTTP/1.1",
        b"POST /v1/%63 HTTP/1.1",
        b"POST / ",
    ]
)


@given(lines, st.lists(st.tuples(names, st.sampled_from([b":", b" :", b""]), values, ends), max_size=6), ends)
def test_given_any_head_when_it_is_taken_for_plain_then_a_parser_reads_the_same(
    line: bytes, headers: list[tuple[bytes, bytes, bytes, bytes]], end: bytes
) -> None:
    check(line + b"\r\n" + b"".join(b"".join(one) for one in headers) + end)
    plain = b"".join(b"".join(one) for one in headers)
    check(line + b"\r\n" + plain + b"Content-Length: 3\r\n" + end)


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 2",
        b"Content-Length: 3",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding : chunked",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Connection: upgrade",
        b"Upgrade: h2c",
        b" folded: line",
        b"X-A: \x00",
        b"X-A: caf\xc3\xa9",
        b"X-A: a\rb",
        b"no colon",
        b": nameless",
    ],
    ids=range(14),
)
def test_given_a_header_that_readers_may_differ_on_when_read_then_it_is_not_plain(header: bytes) -> None:
    assert read_plain_head(HEAD.replace(b"Host: h", header) + b"{}") is None


@pytest.mark.parametrize("cut", range(1, len(HEAD)))
def test_given_a_part_of_a_head_when_read_then_it_is_not_plain(cut: int) -> None:
    assert read_plain_head(HEAD[:cut]) is None


def test_given_a_long_head_when_read_then_it_is_not_plain() -> None:
    def head(num_bytes: int) -> bytes:
        return HEAD.replace(b"Host: h", b"Host: " + b"h" * (1 + num_bytes - len(HEAD)))

    assert check(head(MAX_HEAD_BYTES)) is not None
    assert check(head(MAX_HEAD_BYTES + 1)) is None
