"""Every failure as OpenAI's clients expect it: `{"error": {message, type, param, code}}` with the right status.

Those of the paths that Anthropic's clients know have the same statuses, in the form that these expect.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from functools import lru_cache
from http.client import responses
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from novainfer.errors import DeadlineError, EngineError, InvalidRequestError, OverloadedError

MAX_MESSAGE_CHARS = 1024
_MAX_JITTER = 0.25  # of Retry-After
MESSAGE_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is not 200. `code` is machine-readable, `param` names a field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object, also sent as the `error` event of a stream."""
        return {"error": {"message": self._short, "type": self._type, "param": self.param, "code": self.code}}

    @property
    def message_body(self) -> dict[str, Any]:
        """The same for Anthropic's clients: what the message does not say of `param` and `code` is not told."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _MESSAGE_TYPES.get(self.status, kind), "message": self._short}}

    @property
    def _short(self) -> str:
        return self.message if len(self.message) <= MAX_MESSAGE_CHARS else self.message[:MAX_MESSAGE_CHARS] + "..."

    @property
    def _type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def response(self, path: str) -> Response:
        """The HTTP answer to a request of this path."""
        body = self.message_body if path in MESSAGE_PATHS else self.body
        return Response(json.dumps(body), self.status, self.headers, media_type="application/json")

    def message_of(self, more_headers: Iterable[tuple[bytes, bytes]], path: str) -> bytes:
        """The same as it goes over the wire, with these headers, too."""
        body = _refusal_body(self.status, self.message, self.code, self.param, path)
        headers = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        more = b"".join([b"%b: %b\r\n" % pair for pair in more_headers])
        head = f"HTTP/1.1 {self.status} {responses[self.status]}\r\n{headers}content-length: {len(body)}\r\n"
        return b"%bcontent-type: application/json\r\n%b\r\n%b" % (head.encode("latin-1"), more, body)


@lru_cache(maxsize=64)
def _refusal_body(status: int, message: str, code: str | None, param: str | None, path: str) -> bytes:
    """The same few are said again and again."""
    body = ApiError(status, message, code, param).response(path).body
    return bytes(body)


_NOTHING_THERE = "Not Found: /openapi.json tells what this server has."
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 415: "unsupported_media_type"}


def to_api_error(error: Exception, request_id: str = "") -> ApiError:
    """The answer to any exception. What is not raised on purpose becomes a 500 that tells nothing of the inside.

    `request_id`: whose answer it is; those who were refused together shall not come back together.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, error.message, error.code, error.param)
    if isinstance(error, OverloadedError):
        return _overloaded(error, request_id)
    if isinstance(error, DeadlineError):
        # The client's time is over; a retry would take as long.
        return ApiError(504, str(error), "request_timeout", None, {"x-should-retry": "false"})
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        words = _NOTHING_THERE if error.status_code == 404 else f"{error.detail}."
        return ApiError(error.status_code, words, _CODES.get(error.status_code), None, headers)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), "engine_error")
    return ApiError(500, "The server failed to answer this request.", "internal_error")


def retry_seconds(error: OverloadedError, request_id: bytes) -> float:
    """`Retry-After` for one of those who were refused."""
    jitter = zlib.crc32(request_id) / 2**32 if request_id else 0.0
    return max(error.retry_after, 0.05) * (1.0 + _MAX_JITTER * jitter)


def _overloaded(error: OverloadedError, request_id: str) -> ApiError:
    seconds = retry_seconds(error, request_id.encode())
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
    code = "rate_limit_exceeded" if error.status == 429 else "overloaded"
    return ApiError(error.status, error.message, code, None, headers)
