"""The HTTP application: which paths there are and what stands around them. Starlette; no route is open by accident."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp

from gateway.auth import AuthMiddleware, KeyRing
from gateway.context import ContextMiddleware
from gateway.errors import to_api_error
from gateway.routes import chat, completions, health, models, requests, tokenize
from gateway.routes.endpoint import Handler, route
from gateway.service import GatewayService

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model_id:path}", models.get_model),
    ("POST", "/v1/requests/{request_id}/cancel", requests.cancel),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/health", health.health),
    ("GET", "/healthz", health.health),
    ("GET", "/ping", health.health),
    ("GET", "/livez", health.livez),
    ("GET", "/readyz", health.readyz),
    ("GET", "/version", models.version),
    ("GET", "/metrics", health.metrics),
)


def create_app(service: GatewayService, keys: KeyRing) -> ASGIApp:
    """The application around `service`; it starts and closes the engine client with the server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.client.start()
        try:
            yield
        finally:
            await service.client.close()
            service.close()

    routes: list[BaseRoute] = [route(service, method, path, handler) for method, path, handler in ROUTES]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=_middleware(service, keys),
        exception_handlers={HTTPException: _http_error},
    )
    _no_redirects(app.router)
    return app


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
                expose_headers=["x-request-id", "x-novainfer-ignored", "retry-after"],
            )
        )
    return [*layers, Middleware(AuthMiddleware, keys)]


def _no_redirects(router: Router) -> None:
    """`/health/` is not `/health`: one spelling a route, for the keys and for the metrics."""
    router.redirect_slashes = False


async def _http_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()
