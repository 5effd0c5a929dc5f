"""Reads a request's JSON body within bounds: bytes counted as they come, time, depth, and what JSON allows."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from gateway.errors import ApiError

BODY_SECONDS = 30.0
MAX_DEPTH = 64


class ClientGone(Exception):
    """The client closed the connection before it had an answer."""


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body. Raises `ApiError` (400, 408, 413, 415) or `ClientGone`."""
    headers = dict(scope["headers"])
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise ApiError(415, "Content-Type must be application/json.", "unsupported_media_type")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, "The request body came too slowly.", "timeout") from None
    return _parse(body)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    headers = {"connection": "close"}
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", "request_too_large", None, headers)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair is no text
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ApiError(400, "The request body is not valid JSON in UTF-8.", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The request body must be a JSON object.", "invalid_json")
    if _is_deeper_than(data, MAX_DEPTH):
        raise ApiError(400, f"The request body is nested more than {MAX_DEPTH} levels deep.", "invalid_json")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_deeper_than(data: Any, limit: int) -> bool:
    """Level by level, without recursion."""
    level = [data]
    for _ in range(limit):
        children = [value.values() if type(value) is dict else value for value in level]
        level = [item for values in children for item in values if type(item) in (dict, list)]
        if not level:
            return False
    return True
