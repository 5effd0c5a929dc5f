"""Answers of any size, written and sent in slices: between them the event loop does its other work."""

from __future__ import annotations

import asyncio
import json.encoder
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from starlette.types import Receive, Scope, Send

SLICE_SECONDS = 0.005
PART_BYTES = 64 * 1024


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_make: Any = getattr(json.encoder, "c_make_encoder", None)
_in_c = _make and _make(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)


def to_json(value: Any) -> str:
    """JSON without spaces, non-ASCII as it is. `JSONEncoder.encode` makes an encoder for each call."""
    return _encoder.encode(value) if _in_c is None else "".join(_in_c(value, 0))


class Slices:
    """The slices of one piece of work."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Others have worked until now, as this task waited: so a slice begins."""
        self._began = time.perf_counter()

    async def pause(self) -> None:
        """Let others work if this slice was long enough. Call it every few microseconds to milliseconds."""
        if time.perf_counter() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self.begin()


class Written(list[str]):
    """JSON that is written already, in parts."""


def write_object(fields: Mapping[str, Any]) -> Written:
    """A JSON object, non-ASCII as it is. Values may be `Written`; what stands between those is encoded at once."""
    if not any(isinstance(value, Written) for value in fields.values()):
        return Written([to_json(fields)])
    parts: list[str] = []
    for is_written, group in groupby(fields.items(), lambda field: isinstance(field[1], Written)):
        if is_written:
            for name, value in group:
                parts += [f',"{name}":', *value]
        else:
            parts += [",", to_json(dict(group))[1:-1]]
    if parts:
        parts[0] = parts[0][1:]  # no comma before the first field
    return Written(["{", *parts, "}"])


class SlicedResponse:
    """A whole answer in JSON, sent in parts; make it with `of`. An application, as of ASGI."""

    def __init__(self, parts: list[bytes], headers: Mapping[str, str]) -> None:
        self._parts = parts
        self._headers = [
            *((name.encode(), value.encode()) for name, value in headers.items()),
            (b"content-length", b"%d" % sum(map(len, parts))),
            (b"content-type", b"application/json"),
        ]

    @classmethod
    async def of(cls, written: Written, headers: Mapping[str, str]) -> SlicedResponse:
        """The response with this body."""
        if len(written) == 1:
            return cls(_cut(written[0].encode()), headers)
        slices = Slices()
        parts: list[bytes] = []
        group: list[str] = []
        size = 0
        for text in written:
            group.append(text)
            size += len(text)
            if size >= PART_BYTES:
                parts += _cut("".join(group).encode())
                group, size = [], 0
            await slices.pause()
        return cls([*parts, *_cut("".join(group).encode())], headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as fast as the client takes it."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        if len(self._parts) > 1:
            slices = Slices()
            for part in self._parts[:-1]:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await slices.pause()
        # The end goes with the last byte: a client may send its next request as soon as it has that.
        await send({"type": "http.response.body", "body": self._parts[-1]})


def _cut(data: bytes) -> list[bytes]:
    """In parts, so that one is sent when its client has taken those before it. At least one."""
    if len(data) <= PART_BYTES:
        return [data]
    return [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
