"""What every route shares: the model's text side, the engine client, the limits, and how a generation is started."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import replace

from gateway.admission import Admission, Live, LiveGenerations, Refusals
from gateway.body import ByteBudget
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView, EngineView
from gateway.errors import ApiError
from gateway.explained import ExplainedGeneration
from gateway.generation import Generation, PromptState
from gateway.limits import Cost, Limits, Room
from gateway.logprobs import LogprobRoom
from gateway.metrics import GatewayMetrics
from gateway.params import check_repeated, chosen_seed, default_length, draw_seed, estimate_cost, resolve_params
from gateway.quotas import quotas_of
from gateway.receipts import ModelDigest, Receipts
from gateway.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from gateway.stream_record import StreamRecord, answers_of
from gateway.text_process import TextProcesses
from gateway.tracing import Tracing
from novainfer.checkpoint import architecture, resolve_checkpoint, vocab_size
from novainfer.client.engine_client import EngineClient
from novainfer.client.engine_link import EngineLink
from novainfer.config import ServeConfig
from novainfer.embedding import read_pooling
from novainfer.errors import InvalidRequestError, OverloadedError
from novainfer.protocol.messages import AddRequest, EngineInfo, EngineStats
from novainfer.sampling.params import SamplingParams
from novainfer.text.model_parsers import parsers_of
from novainfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BODIES_AT_ONCE = 16  # of the largest size, while they are read
MAX_SEQUENCES = 2048  # prompts x n of one request
QUEUED_CACHES = 8  # tokens that may wait, where no number is given, in terms of what the KV cache holds
DEADLINE_GRACE = 1.0  # seconds
FIGURES_PATIENCE = 2.0  # seconds; scrapers have few more
STATS_SECONDS = 5.0  # older figures of the engine prove nothing


class GatewayService:
    """One per gateway process (number `index`), built before the first request. In the end call `close`.

    is_successor: it takes the place of one that died, so the engine has been ready before.
    """

    def __init__(
        self, config: ServeConfig, client: EngineClient, *, index: int = 0, is_successor: bool = False
    ) -> None:
        """Read the tokenizer and templates that the configuration names. Raises `ConfigError`."""
        server = config.server
        self.config = config
        self.client = client
        self.model_names = config.model.served_model_name or (config.model.model,)
        self.limits = Limits(
            max_live=server.max_live_requests,
            max_per_tenant=server.max_requests_per_key,
            quotas=quotas_of(config.keys, server.num_gateways),
        )
        self.metrics = GatewayMetrics(
            self.model_names[0],
            lambda: _view(client),
            tenants={key.tenant for key in config.keys},
            foreign_names=config.server.metrics_compat,
        )
        endpoint = config.server.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing(endpoint)
        self._refusals = Refusals(self.metrics, self.limits)
        self.metrics.live.set_function(lambda: self.limits.num_live)
        self.metrics.journal.set_function(lambda: self.client.num_live)
        self.metrics.watch_tenants(lambda: self.limits.live_by_tenant)
        self.max_body_bytes = server.max_body_mib * 1024 * 1024
        is_shared = len({key.tenant for key in config.keys}) > 1
        self.body_budget = ByteBudget(BODIES_AT_ONCE * self.max_body_bytes, is_shared=is_shared)
        self.logprob_room = LogprobRoom(is_shared=is_shared)
        self._is_successor = is_successor
        self._digest = ModelDigest(config.model)
        self._live = LiveGenerations(self._tell_end)
        self._last_room: tuple[EngineInfo | None, EngineStats | None, int, Room | None] = (None, None, 0, None)

        model = config.model
        folder = resolve_checkpoint(model.tokenizer or model.model, revision=model.revision)
        self.text = TextProcesses(
            folder, model.chat_template, index=index, count=self.metrics.text_process_lost, is_shared=is_shared
        )
        try:
            self.tokenizer = Tokenizer.load(folder)
            checkpoint = resolve_checkpoint(model.model, revision=model.revision)
            self.pooling = read_pooling(checkpoint)
            known_ids, self.architecture = vocab_size(checkpoint), architecture(checkpoint)
            self.tokenizer.check_fits(known_ids)
            self.parsers = parsers_of(
                self.tokenizer, model.tool_call_parser, model.reasoning_parser, model.chat_template
            )
            self._num_token_ids = max(self.tokenizer.vocab_size, known_ids or 0)
            # The checkpoint's date: the same in every gateway and after each restart.
            self.created = int(os.stat(folder / "tokenizer.json").st_mtime)
            self.text.wait_ready()
        except BaseException:
            self.close()
            raise
        self.started = time.monotonic()
        self._is_new_until = time.monotonic() + FIGURES_PATIENCE

    def close(self) -> None:
        """End the text processes, and send the last spans. Idempotent."""
        self.text.close()
        if self._tracing is not None:
            self._tracing.close()

    # -- state --------------------------------------------------------------------------------------------------

    def unready_reason(self) -> str | None:
        """Why no request can be served now; None if it can."""
        info = self.client.info
        if self.limits.draining:
            return "draining"
        if info is None:
            return "no engine"
        if not info.ready:
            return "loading" if self.client.limits is None else "recovering"
        return None if self.client.ready else "engine silent"

    def unhealthy_reason(self) -> str | None:
        """As above, and also when no engine that is ready makes progress with the work it has."""
        reason = self.unready_reason()
        if reason is not None:
            return reason
        reasons = [self._why_unhealthy(link) for link in self.client.links.values() if link.is_ready]
        return None if None in reasons else next(iter(reasons), "engine silent")

    def _why_unhealthy(self, link: EngineLink) -> str | None:
        stats = link.session.stats
        if stats is None:
            return "no figures from the engine"
        if link.stats_age > STATS_SECONDS:
            return "engine silent"
        if stats.seconds_since_progress > self.config.server.stall_timeout / 2:
            return "no progress"
        return None

    def engine_info(self) -> EngineInfo:
        """The engine's limits; raises `OverloadedError` (503) while draining, and until they are known.

        While the engine recovers, requests are taken: they wait with those that were there.
        """
        limits = self.client.open_limits
        if limits is None or self.limits.draining:
            raise OverloadedError(f"The server cannot take requests now: {self.unready_reason()}.", retry_after=2.0)
        return limits

    async def wait_for_engine(self) -> None:
        """Return when the engine's limits are known, or there is no point in waiting: then `engine_info` refuses.

        A gateway that is as new as its engine refuses at once: to load may take minutes.
        """
        if self._is_successor and self.client.limits is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.client.wait_ready(), self.config.server.orphan_grace)

    async def wait_for_figures(self) -> None:
        """Return when the engines that are about to tell their figures have, or after seconds: then no series breaks.

        One that has become ready tells them next; one that was there before this gateway does when it has greeted it.
        """
        is_new = self._is_successor and time.monotonic() < self._is_new_until
        waits = [
            link.wait_figures(is_new=is_new) for link in self.client.links.values() if link.owes_figures(is_new=is_new)
        ]
        if waits:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*waits), FIGURES_PATIENCE)

    @property
    def max_model_len(self) -> int:
        """Tokens that fit the model's context; 0 while that is not known."""
        engine = self.client.limits
        return 0 if engine is None else engine.max_model_len

    @property
    def num_token_ids(self) -> int:
        """Ids below it are the tokenizer's, or such as the model may generate: vocabularies are padded."""
        engine = self.client.limits
        return max(self._num_token_ids, 0 if engine is None else engine.vocab_size)

    def check_model(self, name: str | None) -> str:
        """The model's name as the client used it; 404 for one that is not served. Without a name: the first."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            words = f"The model does not exist on this server, which has: {', '.join(self.model_names)}."
            raise ApiError(404, words, "model_not_found", "model")
        return name

    # -- generations --------------------------------------------------------------------------------------------

    def start(
        self,
        request: ChatRequest | CompletionRequest,
        record: StreamRecord,
        prompts: list[tuple[list[int], str]],
        info: RequestInfo,
    ) -> Generation:
        """Check, resolve and submit: one engine request per prompt, given as (token ids, text to echo).

        Raises `InvalidRequestError` or `OverloadedError`; then nothing was submitted.
        """
        engine = self.engine_info()
        if len(prompts) * request.n > MAX_SEQUENCES:
            raise InvalidRequestError(f"More than {MAX_SEQUENCES} answers in one request are too many.", param="n")
        for token_ids, _ in prompts:
            _check_prompt(token_ids, engine.vocab_size)
        lengths = [len(token_ids) for token_ids, _ in prompts]
        params = resolve_params(request, max(lengths), self.tokenizer, engine)
        check_repeated(request, params, prompts)
        eos = [i for i in self.tokenizer.eos_token_ids if i < engine.vocab_size]  # others are never sampled
        states = [
            PromptState(
                f"{record.response_id}-{number}",
                token_ids,
                _own_params(params, request, number, len(token_ids), engine.max_model_len),
                eos,
                echo,
                is_alone=record.prompt_alone,
                telling=record.telling,
            )
            for number, (token_ids, echo) in enumerate(prompts)
        ]
        info.permit.correct(sum(lengths))
        answers = [""] * len(states)
        if request.stream and not record.is_bound:
            answers = answers_of(record, [echo for _, echo in prompts])
        adds = [
            self._add_request(state, answer, request, record.response_id, info)
            for state, answer in zip(states, answers, strict=True)
        ]
        stream = self.client.submit(*adds)
        return (ExplainedGeneration if record.explain else Generation)(
            states,
            stream,
            self.tokenizer,
            self.metrics,
            engine=engine,
            info=info,
            after_prompt=record.after_prompt,
        )

    def receipts(self, generation: Generation, model: str) -> Receipts:
        """Those of a generation, for a client that named the model so."""
        return Receipts(generation, model, self.client, self._digest)

    def _add_request(
        self,
        state: PromptState,
        answer: str,
        request: ChatRequest | CompletionRequest,
        response_id: str,
        info: RequestInfo,
    ) -> AddRequest:
        return AddRequest(
            request_id=state.request_id,
            prompt_token_ids=state.token_ids,
            params=state.params,
            eos_token_ids=state.eos_token_ids,
            tenant=info.tenant,
            cache_salt=request.cache_salt,
            use_prefix_cache=request.prefix_cache,
            priority=request.priority,
            deadline=deadline_of(info),
            aliases=[response_id, info.request_id],
            answer=answer,
            explain=request.explain,
        )

    def admit(self, info: RequestInfo, cost: Cost | None = None, room: Room | None = None) -> Admission:
        """A context that holds room while a request is answered; counts a refusal, also one that comes later."""
        return Admission(self.limits, self._refusals, info, cost, room)

    def admit_generation(
        self, info: RequestInfo, request: ChatRequest | CompletionRequest | EmbeddingRequest, num_prompts: int
    ) -> Admission:
        """The same for a generation, before the work of rendering and tokenising it."""
        try:
            engine = self.engine_info()
        except OverloadedError as error:
            self._refusals.count(error)
            raise
        cost = estimate_cost(request, num_prompts, info.body_bytes, engine.max_model_len)
        return self.admit(info, cost, self._room(engine))

    def refuse_if_full(self, info: RequestInfo) -> None:
        """`check_room`; a refusal is counted."""
        try:
            self.check_room(info)
        except Exception as error:
            self._refusals.count(error)
            raise

    def check_room(self, info: RequestInfo) -> None:
        """Raise `OverloadedError` if a generation with a body of this size has no room, whatever the body says."""
        engine = self.engine_info()
        least = Cost(prompts=1, sequences=1, prompt_tokens=min(info.body_bytes // 2, engine.max_model_len))
        try:
            self.limits.check(info.tenant, least, self._room(engine))
        except OverloadedError:
            info.headers |= self.limits.headers(info.tenant)
            raise

    def _room(self, engine: EngineInfo) -> Room:
        """This gateway's part of the places and tokens that may wait: the same one until the engine says something."""
        server, stats, num_engines = self.config.server, self.client.stats, self.client.num_accepting
        last_engine, last_stats, last_num, room = self._last_room
        if room is not None and last_engine is engine and last_stats is stats and last_num == num_engines:
            return room
        tokens = server.max_queued_tokens or QUEUED_CACHES * engine.num_blocks * engine.block_size * num_engines
        room = Room(
            sequences=(self.config.scheduler.max_waiting + engine.max_num_seqs) * num_engines // server.num_gateways,
            queued_tokens=tokens // server.num_gateways,
            retry_after=stats.queue_seconds if stats is not None else 1.0,
        )
        self._last_room = engine, stats, num_engines, room
        return room

    def live(self, generation: Generation, response_id: str, info: RequestInfo) -> Live:
        """A context: while it runs, a generation can be cancelled by either of its ids; afterwards it is closed."""
        return Live(self._live, generation, response_id, info)

    def _tell_end(self, generation: Generation, info: RequestInfo) -> None:
        if self.config.server.log_requests:
            _log_end(generation, info)
        if self._tracing is not None:
            self._tracing.record(generation, info, self.model_names[0])

    async def cancel(self, key: str, tenant: str) -> bool:
        """Cancel the tenant's generations with this id, here or else at the other gateways; False if there is none."""
        found = self._live.find(key, tenant)
        for generation in found:
            generation.cancel()
        return bool(found) or await self.client.cancel_alias(key, tenant)


def _log_end(generation: Generation, info: RequestInfo) -> None:
    known = {"tenant": info.tenant, "outcome": generation.outcome, **generation.figures()}
    words = " ".join(f"{name}={value}" for name, value in known.items())
    log.info("request %s: %s", info.request_id, words, extra={"request_id": info.request_id, "fields": known})


def _view(client: EngineClient) -> ClientView:
    sessions = {number: link.session for number, link in client.links.items()}
    engines = [
        EngineView(number, one.info, one.stats, one.num_protocol_errors, one.num_tokens_received)
        for number, one in sessions.items()
    ]
    return ClientView(engines, client.totals.moved, client.totals.routed)


def deadline_of(info: RequestInfo) -> float:
    """`AddRequest.deadline`: the gateway ends a request at its limit; the scheduler only if the gateway does not."""
    return 0.0 if info.time_limit == math.inf else max(info.time_left, 0.0) + DEADLINE_GRACE


def new_response_id(prefix: str) -> str:
    """An id that nobody can guess and no other gateway gives."""
    return f"{prefix}{os.urandom(12).hex()}"


def unix_now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _own_params(
    params: SamplingParams, request: ChatRequest | CompletionRequest, number: int, length: int, context: int
) -> SamplingParams:
    """Of one of several prompts: equal ones differ unless the client chose the seed, and each has a room of its own."""
    if number and chosen_seed(request) is None:
        params = replace(params, seed=draw_seed())
    if isinstance(request, CompletionRequest) and request.max_tokens is None:
        params = replace(params, max_tokens=default_length(length, context))
    return params


def _check_prompt(token_ids: list[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequestError(f"The prompt holds a token id outside 0..{vocab_size - 1}.", param="prompt")
