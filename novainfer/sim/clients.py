"""The clients of a simulated server: each knows what it must get, and judges every word that comes."""

from __future__ import annotations

from novainfer.client.journal import taken_over
from novainfer.client.session import Answer
from novainfer.client.stream import RequestStream, StreamItem
from novainfer.errors import EngineError, InvalidRequestError, NovaInferError, OverloadedError
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    Claimed,
    PromptLogprobs,
    TokenOutput,
)
from novainfer.sim.cluster import Cluster
from novainfer.sim.gateways import SimGateway
from novainfer.sim.oracle import hash_tokens, oracle_logprobs, oracle_stream, oracle_vector
from novainfer.sim.rivals import Rival
from novainfer.sim.scenario import VOCAB_SIZE, RequestSpec
from novainfer.sim.verdicts import Verdicts
from novainfer.sim.world import Violation, World

_RETRY_SECONDS = 0.2
_ROUNDING = 1e-6  # seconds, which sums of times are off by


class SimClient:
    """One request from beginning to end. Implements `Sink`, in front of the stream that a gateway would read."""

    def __init__(self, world: World, cluster: Cluster, spec: RequestSpec, verdicts: Verdicts) -> None:
        self.world = world
        self.spec = spec
        self.outcome: str | None = None
        self.sent_at: float | None = None
        self._cluster = cluster
        self._verdicts = verdicts
        message = spec.message
        self._name = message.request_id
        eos = () if message.params.ignore_eos else tuple(message.eos_token_ids)
        self._stops = frozenset((*message.params.stop_token_ids, *eos))
        self._wanted = [
            oracle_stream(message.prompt_token_ids, message.params, choice, self._stops, VOCAB_SIZE, spec.salt)
            for choice in range(message.params.n)
        ]
        self._vector = b""
        if message.embed:
            self._vector, self._wanted = oracle_vector(hash_tokens(message.prompt_token_ids, spec.salt)), [[]]
        self._gateway: SimGateway | None = None
        self._stream: RequestStream | None = None
        self._next_gateway = spec.gateway
        self._is_cancelling = False
        self._alias_cancelled = False
        self._claims_until = 0.0
        self._rival = Rival(world, spec)
        # The engine client waits half of the default grace for an answer.
        self._patience = cluster.scenario.config.server.orphan_grace / 2
        self._claim_asked_at: float | None = None
        self._has_read_soon = False
        self._num_brought = [0] * len(self._wanted)  # tokens that another gateway told
        self._begin_stream()
        world.at(spec.arrival, self._send)

    def _begin_stream(self) -> None:
        self._got: list[list[int]] = [[] for _ in self._wanted]
        self._ends: list[str | None] = [None] * len(self._wanted)
        self._num_prompt_logprobs = 0
        self._has_ended = False

    # -- sending ------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Go to a gateway; to the next one if it does not take us."""
        if self.outcome is not None:
            return
        gateway = self._pick_gateway()
        if gateway is None:
            self.world.after(_RETRY_SECONDS, self._send)
            return
        self._gateway = gateway
        gateway.on_death[self._name] = self._lose_gateway
        gateway.call(lambda: self._submit(gateway))

    def _pick_gateway(self) -> SimGateway | None:
        gateways = self._cluster.gateways
        gateway = gateways[self._next_gateway % len(gateways)]
        self._next_gateway += 1
        return gateway if gateway.is_alive else None

    def _submit(self, gateway: SimGateway) -> None:
        try:
            self._enter(gateway, self.spec.message)
        except OverloadedError:
            del gateway.on_death[self._name]
            self._gateway = None
            self.world.after(_RETRY_SECONDS, self._send)
            return
        self.sent_at = self.world.now
        for delay, action in (
            (self.spec.cancel_after, self._go_away),
            (self.spec.cancel_alias_after, self._cancel_alias),
        ):
            if delay is not None:
                self.world.after(delay, action)

    def _enter(self, gateway: SimGateway, message: AddRequest) -> None:
        stream = RequestStream([self._name], gateway.session.cancel, gateway.session.told)
        self._stream = stream
        try:
            gateway.session.submit([message], self, gateway.clock)
        except OverloadedError:
            self._stream = None
            raise
        self.world.note(f"client {self._name} is accepted by {gateway.name}")

    # -- what comes (Sink) --------------------------------------------------------------------------------------

    def push(self, item: StreamItem) -> None:
        """See `Sink`."""
        if self._has_ended or self._stream is None:
            raise Violation(f"{self._name}: an output came after the last word")
        if isinstance(item, TokenOutput):
            self._check_notes(item)
        self._stream.push(item)
        self._read_soon()

    def _check_notes(self, item: TokenOutput) -> None:
        """They come with each end of a request that asks, and never else."""
        notes = item.notes
        if (notes is not None) != (item.finish_reason is not None and self.spec.message.explain):
            raise Violation(f"{self._name}/{item.choice}: an output has the notes {notes}")
        if notes is None:
            return
        waited = self.world.now - self.spec.arrival
        counts = notes.prefill_steps, notes.preemptions, notes.recomputed_tokens, notes.restarts
        if min(counts) < 0 or (notes.queue_seconds != -1 and not 0 <= notes.queue_seconds <= waited + _ROUNDING):
            raise Violation(f"{self._name}/{item.choice}: {waited} seconds after it was sent its notes are {notes}")

    def push_token(self, request_id: str, choice: int, index: int, token_id: int) -> None:
        """See `Sink`."""
        if self._has_ended or self._stream is None:
            raise Violation(f"{self._name}: a token came after the last word")
        self._stream.push_token(request_id, choice, index, token_id)
        self._read_soon()

    def end(self, request_id: str, error: Exception | None = None) -> None:
        """See `Sink`."""
        if self._has_ended or self._stream is None:
            raise Violation(f"{self._name}: there was a second last word")
        self._has_ended = True
        self._stream.end(request_id, error)
        self._read_soon()

    def _read_soon(self) -> None:
        if self.outcome is None and not self._has_read_soon:
            self._has_read_soon = True
            gateway = self._gateway
            if gateway is not None:
                self.world.after(self.spec.read_every, lambda: gateway.call(self._read))

    def _read(self) -> None:
        self._has_read_soon = False
        stream = self._stream
        if stream is None or self.outcome is not None:
            return
        try:
            items = stream.take_ready()
        except NovaInferError as error:
            self._fail(error)
            stream.close()
            return
        for item in items:
            if isinstance(item, PromptLogprobs):
                self._check_prompt(item)
            else:
                self._check(item)
        if stream.finished:
            self._check_end()
            self._verdicts.done(self.spec, self.world.now - (self.sent_at or 0.0))
            self._finish("done")
            stream.close()

    # -- judging ------------------------------------------------------------------------------------------------

    def _check(self, output: TokenOutput) -> None:
        c, got, name = output.choice, self._got[output.choice], f"{self._name}/{output.choice}"
        self.world.note(f"client {name}@{output.index} {output.token_ids} {output.finish_reason or ''}")
        if self._ends[c] is not None:
            raise Violation(f"{name}: an output came after its end")
        if output.index != len(got):
            raise Violation(f"{name}: index {output.index} came after {len(got)} tokens")
        wanted = self._wanted[c]
        if output.token_ids != wanted[len(got) : len(got) + len(output.token_ids)]:
            raise Violation(f"{name}: got {got + output.token_ids}, not {wanted}")
        self._check_logprobs(output)
        got += output.token_ids
        if output.num_cached_tokens > len(self.spec.message.prompt_token_ids):
            raise Violation(f"{name}: more tokens were cached than the prompt has")
        if output.finish_reason is not None:
            self._check_finish(output)
            self._ends[c] = output.finish_reason
        elif len(got) >= self.spec.stops_at.get(c, len(got) + 1) and self._stream is not None:
            self._stream.cancel(self._name, c)

    def _check_finish(self, output: TokenOutput) -> None:
        c, reason, name = output.choice, output.finish_reason, f"{self._name}/{output.choice}"
        if reason == FINISH_CANCELLED:
            if not (self._alias_cancelled or self._is_cancelling or c in self.spec.stops_at):
                raise Violation(f"{name}: it was cancelled by nobody")
            return
        if output.embedding != self._vector or (self._vector and (reason, output.stop_token_id) != (FINISH_STOP, None)):
            raise Violation(f"{name}: it ended with '{reason}' and the vector {output.embedding!r}")
        if self._vector:
            return
        wanted, stop_id = self._wanted[c], None
        is_stop = wanted[-1] in self._stops and len(wanted) > self.spec.message.params.min_tokens
        if is_stop:
            stop_id = wanted[-1]
        if len(self._got[c]) != len(wanted) or reason != (FINISH_STOP if is_stop else FINISH_LENGTH):
            raise Violation(f"{name}: it ended with '{reason}' after {len(self._got[c])} of {len(wanted)} tokens")
        if output.stop_token_id != stop_id:
            raise Violation(f"{name}: the stop id is {output.stop_token_id}, not {stop_id}")

    def _check_logprobs(self, output: TokenOutput) -> None:
        message = self.spec.message
        wanted = []
        if message.params.logprobs is not None:
            history = hash_tokens(message.prompt_token_ids + self._got[output.choice], self.spec.salt)
            for index, token_id in enumerate(output.token_ids, output.index):
                if index >= self._num_brought[output.choice]:
                    wanted.append(oracle_logprobs(history, token_id))
                history = hash_tokens((token_id,), history)
        if output.logprobs != wanted:
            raise Violation(f"{self._name}/{output.choice}: wrong log-probabilities at {output.index}")

    def _check_prompt(self, item: PromptLogprobs) -> None:
        prompt, salt = self.spec.message.prompt_token_ids, self.spec.salt
        if item.start != self._num_prompt_logprobs + 1:
            raise Violation(f"{self._name}: prompt logprobs from {item.start}, after {self._num_prompt_logprobs}")
        for position, entry in enumerate(item.entries, item.start):
            history = hash_tokens(prompt[:position], salt)
            if position >= len(prompt) or entry != oracle_logprobs(history, prompt[position]):
                raise Violation(f"{self._name}: wrong prompt logprobs at {position}")
        self._num_prompt_logprobs += len(item.entries)

    def _check_end(self) -> None:
        if None in self._ends:
            raise Violation(f"{self._name}: the stream ended, its choices as {self._ends}")
        params, num = self.spec.message.params, len(self.spec.message.prompt_token_ids) - 1
        is_whole = FINISH_CANCELLED not in self._ends
        if params.prompt_logprobs is not None and is_whole and self._num_prompt_logprobs != num:
            raise Violation(f"{self._name}: {self._num_prompt_logprobs} of {num} prompt logprobs came")

    def _fail(self, error: NovaInferError) -> None:
        if isinstance(error, InvalidRequestError) and error.code == "request_id_in_use" and self._rival.has_taken:
            self._finish("another one reads it")
        elif isinstance(error, OverloadedError):
            self._verdicts.refused(self._name, str(error), has_tokens=any(self._got))
            self._finish("refused")
        elif isinstance(error, InvalidRequestError) or not isinstance(error, EngineError) or self.sent_at is None:
            raise Violation(f"{self._name}: {error}")
        else:
            self._verdicts.failed(self.spec, str(error), self.world.now - self.sent_at, self._gateway)
            self._finish(str(error))

    def _finish(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.world.note(f"client {self._name}: {outcome}")
            self._verdicts.num_open -= 1
            if self._gateway is not None:
                self._gateway.on_death.pop(self._name, None)

    # -- going away, and being left -----------------------------------------------------------------------------

    def _go_away(self) -> None:
        if self.outcome is not None:
            return
        gateway, stream = self._gateway, self._stream
        if gateway is None or stream is None:
            self._finish("gone while it claimed")
        else:
            gateway.call(lambda: self._close(stream))

    def _close(self, stream: RequestStream) -> None:
        if self.outcome is None and stream is self._stream:
            self._is_cancelling = True
            self._finish("cancelled")
            stream.close()

    def _cancel_alias(self) -> None:
        gateway = self._pick_gateway()
        if self.outcome is not None or gateway is None:
            return
        self._alias_cancelled = True
        message = self.spec.message
        gateway.call(lambda: gateway.cancel_alias(message.tenant, message.aliases[0], lambda answer: None))

    def _lose_gateway(self) -> None:
        """Its process is dead."""
        if self.outcome is not None:
            return
        was_accepted = self._stream is not None
        self._gateway = self._stream = None
        self._has_read_soon = False
        if not was_accepted:
            self.world.after(_RETRY_SECONDS, self._send)
            return
        if self.spec.thief:
            self.world.after(0.35, self._steal)  # when the scheduler has noticed, too
        self._rival.lose_gateway()
        if self.spec.claims:
            self._claims_until = self.world.now + self._cluster.scenario.config.server.orphan_grace + 2.0
            self.world.after(0.05, self._claim)
        else:
            self._finish("lost with its gateway")

    def give_up(self) -> None:
        """The whole server is gone."""
        self._finish("the server is gone")

    def _claim(self) -> None:
        if self.outcome is not None or self._stream is not None:
            return
        asked_at = self._claim_asked_at
        if asked_at is not None and self.world.now - asked_at < self._patience:
            self.world.after(_RETRY_SECONDS, self._claim)
            return
        if self.world.now > self._claims_until:
            # One cancelled by alias has ended, as was asked for. What a gateway sent as it died may come after the news
            # of its death, and counts for nothing; whoever has not got a token may send the request again.
            if not (self._alias_cancelled or self._rival.has_taken) and any(self._got):
                self._verdicts.unclaimed(self.spec)
            self._finish("not claimed")
            return
        gateway = self._pick_gateway()
        if gateway is not None and gateway.stopped_at is None and gateway.session.is_ready(gateway.clock):
            self._claim_asked_at = now = self.world.now
            message = self.spec.message
            gateway.call(lambda: self._rival.claim(gateway))
            gateway.call(
                lambda: gateway.claim(
                    message.tenant, message.aliases[0], lambda answer: self._take_over(gateway, answer, now)
                )
            )
        self.world.after(_RETRY_SECONDS, self._claim)

    def _take_over(self, gateway: SimGateway, answer: Answer, asked_at: float) -> None:
        if self._claim_asked_at == asked_at:
            self._claim_asked_at = None
        requests = answer.requests if isinstance(answer, Claimed) else []
        if not requests:
            return
        if self.outcome is not None or self._stream is not None or self.world.now - asked_at > self._patience:
            gateway.session.release(requests)
            return
        message = requests[0]
        emitted = [*message.emitted, *([] for _ in range(len(self._wanted) - len(message.emitted)))]
        is_whole = message.params.prompt_logprobs is None
        for got, claimed, wanted in zip(self._got, emitted, self._wanted, strict=True):
            # A last token that ended its choice is sampled again, to come with its end.
            if claimed != wanted[: len(claimed)] or (len(claimed) < len(got) - 1 and is_whole):
                raise Violation(f"{self._name}: claimed {claimed} after {got}, of {wanted}")
        message = taken_over(message, [len(got) for got in self._got])
        self._num_brought = [len(ids) for ids in message.emitted]
        self._gateway = gateway
        gateway.on_death[self._name] = self._lose_gateway
        self._begin_stream()  # the session tells what the request brings along
        self._enter(gateway, message)

    def _steal(self) -> None:
        gateway = self._pick_gateway()
        if gateway is not None and gateway.session.is_ready(gateway.clock):
            alias = self.spec.message.aliases[0]
            gateway.call(lambda: gateway.claim("eve", alias, self._check_theft))

    def _check_theft(self, answer: Answer) -> None:
        if isinstance(answer, Claimed) and answer.requests:
            raise Violation(f"{self._name}: another tenant has got it")
