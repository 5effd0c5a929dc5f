"""Reads a POST that is as plain as nearly all are, from its bytes: what the door has to know, before any parser's work.

Only what every parser reads in the same way is plain; for all else the answer is None, and a parser's matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 16 * 1024
_LINE = re.compile(rb"POST (/[a-z0-9/]*) HTTP/1\.1\r\n")
_HEADERS = re.compile(rb"(?:[A-Za-z0-9-]+:[\t\x20-\x7e]*\r\n)+")
_LENGTH = re.compile(rb"[0-9]{1,12}")
# How a body ends or a connection goes on, when these are there, is more than a length says.
_NOT_PLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer", b"te", b"http2-settings"})


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """The head of a POST in HTTP/1.1 on a connection that is kept. `headers`: names in lower case, values stripped."""

    path: str
    headers: list[tuple[bytes, bytes]]
    head_bytes: int
    body_bytes: int  # as announced

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return self.head_bytes + self.body_bytes


def read_plain_head(data: bytes) -> PlainRequest | None:
    """The request that `data` begins with, if its head is whole and plain."""
    line = _LINE.match(data)
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if line is None or end < line.end() or _HEADERS.fullmatch(data, line.end(), end + 2) is None:
        return None
    headers = []
    length, num_hosts = None, 0
    for one in data[line.end() : end].split(b"\r\n"):
        raw_name, _, raw_value = one.partition(b":")
        name, value = raw_name.lower(), raw_value.strip(b" \t")
        if name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name in _NOT_PLAIN or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        num_hosts += name == b"host"
        headers.append((name, value))
    if length is None or num_hosts != 1:
        return None
    return PlainRequest(line[1].decode(), headers, end + 4, length)
