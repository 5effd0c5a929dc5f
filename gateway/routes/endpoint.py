"""What a route's handler is given, and the ASGI endpoint that runs it and answers its errors."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.body import ClientGone, read_json
from gateway.context import RequestInfo, request_info
from gateway.errors import ApiError, to_api_error
from gateway.schemas import Body, ChoicesRequest, EngineRequest, parse
from gateway.service import GatewayService
from gateway.slices import to_json
from gateway.text_jobs import DecodeJob, EncodeJob, Job, RenderJob, unpack_ids
from novainfer.errors import DeadlineError, InvalidRequestError, NovaInferError

MODE_HEADER = "x-novainfer-mode"  # see `novainfer.mode`
RECEIPT_HEADER = "x-novainfer-receipt"
TIMEOUT_HEADER = "x-request-timeout"  # seconds
_RECEIPT, _TIMEOUT = RECEIPT_HEADER.encode(), TIMEOUT_HEADER.encode()
LONG_BODY = 256 * 1024  # bytes; the text of larger ones has a process of its own: short ones need not wait for it
_SECONDS = re.compile(rb"\d{1,9}(\.\d{1,9})?")
_CLIENT_GONE_STATUS = 499  # for the metrics only; nobody is there to read it


@dataclass(slots=True)
class Call:
    """One request to a handler."""

    service: GatewayService
    scope: Scope
    receive: Receive
    send: Send
    info: RequestInfo  # its id, tenant and start

    @property
    def path_params(self) -> Mapping[str, str]:
        """The variable parts of the path."""
        params: Mapping[str, str] = self.scope["path_params"]
        return params

    async def answer(self, response: ASGIApp) -> None:
        """Send it. To do so while what was admitted is held keeps answers that nobody reads from piling up."""
        await response(self.scope, self.receive, self.send)

    async def parse(self, kind: type[Body]) -> tuple[Body, dict[str, str]]:
        """The body as `kind`, and the headers that name what in it was ignored.

        Raises `OverloadedError` before the body of a generation is parsed, if not even the smallest had room.
        """
        service = self.service
        if issubclass(kind, EngineRequest):
            await service.wait_for_engine()
        body = await read_json(
            self.scope,
            self.receive,
            max_bytes=service.max_body_bytes,
            budget=service.body_budget,
            check=partial(service.refuse_if_full, self.info) if issubclass(kind, EngineRequest) else lambda: None,
        )
        request, ignored = parse(kind, body, strict_params=service.config.server.strict_params)
        return request, {"x-novainfer-ignored": ",".join(ignored)} if ignored else {}

    def limit_time(self) -> None:
        """Take in the time limit of the server and the header that shortens it. Raises `InvalidRequestError`."""
        asked = self._values_of(_TIMEOUT)
        limit = self.service.config.server.request_timeout or math.inf
        for value in asked:
            if not _SECONDS.fullmatch(value) or float(value) <= 0:
                text = f"The header {TIMEOUT_HEADER} must be a number of seconds above 0."
                raise InvalidRequestError(text, param=TIMEOUT_HEADER)
            limit = min(limit, float(value))
        self.info.time_limit = limit

    def wants_receipt(self, request: ChoicesRequest) -> bool:
        """Asked for in the body or by a header, which clients can set that know the API's fields alone."""
        return self.receipt_header() or request.receipt

    def receipt_header(self) -> bool:
        """Whether that asks for one. Raises `InvalidRequestError`."""
        asked = self._values_of(_RECEIPT)
        if any(value not in (b"true", b"false") for value in asked):
            raise InvalidRequestError(f"The header {RECEIPT_HEADER} must be true or false.", param=RECEIPT_HEADER)
        return b"true" in asked

    def _values_of(self, header: bytes) -> list[bytes]:
        if header not in self.info.fields:
            return []
        return [value for name, value in self.scope["headers"] if name == header]

    async def encode(self, job: RenderJob | EncodeJob) -> list[list[int]]:
        """Token ids of each prompt; see `prepare`."""
        return [unpack_ids(part) for part in await self.prepare(job)]

    async def decode(self, job: DecodeJob) -> list[str]:
        """The text of each list of ids; see `prepare`."""
        return [str(part, "utf-8") for part in await self.prepare(job)]

    async def prepare(self, job: Job) -> list[bytes]:
        """Have a text process do it. Raises `InvalidRequestError`, `EngineError`, `DeadlineError` if the request's time
        is over before, and `ClientGone`.
        """
        info = self.info
        turn = self.service.text.submit(job, info.tenant, is_long=info.body_bytes > LONG_BODY)
        seconds = None if info.time_limit == math.inf else max(info.time_left, 0.0)
        with self.client_leaves() as gone:
            try:
                await asyncio.wait([turn.task, gone], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                turn.abandon()
            if turn.task.done():
                return turn.task.result()
            if gone.done():
                raise ClientGone
        raise DeadlineError(f"The request's time limit of {info.time_limit:g} s passed while its prompt was prepared.")

    @contextmanager
    def client_leaves(self) -> Iterator[asyncio.Task[None]]:
        """Done once the client has gone away. Nothing else may read from the client meanwhile."""
        gone = asyncio.create_task(self._wait_for_disconnect())
        try:
            yield gone
        finally:
            gone.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Call], Awaitable[ASGIApp | None]]


class Endpoint:
    """Runs a handler. It returns its response, or None after it has sent one itself."""

    def __init__(self, service: GatewayService, path: str, handler: Handler) -> None:
        self._service = service
        self._path = plain_path(path)  # as metrics name it
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = request_info(scope)
        info.handler = self._path
        response: ASGIApp | None
        try:
            response = await self._handler(Call(self._service, scope, receive, send, info))
        except ClientGone:
            info.status = _CLIENT_GONE_STATUS
            return
        except (NovaInferError, ApiError) as error:
            response = to_api_error(error, info.request_id).response(self._path)
        if response is not None:
            await response(scope, receive, send)
        elif not info.status:  # a stream that had not begun
            info.status = _CLIENT_GONE_STATUS


def plain_path(path: str) -> str:
    """`{model_id:path}`, which may hold slashes, is `{model_id}` to OpenAPI and to metrics."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def route(service: GatewayService, method: str, path: str, handler: Handler) -> Route:
    """A route of the application."""
    return Route(path, Endpoint(service, path, handler), methods=[method])


def json_response(data: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """An answer in JSON, non-ASCII as it is."""
    return Response(to_json(data).encode(), status, headers, media_type="application/json")
