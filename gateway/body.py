"""Reads a request's JSON body within bounds: bytes (its own, and of all bodies together), time, width, depth."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from gateway.context import request_info
from gateway.errors import ApiError

BODY_SECONDS = 30.0
MAX_DEPTH = 64
# What reads a body holds the event loop, some 0.1 us for an item and 2 to 5 for a node, the checks behind the parser
# included. Prompts of 128k token ids are far below, chats of all messages that are allowed, half of them calls, below.
MAX_ITEMS = 2**19  # commas
MAX_NODES = 2**17  # lists, objects and keys
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair, perhaps with the other half
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # linear, whatever the body is


class ClientGone(Exception):
    """The client closed the connection before it had an answer."""


class ByteBudget:
    """The bytes that all bodies being read may hold together: slow uploads must not fill the memory."""

    def __init__(self, limit: int, *, is_shared: bool) -> None:
        """is_shared: there are several tenants, of which none may hold more than half."""
        self.left = limit
        self._most = limit // 2 if is_shared else limit
        self._held: dict[str, int] = {}

    def has_room(self, tenant: str, count: int) -> bool:
        """Whether `take` would do it."""
        return count <= self.left and self._held.get(tenant, 0) + count <= self._most

    def take(self, tenant: str, count: int) -> None:
        """Hold `count` bytes more. Raises `ApiError`: 503 where there is no room, 429 where the tenant has its part."""
        held = self._held.get(tenant, 0) + count
        # The rest of the body is not read, so the connection cannot be used again.
        headers = {"connection": "close", "retry-after": "1"}
        if count > self.left:
            raise ApiError(503, "The server is reading too many requests.", "overloaded", None, headers)
        if held > self._most:
            words = "The server is reading too many requests of this API key."
            raise ApiError(429, words, "rate_limit_exceeded", None, headers)
        self.left -= count
        self._held[tenant] = held

    def give_back(self, tenant: str, count: int) -> None:
        """Let go of `count` bytes that were taken."""
        self.left += count
        self._held[tenant] = self._held.get(tenant, 0) - count


async def read_json(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    budget: ByteBudget,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The JSON object in the body. Raises `ApiError` (400, 408, 413, 415, 429, 503) or `ClientGone`.

    `check` is called once the size is known, and may raise: a request that has no chance need not be parsed.
    """
    info = request_info(scope)
    headers = info.fields
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise _unread(415, "Content-Type must be application/json.", "unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise _unread(415, "The body must come as it is, without a Content-Encoding.", "unsupported_media_type")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    if _is_here(receive):
        body = await _read(receive, max_bytes, budget, info.tenant)
    else:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read(receive, max_bytes, budget, info.tenant)
        except TimeoutError:
            raise ApiError(408, "The request body came too slowly.", "timeout") from None
    info.body_bytes = len(body)
    check()
    return _parse(body)


def _is_here(receive: Receive) -> bool:
    """Whether all of it has come, as uvicorn alone can tell: then there is nothing to wait for."""
    return getattr(getattr(receive, "__self__", None), "more_body", True) is False


async def _read(receive: Receive, max_bytes: int, budget: ByteBudget, tenant: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            if size + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            budget.take(tenant, len(chunk))
            size += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)
    finally:
        budget.give_back(tenant, size)


def _too_large(max_bytes: int) -> ApiError:
    return _unread(413, f"The request body is larger than {max_bytes} bytes.", "request_too_large")


def _unread(status: int, message: str, code: str) -> ApiError:
    """The rest of the body is not read, so the connection cannot be used again."""
    return ApiError(status, message, code, None, {"connection": "close"})


def _parse(body: bytes) -> dict[str, Any]:
    # Text may hold any number of commas and brackets: strings are taken out where the quick look is not enough.
    if _is_wide(body) and _is_wide(_STRING.sub(b"", body, MAX_ITEMS + MAX_NODES)):
        limits = f"{MAX_ITEMS} items or {MAX_NODES} lists, objects and keys"
        raise ApiError(400, f"The request body has more than {limits}.", "invalid_json")
    try:
        data = _decode(body.decode("utf-8"))
        if b"\\u" in body and _HALF.search(body) is not None:
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair is no text
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ApiError(400, "The request body is not valid JSON in UTF-8.", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The request body must be a JSON object.", "invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper_than(data, MAX_DEPTH):
        raise ApiError(400, f"The request body is nested more than {MAX_DEPTH} levels deep.", "invalid_json")
    return data


def _is_wide(body: bytes) -> bool:
    if len(body) <= min(MAX_ITEMS, MAX_NODES):
        return False
    return body.count(b",") > MAX_ITEMS or sum(map(body.count, (b"[", b"{", b":"))) > MAX_NODES


def _finite(text: str) -> float:
    """The number, also where no field has been told what it may be; 1e400 is not one of ours."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is out of range")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant).decode


def _is_deeper_than(data: Any, limit: int) -> bool:
    """Level by level, without recursion."""
    level = [data]
    for _ in range(limit):
        children = [value.values() if type(value) is dict else value for value in level]
        level = [item for values in children for item in values if type(item) in (dict, list)]
        if not level:
            return False
    return True
