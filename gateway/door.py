"""Refuses, at the door, the generations for which there is no room: while there is far too much work, most of the
gateway's time goes into saying so, and on a CPU that time is the ranks'.

The answer is the one that the application would give, without the application: no task, no layers, no body parsed.
Whatever is not as plain as most requests are is the application's matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.auth import KeyRing
from gateway.context import RequestInfo, answer_headers, name_request, request_id_of
from gateway.errors import retry_seconds, to_api_error
from gateway.plain_request import PlainRequest
from gateway.routes.endpoint import TIMEOUT_HEADER
from gateway.service import GatewayService
from novainfer.errors import NovaInferError, OverloadedError
from novainfer.protocol.messages import EngineStats

_TIMEOUT = TIMEOUT_HEADER.encode()
Header = tuple[bytes, bytes]
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"})
_BLANK = "\0"  # where an answer differs from the next one


@dataclass(frozen=True, slots=True)
class Standing:
    """A refusal that all get until something changes: what it holds for, the answer around what is each one's own."""

    tenant: str
    path: str
    num_changes: int  # of the limits
    stats: EngineStats | None
    headers_of_all: Sequence[Header]
    body_bytes: int  # the smallest body; a larger one has even less room
    error: OverloadedError
    parts: list[bytes]
    counts: tuple[Callable[[], None], ...]

    def answer(self, request_id: bytes) -> bytes:
        """To one more request; counts it."""
        for count in self.counts:
            count()
        seconds = retry_seconds(self.error, request_id)
        retry_after, milliseconds, *around_ids = self.parts
        rest = request_id.join(around_ids)
        return b"%b%d%b%d%b" % (retry_after, math.ceil(seconds), milliseconds, math.ceil(seconds * 1000), rest)


class Door:
    """Stands before a service."""

    def __init__(self, service: GatewayService, keys: KeyRing) -> None:
        self._service = service
        self._keys = keys
        self._is_open_to_pages = bool(service.config.server.cors_origins)
        self._standing: Standing | None = None

    @property
    def is_guarded(self) -> bool:
        """Whether requests have to stop here: not while nobody is refused, for it takes its time."""
        return self._service.limits.is_guarded

    def is_watched(self, request: PlainRequest) -> bool:
        """Whether there may be a `refusal` for it; asked before its body is here."""
        return request.path in PATHS and not self._is_open_to_pages

    def refusal(self, request: PlainRequest, headers_of_all: Sequence[Header]) -> bytes | None:
        """The whole answer to a request that is here to its end and has no room; None if the application has to look.

        headers_of_all: what comes before those of any answer.
        """
        service = self._service
        headers, body_bytes = request.headers, request.body_bytes
        kinds = [value for name, value in headers if name == b"content-type"]
        tenant = self._keys.tenant(headers) if kinds == [b"application/json"] else None
        if tenant is None or service.client.limits is None or any(name == _TIMEOUT for name, _ in headers):
            return None
        if body_bytes > service.max_body_bytes or not service.body_budget.has_room(tenant, body_bytes):
            return None
        standing = self._standing
        if standing is None or not self._holds(standing, request, tenant, headers_of_all):
            standing = self._standing = self._look(request, tenant, headers_of_all)
        if standing is None:
            return None
        service.limits.guard()
        return standing.answer(request_id_of(headers).encode())

    def _holds(self, standing: Standing, request: PlainRequest, tenant: str, headers_of_all: Sequence[Header]) -> bool:
        limits = self._service.limits
        return (
            standing.num_changes == limits.num_changes
            and standing.stats is self._service.client.stats
            and standing.headers_of_all is headers_of_all
            and standing.tenant == tenant
            and standing.path == request.path
            and standing.body_bytes <= request.body_bytes
            and limits.is_timeless(tenant)
            and not limits.draining
        )

    def _look(self, request: PlainRequest, tenant: str, headers_of_all: Sequence[Header]) -> Standing | None:
        """The refusal that a request gets now, which is yet to be counted."""
        service = self._service
        info = RequestInfo(_BLANK, handler=request.path, tenant=tenant, body_bytes=request.body_bytes)
        name_request(info, request.path)
        try:
            service.check_room(info)
        except OverloadedError as error:
            answer = to_api_error(error)
            answer.headers = dict.fromkeys(answer.headers, _BLANK)
            found = error
        except NovaInferError:
            return None
        else:
            return None
        message = answer.message_of((*headers_of_all, *answer_headers(info)), request.path)
        metrics = service.metrics
        return Standing(
            tenant,
            request.path,
            service.limits.num_changes,
            service.client.stats,
            headers_of_all,
            request.body_bytes,
            found,
            message.split(_BLANK.encode()),
            (
                metrics.http_counter("POST", request.path, answer.status).inc,
                metrics.rejected_counter(answer.status).inc,
            ),
        )
