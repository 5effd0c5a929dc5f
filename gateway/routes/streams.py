"""`GET /v1/streams/{id}`: the rest of a stream whose gateway died. One whose gateway lives cannot be fetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from urllib.parse import parse_qs

from starlette.types import ASGIApp

from gateway.answers import chunks_of
from gateway.body import ClientGone
from gateway.context import RequestInfo
from gateway.errors import ApiError
from gateway.explained import ExplainedGeneration
from gateway.generation import Generation, PromptState
from gateway.routes.endpoint import MODE_HEADER, Call
from gateway.service import DEADLINE_GRACE, GatewayService, deadline_of
from gateway.sse import SseResponse
from gateway.stream_record import PromptRecord, StreamRecord, parse_event_id
from novainfer.client.journal import taken_over
from novainfer.errors import DeadlineError, InvalidRequestError
from novainfer.protocol.messages import Claimed

CLAIM_SECONDS = 2.0  # for the scheduler to miss a dead gateway


async def resume(call: Call) -> ASGIApp | None:
    """Go on after the event with the id `after` (or the header Last-Event-ID); from the beginning without one."""
    if call.scope["method"] != "GET":  # Starlette adds HEAD, which would take the stream over, and read nothing of it
        raise ApiError(405, "Method Not Allowed.", "method_not_allowed", headers={"allow": "GET"})
    service = call.service
    call.limit_time()
    after = _last_event_id(call)
    with service.admit(call.info):
        with call.client_leaves() as gone:
            claimed = await _claim(service, call.path_params["stream_id"], call.info.tenant, gone)
            with _released_on_error(service, claimed):
                if gone.done():
                    raise ClientGone
                generation, stream = _take_over(service, claimed, after, call.info)
        receipts = service.receipts(generation, stream.model) if stream.receipt else None
        with service.live(generation, stream.response_id, call.info):
            chunks = chunks_of(generation, replace(stream, event_ids=True), receipts)
            headers = {MODE_HEADER: generation.engine.mode}
            response = SseResponse(generation, chunks, chunks.last, headers, service.config.server.client_stall_timeout)
            try:
                await call.answer(response)
            except InvalidRequestError as error:
                if error.code == "request_id_in_use":  # our claim was lost with our link, and another one got it
                    raise _in_use() from None
                raise
    return None


async def _claim(service: GatewayService, key: str, tenant: str, gone: asyncio.Task[None]) -> Claimed:
    """The tenant's requests with this id whose gateway is gone; they must be submitted, or released.

    The scheduler may need a moment to see that a gateway is gone, and to hear us, who may be its successor.
    Raises `OverloadedError` while the engine is not ready, `ApiError` (409) while the stream is being read.
    """
    began = time.monotonic()
    grace = service.config.server.orphan_grace
    while not (service.client.ready or gone.done()) and time.monotonic() < began + grace:
        await asyncio.sleep(CLAIM_SECONDS / 10)
    until = time.monotonic() + CLAIM_SECONDS
    while (claimed := await service.client.claim(key, tenant)).is_owned and time.monotonic() < until:
        await asyncio.sleep(CLAIM_SECONDS / 10)
    if claimed.is_owned:
        raise _in_use()
    return claimed


def _in_use() -> ApiError:
    return ApiError(409, "The stream with this id is being read.", "stream_in_use")


@contextmanager
def _released_on_error(service: GatewayService, claimed: Claimed) -> Iterator[None]:
    """What we do not take over after all any gateway may take."""
    try:
        yield
    except BaseException:
        service.client.release(claimed.requests)
        raise


def _take_over(
    service: GatewayService, claimed: Claimed, after: str | None, info: RequestInfo
) -> tuple[Generation, StreamRecord]:
    """Go on with the one stream that was claimed. Raises what stands in the way; then nothing was submitted."""
    engine = service.engine_info()
    parts = [
        (PromptRecord.from_json(request.answer), request, num_tokens)
        for request, num_tokens in zip(claimed.requests, claimed.num_tokens, strict=True)
    ]
    parts.sort(key=lambda part: part[0].number)
    if len({record.stream.response_id for record, *_ in parts}) > 1:
        words = "Several streams have this id; each has an id of its own, which is the 'id' of its chunks."
        raise ApiError(409, words, "stream_ambiguous")
    if not parts or len(parts) != parts[0][0].count:
        raise ApiError(404, "There is no stream with this id that could be resumed.", "stream_not_found")
    most = [request.params.max_tokens if num < 0 else num for _, request, nums in parts for num in nums]
    places = iter(parse_event_id(after, most))
    _limit_time(info, min(request.deadline for _, request, _ in parts))
    states, requests = [], []
    for record, add, _ in parts:
        told = list(islice(places, add.params.n))
        state = PromptState(add.request_id, add.prompt_token_ids, add.params, add.eos_token_ids, record.echo, told)
        state.is_alone, state.telling = record.stream.prompt_alone, record.stream.telling
        states.append(state)
        add = replace(add, deadline=deadline_of(info))
        requests.append(taken_over(add, [max(place - 1, 0) for place in told]))
    stream = parts[0][0].stream
    generation = (ExplainedGeneration if stream.explain else Generation)(
        states,
        service.client.submit(*requests),
        service.tokenizer,
        service.metrics,
        engine=engine,
        info=info,
        after_prompt=stream.after_prompt,
    )
    return generation, stream


def _limit_time(info: RequestInfo, deadline: float) -> None:
    """What is left of the time limit of the request itself holds as well. Raises `DeadlineError` if it has passed."""
    if deadline > 0:
        info.time_limit = min(info.time_limit, round(time.perf_counter() - info.started + deadline - DEADLINE_GRACE, 3))
    if info.time_left <= 0:
        raise DeadlineError("The request's time limit passed before its stream was fetched.")


def _last_event_id(call: Call) -> str | None:
    given = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True).get("after", [])
    given += [value.decode("latin-1") for name, value in call.scope["headers"] if name == b"last-event-id"]
    if len(set(given)) > 1:
        raise InvalidRequestError("Several ids of the last event were given.", param="after")
    return given[0] if given else None
