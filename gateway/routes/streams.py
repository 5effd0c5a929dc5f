"""`GET /v1/streams/{id}`: the rest of a stream whose gateway died, or whose last events got lost."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs

from starlette.responses import Response

from gateway.answers import chunks_of
from gateway.errors import ApiError
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.sse import SseResponse
from gateway.stream_record import PromptRecord
from novainfer.errors import InvalidRequestError


async def resume(call: Call) -> Response | None:
    """Go on after the event with the id `after` (or the header Last-Event-ID); from the beginning without one."""
    service = call.service
    key = call.path_params["stream_id"]
    after = _last_event_id(call)
    with service.admit(call.info):
        claimed = await service.claim(key, call.info.tenant)
        prompts = [(PromptRecord.from_json(request.answer), request) for request in claimed]
        prompts.sort(key=lambda prompt: prompt[0].number)
        if not prompts or len(prompts) != prompts[0][0].count:
            raise ApiError(404, "There is no stream with this id that could be resumed.", "stream_not_found")
        stream = prompts[0][0].stream
        generation = service.take_over(prompts, after, call.info)
        receipts = service.receipts(generation, stream.model) if stream.receipt else None
        with service.live(generation, stream.response_id, call.info):
            chunks = chunks_of(generation, replace(stream, event_ids=True), receipts)
            headers = {MODE_HEADER: generation.engine.mode}
            response = SseResponse(generation, chunks, chunks.last, headers, service.config.server.client_stall_timeout)
            await response(call.scope, call.receive, call.send)
    return None


def _last_event_id(call: Call) -> str | None:
    given = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True).get("after", [])
    given += [value.decode("latin-1") for name, value in call.scope["headers"] if name == b"last-event-id"]
    if len(set(given)) > 1:
        raise InvalidRequestError("Several ids of the last event were given.", param="after")
    return given[0] if given else None
