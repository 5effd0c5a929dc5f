"""What every route shares: the model's text side, the engine client, the limits, and how a generation is started."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from gateway.body import ByteBudget
from gateway.context import RequestInfo
from gateway.errors import ApiError, to_api_error
from gateway.generation import Generation, PromptState
from gateway.limits import Cost, Limits, Room
from gateway.metrics import GatewayMetrics
from gateway.params import draw_seed, estimate_cost, resolve_params
from gateway.quotas import quotas_of
from gateway.receipts import ModelDigest, Receipts
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.stream_record import PromptRecord, StreamRecord, parse_event_id
from novainfer.checkpoint import resolve_checkpoint, vocab_size
from novainfer.client.engine_client import EngineClient
from novainfer.config import ServeConfig
from novainfer.errors import ConfigError, DeadlineError, InvalidRequestError, OverloadedError
from novainfer.protocol.messages import AddRequest, EngineInfo
from novainfer.sampling.params import SamplingParams
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.tokenizer import Tokenizer

TEXT_THREADS = 2  # rendering and tokenising; the event loop only waits for them
CLAIM_SECONDS = 2.0  # for the scheduler to miss a dead gateway
LONG_BODY = 256 * 1024  # bytes; the text of larger ones has a thread of its own: short ones need not wait for it
BODIES_AT_ONCE = 16  # of the largest size, while they are read
MAX_SEQUENCES = 2048  # prompts x n of one request
QUEUED_CACHES = 8  # tokens that may wait, where no number is given, in terms of what the KV cache holds
_DEADLINE_GRACE = 1.0  # seconds
STATS_SECONDS = 5.0  # older figures of the engine prove nothing

T = TypeVar("T")


class GatewayService:
    """One per gateway process, built before the first request."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer, template: ChatTemplate, client: EngineClient) -> None:
        server = config.server
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.client = client
        self.model_names = config.model.served_model_name or (config.model.model,)
        self.limits = Limits(
            max_live=server.max_live_requests,
            max_per_tenant=server.max_requests_per_key,
            quotas=quotas_of(config.keys, server.num_gateways),
        )
        self.metrics = GatewayMetrics(
            self.model_names[0], lambda: (client.info, client.stats, client.num_protocol_errors)
        )
        self.metrics.live.set_function(lambda: self.limits.num_live)
        self.metrics.journal.set_function(lambda: self.client.num_live)
        self.max_body_bytes = server.max_body_mib * 1024 * 1024
        self.body_budget = ByteBudget(BODIES_AT_ONCE * self.max_body_bytes)
        self.created = 0
        self._digest = ModelDigest(config.model)
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._live: defaultdict[str, list[tuple[str, Generation]]] = defaultdict(list)

    @classmethod
    def load(cls, config: ServeConfig, client: EngineClient) -> GatewayService:
        """Read the tokenizer and templates that the configuration names. Raises `ConfigError`."""
        model = config.model
        folder = resolve_checkpoint(model.tokenizer or model.model, revision=model.revision)
        tokenizer = Tokenizer.load(folder)
        tokenizer.check_fits(vocab_size(resolve_checkpoint(model.model, revision=model.revision)))
        override = None
        if model.chat_template is not None:
            try:
                override = Path(model.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat-template {model.chat_template} cannot be read: {error}") from None
        service = cls(config, tokenizer, ChatTemplate.of(tokenizer, override), client)
        # The checkpoint's date: the same in every gateway and after each restart.
        service.created = int(os.stat(folder / "tokenizer.json").st_mtime)
        return service

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

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
        """As above, and also when the engine has work but makes no progress."""
        reason = self.unready_reason()
        stats = self.client.stats
        if reason is not None or stats is None:
            return reason or "no figures from the engine"
        if self.client.stats_age > STATS_SECONDS:
            return "engine silent"
        if stats.seconds_since_progress > self.config.server.stall_timeout / 2:
            return "no progress"
        return None

    def engine_info(self) -> EngineInfo:
        """The engine's limits; raises `OverloadedError` (503) while draining, and until they are known.

        While the engine recovers, requests are taken: they wait with those that were there.
        """
        limits = self.client.limits
        if limits is None or self.limits.draining or not self.client.accepts:
            raise OverloadedError(f"The server cannot take requests now: {self.unready_reason()}.", retry_after=2.0)
        return limits

    def check_model(self, name: str | None) -> str:
        """The model's name as the client used it; 404 for one that is not served. Without a name: the first."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(404, "The model does not exist on this server.", "model_not_found", "model")
        return name

    async def in_thread(self, info: RequestInfo, work: Callable[[], T]) -> T:
        """Run a request's text work off the event loop. Raises `DeadlineError` if its time is over before."""
        pool = self._long_pool if info.body_bytes > LONG_BODY else self._pool
        try:
            async with asyncio.timeout(None if info.time_limit == math.inf else max(info.time_left, 0.0)):
                return await asyncio.get_running_loop().run_in_executor(pool, work)
        except TimeoutError:
            raise DeadlineError(
                f"The request's time limit of {info.time_limit:g} s passed while its prompt was prepared."
            ) from None

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises `InvalidRequestError` without tokenising it if it is far too long."""
        engine = self.client.limits
        if engine is not None and not self.tokenizer.fits(text, engine.max_model_len):
            raise InvalidRequestError(
                f"{len(text)} characters are far beyond this model's context of {engine.max_model_len} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

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
        # Only a chat's max_tokens depends on the prompt's length, and a chat is one prompt.
        params = resolve_params(request, max(len(token_ids) for token_ids, _ in prompts), self.tokenizer, engine)
        eos = [i for i in self.tokenizer.eos_token_ids if i < engine.vocab_size]  # others are never sampled
        states = [
            PromptState(f"{record.response_id}-{number}", token_ids, _own_seed(params, request.seed, number), eos, echo)
            for number, (token_ids, echo) in enumerate(prompts)
        ]
        info.permit.correct(sum(len(token_ids) for token_ids, _ in prompts))
        adds = [self._add_request(state, request, record.response_id, info) for state in states]
        if request.stream:
            answers = [PromptRecord(record, i, len(states), state.echo).to_json() for i, state in enumerate(states)]
            adds = [replace(add, answer=answer) for add, answer in zip(adds, answers, strict=True)]
        stream = self.client.submit(*adds)
        return Generation(
            states,
            stream,
            self.tokenizer,
            self.metrics,
            engine=engine,
            info=info,
            after_prompt=isinstance(request, CompletionRequest),
        )

    async def claim(self, key: str, tenant: str) -> list[AddRequest]:
        """The tenant's requests with this id whose gateway is gone, or which ended a moment ago; [] if there are none.

        The scheduler may need a moment to see that a gateway is gone, and to hear us, who may be its successor.
        Raises `OverloadedError` while the engine is not ready, `ApiError` (409) while the stream is being read.
        """
        began = time.monotonic()
        while not self.client.ready and time.monotonic() < began + self.config.server.orphan_grace:
            await asyncio.sleep(CLAIM_SECONDS / 10)
        until = time.monotonic() + CLAIM_SECONDS
        while (claimed := await self.client.claim(key, tenant)).is_owned and time.monotonic() < until:
            await asyncio.sleep(CLAIM_SECONDS / 10)
        if claimed.is_owned:
            raise ApiError(409, "The stream with this id is being read.", "stream_in_use")
        return claimed.requests

    def take_over(
        self, prompts: list[tuple[PromptRecord, AddRequest]], after: str | None, info: RequestInfo
    ) -> Generation:
        """Go on with a claimed stream, its prompts in order. Raises `InvalidRequestError` for a wrong `after`."""
        engine = self.engine_info()
        requests = [request for _, request in prompts]
        places = iter(parse_event_id(after, sum(request.params.n for request in requests)))
        states = [
            PromptState(
                add.request_id,
                add.prompt_token_ids,
                add.params,
                add.eos_token_ids,
                record.echo,
                told=list(islice(places, add.params.n)),
            )
            for record, add in prompts
        ]
        return Generation(
            states,
            self.client.submit(*requests),
            self.tokenizer,
            self.metrics,
            engine=engine,
            info=info,
            after_prompt=not prompts[0][0].stream.is_chat,
        )

    def receipts(self, generation: Generation, model: str) -> Receipts:
        """Those of a generation, for a client that named the model so."""
        return Receipts(generation, model, self.client, self._digest)

    def _add_request(
        self, state: PromptState, request: ChatRequest | CompletionRequest, response_id: str, info: RequestInfo
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
            # The gateway ends it; the scheduler only if the gateway does not.
            deadline=0.0 if info.time_limit == math.inf else max(info.time_left, 0.0) + _DEADLINE_GRACE,
            aliases=[response_id, info.request_id],
        )

    @contextmanager
    def admit(self, info: RequestInfo, cost: Cost | None = None, room: Room | None = None) -> Iterator[None]:
        """Hold room while a request is answered; counts a refusal, also one that comes later."""
        with self._refusals_counted():
            try:
                permit = self.limits.reserve(info.tenant, cost, room)
            finally:
                info.headers |= self.limits.headers(info.tenant)
            with permit:
                info.permit = permit
                yield

    @contextmanager
    def admit_generation(
        self, info: RequestInfo, request: ChatRequest | CompletionRequest, num_prompts: int
    ) -> Iterator[None]:
        """The same for a generation, before the work of rendering and tokenising it."""
        with self._refusals_counted():
            engine = self.engine_info()
        cost = estimate_cost(request, num_prompts, info.body_bytes, engine.max_model_len)
        with self.admit(info, cost, self._room(engine)):
            yield

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except (InvalidRequestError, OverloadedError) as error:
            self.metrics.rejected(to_api_error(error).status)
            raise

    def _room(self, engine: EngineInfo) -> Room:
        """This gateway's part of the places and tokens that may wait."""
        server, stats = self.config.server, self.client.stats
        tokens = server.max_queued_tokens or QUEUED_CACHES * engine.num_blocks * engine.block_size
        return Room(
            sequences=(self.config.scheduler.max_waiting + engine.max_num_seqs) // server.num_gateways,
            queued_tokens=tokens // server.num_gateways,
            retry_after=stats.queue_seconds if stats is not None else 1.0,
        )

    @contextmanager
    def live(self, generation: Generation, response_id: str, info: RequestInfo) -> Iterator[Generation]:
        """While it runs, a generation can be cancelled by either of its ids; afterwards it is closed."""
        entry = (info.tenant, generation)
        ids = {response_id, info.request_id}
        timer = None
        if info.time_limit != math.inf:
            timer = asyncio.get_running_loop().call_later(info.time_left, generation.expire)
        for key in ids:
            self._live[key].append(entry)
        try:
            yield generation
        finally:
            if timer is not None:
                timer.cancel()
            generation.close()
            info.permit.used_tokens = generation.num_tokens
            for key in ids:
                self._live[key].remove(entry)
                if not self._live[key]:
                    del self._live[key]

    async def cancel(self, key: str, tenant: str) -> bool:
        """Cancel the tenant's generations with this id, here or else at the other gateways; False if there is none."""
        found = [generation for owner, generation in self._live.get(key, []) if owner == tenant]
        for generation in found:
            generation.cancel()
        return bool(found) or await self.client.cancel_alias(key, tenant)


def new_response_id(prefix: str) -> str:
    """An id that nobody can guess and no other gateway gives."""
    return f"{prefix}-{secrets.token_hex(12)}"


def unix_now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _own_seed(params: SamplingParams, asked: int | None, number: int) -> SamplingParams:
    """Equal prompts of one request differ, unless the client chose the seed."""
    return params if asked is not None or number == 0 else replace(params, seed=draw_seed())


def _check_prompt(token_ids: list[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequestError(f"The prompt holds a token id outside 0..{vocab_size - 1}.", param="prompt")
