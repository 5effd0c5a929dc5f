"""The live part of one HTTP request: its prompts with their choices, from the engine's tokens to text.

Choices are numbered over all prompts: number = prompt * n + choice, the `index` that clients see.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import Receive

from gateway.body import ClientGone
from gateway.client_watch import ClientWatch
from gateway.context import RequestInfo
from gateway.metrics import CANCELLED, FAILED, FINISHED, REFUSED, GatewayMetrics
from gateway.output_parts import WholeChoice, is_long, parts_of, split, without_tokens
from gateway.plain_choice import PlainChoice
from gateway.slices import Slices
from gateway.token_times import TokenTimes
from novainfer.client.output import (
    ChoiceDelta,
    ChoiceOutput,
    TokenLogprob,
    TokenText,
    describe_logprobs,
    describe_token,
)
from novainfer.client.stream import RequestStream
from novainfer.errors import DeadlineError, InvalidRequestError
from novainfer.protocol.messages import FINISH_CANCELLED, EngineInfo, Logprobs, PromptLogprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.detokenizer import Detokenizer
from novainfer.text.parts import Telling
from novainfer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class PromptState:
    """One prompt. `echo` is its text where the answer repeats it.

    is_alone: no token was asked for; of the one that the engine samples nobody is told.
    told: the places up to which another gateway has told its choices (see `stream_record`); the deltas begin there.
    telling: what is taken out of the text of its choices.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    echo: str = ""
    told: list[int] = field(default_factory=list)
    is_alone: bool = False
    telling: Telling | None = None
    num_cached_tokens: int | None = None  # as first told; a recovered engine finds its own output cached too
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        """That were asked for, of each choice."""
        return 0 if self.is_alone else self.params.max_tokens


class Sink(Protocol):
    """Takes deltas at once, or not at all."""

    @property
    def is_open(self) -> bool:
        """Whether it would take one now."""

    def write(self, delta: ChoiceDelta) -> None:
        """Take a delta without log-probabilities or the engine's finish reason."""

    def plain(self, output: ChoiceOutput) -> PlainChoice | None:
        """The short way for all further tokens of a choice that has begun, if there is one."""


class Generation:
    """Turns the outputs of a `RequestStream` into deltas and counts. Close it in the end.

    `info`: the HTTP request that it answers. `engine`: what it said of itself then.
    """

    def __init__(
        self,
        prompts: list[PromptState],
        stream: RequestStream,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        *,
        engine: EngineInfo,
        info: RequestInfo,
        after_prompt: bool,
    ) -> None:
        self.prompts = prompts
        self.num_prompt_tokens = sum([len(prompt.token_ids) for prompt in prompts])
        self.engine = engine
        self.after_prompt = after_prompt
        self.client_gone = False
        self._stream = stream
        self.tokenizer = tokenizer
        self._metrics = metrics
        self._info = info
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._n = prompts[0].params.n
        self._prompt_of = {prompt.request_id: number for number, prompt in enumerate(prompts)}
        self.outputs = [
            ChoiceOutput(
                tokenizer,
                prompt.params,
                p * self._n + c,
                after_prompt=after_prompt,
                text_offset=len(prompt.echo),
                telling=prompt.telling,
            )
            for p, prompt in enumerate(prompts)
            for c in range(self._n)
        ]
        self.told = [place for prompt in prompts for place in prompt.told or [0] * self._n]
        self._times = TokenTimes(len(self.outputs), info, metrics)
        self._plain: dict[tuple[str, int], PlainChoice] = {}  # by request id and its choice: until the end
        self._client: ClientWatch | None = None
        self._is_closed = False
        self._outcome = ""
        metrics.request_begun(prompts[0].max_tokens)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._info.tenant

    def watch(self, receive: Receive) -> None:
        """From now on a client that goes away cancels everything."""
        self._client = ClientWatch(receive, self._lose_client)

    def _lose_client(self) -> None:
        self.client_gone = True
        self._stream.close()

    def wait(self) -> Awaitable[None]:
        """Returns once `take` has something, everything has ended, or `wake` was called."""
        return self._stream.wait()

    async def wait_and_pour(self, sink: Sink) -> None:
        """The same; meanwhile plain tokens go to the sink as they come, without a task that would have to wake up."""
        self._sink = sink
        self._stream.direct = self._pour
        self._times.begin(self._plain.values())
        if sink.is_open:
            for plain in self._plain.values():
                plain.look_ahead()
            self._stream.open_ways()
        try:
            await self._stream.wait()
        finally:
            self._stream.direct = self._sink = None
            self.dam()
            self._times.settle(self._plain.values())

    def dam(self) -> None:
        """Plain tokens that come from now on wait for `take`, until all is as it was before the next wait."""
        self._stream.close_ways()

    def told_at(self) -> float:
        """When text was last poured, on the performance counter; 0: never."""
        return max([plain.written_at for plain in self._plain.values()], default=0.0)

    def _pour(self, request_id: str, choice: int, index: int, token_id: int) -> bool:
        """Whether the sink has taken this token."""
        sink = self._sink
        if sink is None or self.client_gone or self._failure is not None:
            return False
        if (request_id, choice) in self._plain or not sink.is_open:
            return False  # what has a short way and does not go there is to wait
        if self.prompts[self._prompt_of[request_id]].is_alone:
            return False
        try:
            self._pour_delta(sink, TokenOutput(request_id, choice, index, [token_id]))
        except Exception as error:
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        """While tokens are poured: the one who waits raises it."""
        self._failure = error
        self._stream.direct = None
        self.dam()
        self.wake()

    def _pour_delta(self, sink: Sink, item: TokenOutput) -> None:
        """What is told of it; if all that follows is its text, the next ones are poured as that."""
        delta = self._fresh(item)
        if delta is not None:
            sink.write(delta)
        output = self.outputs[self._prompt_of[item.request_id] * self._n + item.choice]
        if output.is_plain:
            plain = sink.plain(output)
            if plain is not None:
                plain.begin(self._metrics.between_tokens, self._fail)
                self._times.begin([plain])
                self._plain[item.request_id, item.choice] = plain
                self._stream.shorten(item.request_id, item.choice, plain)
                plain.is_open = sink.is_open

    def wake(self) -> None:
        """End a wait, though nothing may be there."""
        self._stream.wake()

    @property
    def finished(self) -> bool:
        """Every delta was taken."""
        return self._stream.finished

    def take(self) -> Iterator[ChoiceDelta]:
        """The deltas that are ready, none of them large; each is made when its turn comes, so pause between them.

        A delta may be empty. Raises what ended the generation early, `ClientGone` among that.
        """
        self._check()
        try:
            items = self._stream.take_ready()
        except InvalidRequestError:
            self._outcome = REFUSED
            raise
        for item in items:
            for part in parts_of(item) if is_long(item) else (item,):
                delta = self._fresh(part)
                if delta is not None:
                    yield delta
                    self._check()

    async def collect(self, describe: Callable[[ChoiceDelta], None]) -> list[ChoiceDelta]:
        """Wait for the end; one delta per choice, holding all of it but the log-probabilities: those see `describe`."""
        slices = Slices()
        wholes = [WholeChoice(output.choice) for output in self.outputs]
        while not self.finished:
            await self.wait()
            slices.begin()
            for delta in self.take():
                describe(delta)
                wholes[delta.choice].add(delta)
                await slices.pause()
        self._check()
        return [whole.join() for whole in wholes]

    def _check(self) -> None:
        if self.client_gone:
            raise ClientGone
        if self._failure is not None:
            raise self._failure

    def prompt_of(self, choice: int) -> PromptState:
        """The prompt that a choice belongs to."""
        return self.prompts[choice // self._n]

    def outputs_of(self, prompt: PromptState) -> list[ChoiceOutput]:
        """The choices of a prompt."""
        first = self._prompt_of[prompt.request_id] * self._n
        return self.outputs[first : first + self._n]

    def describe(self, prompt: PromptState) -> Iterator[tuple[TokenText, int, TokenLogprob | None]]:
        """Of each token of a prompt: itself, how much text was finished before it, its log-probability.

        All but the first have one once the first output token has come, unless the request was cancelled before.
        """
        detokenizer, offset = Detokenizer(self.tokenizer), 0
        known = iter(prompt.logprobs)
        for number, token_id in enumerate(prompt.token_ids):
            found = next(known, None) if number else None
            entry = None if found is None else describe_logprobs(self.tokenizer, found, offset)
            yield describe_token(self.tokenizer, token_id), offset, entry
            if token_id in self.tokenizer.special_ids:  # without text, unless the prompt's text spells it
                spelled = self.tokenizer.token(token_id) or ""
                offset += len(spelled) if prompt.echo.startswith(spelled, offset) else 0
            else:
                offset += len(detokenizer.feed((token_id,)))

    def usage(self) -> dict[str, Any]:
        """Counts so far: sampled ids, whether or not they became text."""
        prompt, completion = self.num_prompt_tokens, self.num_generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum([p.num_cached_tokens or 0 for p in self.prompts])},
            "completion_tokens_details": {"reasoning_tokens": sum([o.num_reasoning_tokens for o in self.outputs])},
        }

    @property
    def num_generated(self) -> int:
        """Tokens of all outputs so far."""
        return sum([len(output.token_ids) for output in self.outputs])

    @property
    def num_tokens(self) -> int:
        """Of all prompts and outputs so far."""
        return self.num_prompt_tokens + self.num_generated

    def expire(self) -> None:
        """Its time is over: what can still be taken is the error that says so."""
        count = self.num_generated
        stage = f"its tokens were generated ({count} so far)" if count else "it waited for its first token"
        self._failure = DeadlineError(f"The request's time limit of {self._info.time_limit:g} s passed while {stage}.")
        self._stream.close()

    def cancel(self) -> None:
        """End every choice with the finish reason 'cancelled'."""
        self._stream.close()

    def close(self) -> None:
        """Free what is held in the engine and stop watching the client. Idempotent."""
        self._stream.close()
        # What knows us is forgotten: a circle would stay, long prompts and all, until a garbage collection.
        self._stream.forget_error()
        self._failure = None
        self._plain.clear()
        if self._client is not None:
            self._client.stop()
            self._client = None
        if not self._is_closed:
            self._is_closed = True
            self._count_end()

    @property
    def outcome(self) -> str:
        """How it has ended, as metrics name it; once it is closed."""
        return self._outcome

    def figures(self) -> dict[str, int | float]:
        """What can be said of it without its text; times in milliseconds since the request came, 0: there was none."""
        self._times.settle(self._plain.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": sum(prompt.num_cached_tokens or 0 for prompt in self.prompts),
            "generation_tokens": self.num_generated,
            **self._times.figures(),
        }

    def _count_end(self) -> None:
        metrics, outputs = self._metrics, self.outputs
        reasons = {output.finish_reason for output in outputs}
        ended = CANCELLED if self.client_gone or FINISH_CANCELLED in reasons else FAILED
        self._outcome = self._outcome or ended
        if reasons.isdisjoint((None, FINISH_CANCELLED)):
            self._outcome = FINISHED
            metrics.whole.observe(time.perf_counter() - self._info.started)
        metrics.request_ended(
            self._info.tenant,
            self._outcome,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_generated,
        )
        self._times.ended(outputs)

    def _fresh(self, item: TokenOutput | PromptLogprobs) -> ChoiceDelta | None:
        """What of an output was not told before; all of it is applied."""
        if isinstance(item, PromptLogprobs):
            return self._apply(item)
        number = self._prompt_of[item.request_id]
        if self.prompts[number].is_alone:
            if item.finish_reason is None:
                return None
            item = without_tokens(item)
        output = self.outputs[number * self._n + item.choice]
        place = self.told[output.choice] - 1  # tokens, and what of the end
        end = item.index + len(item.token_ids)
        if place <= item.index and not (item.finish_reason is not None and place > end):
            return self._apply(item)
        told, fresh = split(item, place) if place <= end else (item, None)
        delta = self._apply(told)
        if delta is None or delta.finish_reason is None:
            return ChoiceDelta(output.choice) if fresh is None else self._apply(fresh)
        if place - output.num_tokens > 1:
            return None
        return ChoiceDelta(output.choice, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)

    def _apply(self, item: TokenOutput | PromptLogprobs) -> ChoiceDelta | None:
        number = self._prompt_of[item.request_id]
        prompt = self.prompts[number]
        if isinstance(item, PromptLogprobs):
            prompt.logprobs += item.entries
            return None
        if prompt.num_cached_tokens is None:
            prompt.num_cached_tokens = item.num_cached_tokens
            self._info.permit.begin()
        output = self.outputs[number * self._n + item.choice]
        if output.finish_reason is not None:
            return None  # ended by a stop string; this is the engine's answer to our cancel
        delta = output.push(item)
        self._times.came(output.choice, len(delta.token_ids))
        if output.ended_here:
            self._stream.cancel(item.request_id, item.choice)
        return delta
