"""`POST /v1/requests/{id}/cancel`."""

from __future__ import annotations

from starlette.responses import Response

from gateway.errors import ApiError
from gateway.routes.endpoint import Call, json_response


async def cancel(call: Call) -> Response:
    """Cancel a live generation of this API key, by the id in its answer or by its `x-request-id`, at any gateway.

    Its stream ends at once with the finish reason 'cancelled'.
    """
    key = call.path_params["request_id"]
    if not await call.service.cancel(key, call.info.tenant):
        raise ApiError(404, "There is no live request with this id.", "request_not_found")
    return json_response({"id": key, "object": "request.cancelled", "cancelled": True})
