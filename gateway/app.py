"""The HTTP application: which paths there are and what stands around them. No route is open by accident.

FastAPI holds the routes; the endpoints read and write ASGI messages themselves, because a body has to be bounded while
it is read, and a stream has to see its client leave.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import OPEN_PATHS, PAGE_PATHS, AuthMiddleware, KeyRing
from gateway.context import ContextMiddleware
from gateway.errors import to_api_error
from gateway.limits import QUOTA_HEADERS
from gateway.message_schemas import CountTokensRequest, MessagesRequest
from gateway.openapi import EVENTS, RouteSpec, describe
from gateway.openapi_parts import ModelBounds
from gateway.openapi_schemas import STATE
from gateway.routes import (
    chat,
    completions,
    embeddings,
    health,
    messages,
    models,
    pages,
    requests,
    responses,
    server_info,
    streams,
    tokenize,
)
from gateway.routes.endpoint import Call, json_response, route
from gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseRequest,
    TemplateRequest,
    TokenizeRequest,
)
from gateway.service import GatewayService
from novainfer import __version__

# What a page of another origin may read of an answer, beside its body.
_EXPOSED = (
    "x-request-id",
    "request-id",
    "x-novainfer-ignored",
    "x-novainfer-mode",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *QUOTA_HEADERS,
)


async def openapi(call: Call) -> Response:
    """This description."""
    engine, num_texts = call.service.client.limits, call.service.num_token_ids
    bounds = ModelBounds(num_texts)
    if engine is not None:
        bounds = ModelBounds(num_texts, engine.vocab_size, engine.max_model_len, engine.hidden_size)
    return json_response(describe(ROUTES, bounds, title="NovaInfer", version=__version__))


ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("POST", "/v1/chat/completions", chat.chat_completions, "ChatCompletion", ChatRequest),
    RouteSpec("POST", "/v1/completions", completions.completions, "TextCompletion", CompletionRequest),
    RouteSpec("POST", "/v1/responses", responses.responses, "Response", ResponseRequest),
    RouteSpec("POST", "/v1/messages", messages.messages, "Message", MessagesRequest),
    RouteSpec("POST", "/v1/messages/count_tokens", messages.count_tokens, "TokenCount", CountTokensRequest),
    RouteSpec("POST", "/v1/embeddings", embeddings.embeddings, "Embeddings", EmbeddingRequest),
    RouteSpec("GET", "/v1/models", models.list_models, "ModelList"),
    RouteSpec("GET", "/v1/models/{model_id:path}", models.get_model, "Model"),
    RouteSpec("POST", "/v1/requests/{request_id:path}/cancel", requests.cancel, "Cancelled"),
    RouteSpec("GET", "/v1/streams/{stream_id:path}", streams.resume, EVENTS),
    RouteSpec("POST", "/tokenize", tokenize.tokenize, "Tokens", TokenizeRequest),
    RouteSpec("POST", "/detokenize", tokenize.detokenize, "Text", DetokenizeRequest),
    RouteSpec("POST", "/apply-template", tokenize.apply_template, "Text", TemplateRequest),
    RouteSpec("POST", "/v1/tokenize", tokenize.tokenize, "Tokens", TokenizeRequest),
    RouteSpec("POST", "/v1/detokenize", tokenize.detokenize, "Text", DetokenizeRequest),
    RouteSpec("GET", "/health", health.health, STATE),
    RouteSpec("GET", "/healthz", health.health, STATE),
    RouteSpec("GET", "/ping", health.health, STATE),
    RouteSpec("GET", "/livez", health.livez, STATE),
    RouteSpec("GET", "/readyz", health.readyz, STATE),
    RouteSpec("GET", "/version", models.version, "Version"),
    RouteSpec("GET", "/server_info", server_info.server_info, "ServerInfo"),
    RouteSpec("GET", "/get_server_info", server_info.server_info, "ServerInfo"),
    RouteSpec("GET", "/metrics", health.metrics, None),
    RouteSpec("GET", "/openapi.json", openapi, "Description"),
)


class Shortcut:
    """Finds the endpoint of a path without variables at once, past the router and what FastAPI has around it.

    Outside of everything else, so what stands around the endpoints stands around these, too: `around` puts it there.
    What it does not know is the router's matter.
    """

    def __init__(self, app: FastAPI, routes: Sequence[Route], around: Callable[[ASGIApp], ASGIApp]) -> None:
        self._app = app
        self._apps = {
            (method, one.path): around(one.app) for one in routes for method in one.methods or () if "{" not in one.path
        }

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """Of the whole application."""
        return self._app.routes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """An application, as of ASGI; no coroutine of its own, which each turn of its task would go through."""
        app = self._apps.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        return (app or self._app)(scope, receive, send)


def create_app(service: GatewayService, keys: KeyRing) -> ASGIApp:
    """The application around `service`; it starts and closes the engine client with the server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.client.start()
        try:
            yield
        finally:
            await service.client.close()
            service.close()

    routes = [route(service, spec.method, spec.path, spec.handler) for spec in ROUTES]
    if service.config.server.web_ui:
        routes += [route(service, "GET", path, handler) for path, handler in pages.load().items()]
    layers = _middleware(service, keys)
    app = FastAPI(
        routes=[*routes],
        lifespan=lifespan,
        middleware=layers,
        exception_handlers={HTTPException: _http_error},
        redirect_slashes=False,  # `/health/` is not `/health`: one spelling a route, for the keys and for the metrics
        openapi_url=None,  # ours covers raw endpoints and stands behind the key like every other route
        docs_url=None,
        redoc_url=None,
    )

    def around(endpoint: ASGIApp) -> ASGIApp:
        for layer, args, kwargs in reversed(layers):
            endpoint = layer(endpoint, *args, **kwargs)
        return endpoint

    return Shortcut(app, routes, around)


def _middleware(service: GatewayService, keys: KeyRing) -> list[Middleware]:
    """Outermost first. CORS stands before the keys, because a browser asks for it without one."""
    layers = [Middleware(ContextMiddleware, service.metrics)]
    origins = service.config.server.cors_origins
    if origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )
        )
    open_paths = OPEN_PATHS | PAGE_PATHS if service.config.server.web_ui else OPEN_PATHS
    return [*layers, Middleware(AuthMiddleware, keys, open_paths)]


async def _http_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response(request.scope["path"])
