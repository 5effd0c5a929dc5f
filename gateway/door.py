"""Refuses, at the door, the generations for which there is no room: while there is far too much work, most of the
gateway's time goes into saying so, and on a CPU that time is the ranks'.

The answer is the one that the application would give, without the application: no task, no layers, no body parsed.
Whatever is not as plain as most requests are is the application's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.auth import KeyRing
from gateway.context import RequestInfo, answer_headers, request_id_of
from gateway.errors import to_api_error
from gateway.plain_request import PlainRequest
from gateway.routes.endpoint import TIMEOUT_HEADER
from gateway.service import GatewayService
from novainfer.errors import NovaInferError, OverloadedError

_TIMEOUT = TIMEOUT_HEADER.encode()
Header = tuple[bytes, bytes]
PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Door:
    """Stands before a service."""

    def __init__(self, service: GatewayService, keys: KeyRing) -> None:
        self._service = service
        self._keys = keys
        self._is_open_to_pages = bool(service.config.server.cors_origins)

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
        info = RequestInfo(request_id_of(headers), handler=request.path, tenant=tenant, body_bytes=body_bytes)
        try:
            service.refuse_if_full(info)
        except OverloadedError as error:
            answer = to_api_error(error, info.request_id)
        except NovaInferError:
            return None
        else:
            return None
        service.metrics.http_request("POST", info.handler, answer.status)
        return answer.message_of((*headers_of_all, *answer_headers(info)))
