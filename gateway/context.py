"""What is known about one HTTP request while it is answered, and the outermost layer that keeps it.

That layer gives every answer its `x-request-id` and timing headers, turns what nobody caught into a 500, and counts.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import MESSAGE_PATHS, ApiError, to_api_error
from gateway.limits import NO_PERMIT, Permit
from gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "novainfer"
_REQUEST_ID = b"x-request-id"
# A proxy may go by the one and the parser by the other: what follows would be a request to one of them alone.
_TWO_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(slots=True)
class RequestInfo:
    """One HTTP request. `handler` is the route's path as declared, so metrics stay few; `tenant` whose key it is."""

    request_id: str
    started: float = field(default_factory=time.perf_counter)
    handler: str = "unmatched"
    tenant: str = ""
    status: int = 0
    received: Iterable[tuple[bytes, bytes]] = ()  # headers, names in lower case
    body_bytes: int = 0
    time_limit: float = math.inf  # seconds from `started`
    permit: Permit = NO_PERMIT  # what it holds
    headers: dict[str, str] = field(default_factory=dict)  # of its answer, whatever that is
    fields: Mapping[bytes, bytes] = field(default_factory=dict)  # `received`, the last of each name

    @property
    def time_left(self) -> float:
        """Seconds; may be below 0."""
        return self.time_limit - (time.perf_counter() - self.started)


def request_info(scope: Scope) -> RequestInfo:
    """The `RequestInfo` that the outermost layer put into the scope."""
    info: RequestInfo = scope[_KEY]
    return info


class ContextMiddleware:
    """The outermost layer: see the module's note."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = scope["headers"]
        fields = dict(received)
        request_id = request_id_of(received if _REQUEST_ID in fields else ())
        info = scope[_KEY] = RequestInfo(request_id, received=received, fields=fields)
        name_request(info, scope["path"])

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                message["headers"] = [*message["headers"], *answer_headers(info)]
            return send(message)

        app = self._app
        if fields.keys() >= _TWO_LENGTHS:  # httptools itself refuses it, h11 does not
            words = "A request has Content-Length or Transfer-Encoding, not both."
            app = ApiError(400, words, "invalid_http", None, {"connection": "close"}).response(scope["path"])
        try:
            await app(scope, receive, send_with_headers)
        except Exception as error:
            log.exception("request %s failed", info.request_id, extra={"request_id": info.request_id})
            if info.status:
                raise  # the answer has begun: the server closes the connection
            await to_api_error(error).response(scope["path"])(scope, receive, send_with_headers)
        finally:
            self._metrics.http_request(scope["method"], info.handler, info.status)


def name_request(info: RequestInfo, path: str) -> None:
    """Have its answer carry its id as the clients of the path expect it, too."""
    if path in MESSAGE_PATHS:
        info.headers["request-id"] = info.request_id


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's id where it is sane, else one of ours."""
    for name, value in headers:
        if name == _REQUEST_ID and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{os.urandom(12).hex()}"


def answer_headers(info: RequestInfo) -> list[tuple[bytes, bytes]]:
    """What every answer carries, beside its own headers."""
    elapsed = (time.perf_counter() - info.started) * 1000
    headers = [
        (b"x-request-id", info.request_id.encode()),
        (b"openai-processing-ms", b"%d" % round(elapsed)),
        (b"openai-version", b"2020-10-01"),
    ]
    if info.headers:
        headers += [(name.encode(), value.encode()) for name, value in info.headers.items()]
    return headers
