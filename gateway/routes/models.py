"""`GET /v1/models`, `GET /v1/models/{id}` and `GET /version`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from gateway.routes.endpoint import Call, json_response
from gateway.service import GatewayService
from novainfer import __version__


async def list_models(call: Call) -> Response:
    """Every name of the one model served here."""
    return json_response({"object": "list", "data": [_card(call.service, name) for name in call.service.model_names]})


async def get_model(call: Call) -> Response:
    """One of them."""
    return json_response(_card(call.service, call.service.check_model(call.path_params["model_id"])))


async def version(call: Call) -> Response:
    """The server's version."""
    return json_response({"version": __version__})


def _card(service: GatewayService, name: str) -> dict[str, Any]:
    limits = service.client.limits
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "novainfer",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": limits.max_model_len if limits is not None else None,
    }
