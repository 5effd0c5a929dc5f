"""Heads of requests in whole lines, however they come; offers of other protocols under another name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.head_lines import HeadLines

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

HEAD = b"POST /v1/upgrade: HTTP/1.1\r\nHost: x\r\nupGRADE : h2c\r\nX-Upgrade: 1\r\nConnection: Upgrade\r\n\r\n"
RENAMED = b"POST /v1/upgrade: HTTP/1.1\r\nHost: x\r\nxpGRADE : h2c\r\nX-Upgrade: 1\r\nConnection: Upgrade\r\n\r\n"
BODY = b"\r\nUpgrade: no\r\n\r\n"


def feed(head: HeadLines, parts: list[bytes]) -> list[bytes]:
    """What the parser gets. Once the head is whole, the rest goes past it, as in a connection."""
    given: list[bytes] = []
    is_whole = False
    for part in parts:
        given.append(part if is_whole else head.take(part))
        is_whole = is_whole or b"\r\n\r\n" in b"".join(given)
    return given


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(places=st.lists(st.integers(0, 1000), max_size=8), num_blank=st.integers(0, 3))
@example(places=[HEAD.index(b"RADE")], num_blank=0)
@example(places=[], num_blank=2)
@example(places=list(range(1, 1000)), num_blank=1)
def test_given_a_head_in_any_parts_when_it_is_passed_on_then_no_line_is_cut_and_no_upgrade_is_offered(
    places: list[int], num_blank: int
) -> None:
    head = HeadLines()
    passed = feed(head, cut(num_blank * b"\r\n" + HEAD + BODY, places))
    assert b"".join(passed) == RENAMED + BODY
    assert head.num_bytes == len(HEAD)
    text = b""
    for part in passed:
        text += part
        assert b"\r\n\r\n" in text or text == b"" or text.endswith(b"\r\n")


def test_given_a_head_that_is_not_whole_when_it_comes_byte_by_byte_then_each_byte_counts_once() -> None:
    head = HeadLines()
    for count, byte in enumerate(HEAD[:-1], 1):
        head.take(bytes([byte]))
        assert head.num_bytes == count
    head.take(HEAD[-1:])
    assert head.num_bytes == len(HEAD)
    head.begin()
    assert head.num_bytes == 0
    assert head.take(b"\r\n") == b""
    assert head.num_bytes == 0  # blank lines belong to no head
    assert head.take(HEAD) == RENAMED


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01", b"get", b"{}", b"G\x00"])
def test_given_bytes_that_begin_no_request_when_they_come_without_an_end_then_the_parser_sees_them_at_once(
    data: bytes,
) -> None:
    assert HeadLines().take(data) == data


def test_given_lines_that_end_in_a_bare_line_feed_when_they_come_then_the_parser_decides() -> None:
    head = HeadLines()
    assert head.take(b"GET / HTTP/1.1\nUpgrade: x\nHo") == b"GET / HTTP/1.1\nxpgrade: x\n"
    assert head.take(b"st: x\n\n") == b"Host: x\n\n"


def test_given_a_method_with_a_hyphen_when_its_line_is_cut_then_it_is_waited_for() -> None:
    head = HeadLines()
    assert head.take(b"M-SEARCH * HTTP/1.1") == b""
    assert head.take(b"\r\nHost: x\r\n\r\n") == b"M-SEARCH * HTTP/1.1\r\nHost: x\r\n\r\n"
