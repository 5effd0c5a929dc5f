"""The head of a request as it comes, given on to the parser in whole lines, and without offers that it would fall for.

A server may go on in HTTP/1.1 whatever a client offers (`Upgrade`), and some offer h2c with every request; httptools
takes such a request for one without a body, and then what the body says for the next request. So the parser gets a
header of another name. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re

_UPGRADE = re.compile(rb"(^|\n)u(pgrade[ \t]*:)", re.IGNORECASE)
_METHOD = re.compile(rb"[A-Z-]{1,20}(?: |\Z)")


class HeadLines:
    """One head after another. num_bytes: of this one that have come, without the blank lines before it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The next one."""
        self.num_bytes = 0
        self._rest = b""  # of a line that is not whole
        self._has_line = False

    def take(self, data: bytes) -> bytes:
        """What of it the parser may have now: whole lines; all, when the head ends in it."""
        data = self._rest + data
        self.num_bytes -= len(self._rest)
        if not self._has_line:
            data = data.lstrip(b"\r\n")
        end = self._end_in(data)
        if end:
            self.num_bytes += end
            self._rest = b""
            return _without_upgrade(data[:end]) + data[end:]
        self.num_bytes += len(data)
        end = data.rfind(b"\n") + 1
        if not (end or self._has_line or _METHOD.match(data)):
            end = len(data)  # no request, as the parser will say
        self._has_line = self._has_line or end > 0
        self._rest = data[end:]
        return _without_upgrade(data[:end])

    def _end_in(self, data: bytes) -> int:
        """Where the blank line ends that ends the head; 0 if it has not come."""
        if self._has_line and data.startswith(b"\r\n"):
            return 2
        return data.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0


def _without_upgrade(lines: bytes) -> bytes:
    if b"pgrade" not in lines.lower():
        return lines
    return _UPGRADE.sub(rb"\1x\2", lines)
