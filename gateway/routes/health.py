"""Is it alive, is it ready, does it get on: `/livez`, `/readyz`, `/health`, and `/metrics`."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gateway.routes.endpoint import Call, json_response


async def livez(call: Call) -> Response:
    """The process answers."""
    return json_response({"status": "ok"})


async def readyz(call: Call) -> Response:
    """Requests can be served; 503 while loading, draining, or without an engine."""
    return _state(call.service.unready_reason())


async def health(call: Call) -> Response:
    """The engine is idle or makes progress; 503 with the reason otherwise."""
    return _state(call.service.unhealthy_reason())


async def metrics(call: Call) -> Response:
    """Prometheus text, with the figures of engines that are about to tell their first ones."""
    await call.service.wait_for_figures()
    return Response(call.service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _state(reason: str | None) -> Response:
    if reason is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": reason}, {"retry-after": "2"}, 503)
