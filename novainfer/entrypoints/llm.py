"""Offline inference: the same scheduler, text handling and workers as the server, driven by the caller's thread."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import count
from types import TracebackType
from typing import Any

from tqdm import tqdm

from novainfer.checkpoint import check_model, check_split, resolve_checkpoint, vocab_size
from novainfer.client.output import ChoiceOutput
from novainfer.config import DEMO_MODEL, ServeConfig, check
from novainfer.embedding import check_dimensions, finish_vector, numbers_of, read_pooling
from novainfer.engine.core import EngineCore
from novainfer.entrypoints.chats import ChatPrompts, Manner, check_conversations
from novainfer.entrypoints.foreign_flags import flag_without_effect, log_without_effect, why_refused
from novainfer.entrypoints.offline import Live, OnToken, checked_ids, checked_text, result_of
from novainfer.entrypoints.options import OPTIONS, build_config, parse_yaml_value
from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.executor.base import OwnExecutor
from novainfer.protocol.messages import AddRequest, TokenOutput
from novainfer.sampling.grammars import check_grammar
from novainfer.sampling.params import MAX_SEED, SamplingParams, validate
from novainfer.text.tokenizer import Tokenizer

Prompt = str | list[int]


class LLM:
    """A model in this process (`executor="local"`) or on Ray workers (`"ray"`, and always for several ranks).

    Options are the fields of the config dataclasses, e.g. `LLM("demo", max_model_len=512, dtype="float32")`.
    Usable as a context manager; what is dropped ends, too. Not thread-safe: one thread drives it. On Ray there is one
    at a time in a process. Raises `ConfigError`.
    """

    def __init__(self, model: str = DEMO_MODEL, *, executor: str = "local", **options: Any) -> None:
        self.config = config_from_options({"model": model, **options})
        check(self.config)
        # A caller that holds its own list of prompts is no crowd at the door: the queue is not bounded.
        scheduler = replace(self.config.scheduler, max_waiting=2**31 - 1)
        self.config = replace(self.config, scheduler=scheduler)
        if executor not in ("local", "ray"):
            raise ConfigError(f"executor is 'local' or 'ray', not {executor!r}")
        names = self.config.model
        folder = check_model(names)
        check_split(folder, self.config.parallel.tensor_parallel_size)
        at = folder if names.tokenizer is None else resolve_checkpoint(names.tokenizer, revision=names.revision)
        self.tokenizer = Tokenizer.load(at)
        self.tokenizer.check_fits(vocab_size(folder))
        self._pooling = read_pooling(folder)
        self._chats = ChatPrompts(self.tokenizer, names.chat_template)
        use_ray = executor == "ray" or self.config.parallel.tensor_parallel_size > 1
        self._executor = _ray_executor(self.config) if use_ray else _local_executor(self.config)
        self._engine = self._new_engine()
        self._is_broken_off = False  # a step was: the engine may be amid a change, and waits for what never comes
        num_ids = self._executor.info.vocab_size  # an id beyond it is never sampled
        self._eos_token_ids = [i for i in self.tokenizer.eos_token_ids if i < num_ids]
        self._live: dict[str, Live] = {}
        self._ended: list[dict[str, Any]] = []  # results that `step` has not returned yet
        self._numbers = count()

    def _new_engine(self) -> EngineCore:
        return EngineCore(self._executor, self.config, clock=time.monotonic)

    @property
    def mode(self) -> str:
        """How the workers compute; see `novainfer.mode`."""
        return self._executor.info.mode

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete every prompt (text, or token ids); always a list of dicts, in the order of the prompts.

        Keys: request_id, prompt_token_ids, text, token_ids, finish_reason, stop_reason, logprobs, usage,
        prompt_logprobs, error (words where the finish reason is 'error') and `choices` (one dict per choice; the other
        keys repeat choice 0). Raises `InvalidRequestError` before anything runs if a prompt or its parameters are
        wrong. Whatever is raised, none of these prompts is live afterwards.
        """
        return self._generate(prompts, sampling_params, use_tqdm, after_prompt=True)

    def _generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        after_prompt: bool,
    ) -> list[dict[str, Any]]:
        items = _as_list(prompts)
        pairs = zip(items, self._params_for(items, sampling_params), strict=True)
        return self._run_all((self.add_request(item, one, after_prompt=after_prompt) for item, one in pairs), use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The embedding of every prompt (text, or token ids), in their order, as `/v1/embeddings` gives it.

        Keys: request_id, prompt_token_ids, embedding (numbers; None where there is an error), usage, error (words).
        dimensions: how many numbers; None: all. normalize: None: as the checkpoint does. See `novainfer.embedding`.
        Raises `InvalidRequestError` as `generate` does.
        """
        self._pooling.check()
        check_dimensions(dimensions, self._executor.info.hidden_size)
        normalizes = self._pooling.normalizes if normalize is None else normalize

        def finish(hidden: bytes) -> list[float]:
            return list(numbers_of(finish_vector(hidden, dimensions, normalize=normalizes)))

        return self._run_all((self._add_embedding(item, finish) for item in _as_list(prompts)), use_tqdm)

    def _add_embedding(self, prompt: Prompt, finish: Callable[[bytes], list[float]]) -> str:
        message = self._message(prompt, SamplingParams.for_embedding(), [], embed=True)
        return self._add(message, None, after_prompt=False, finish_vector=finish)

    def _run_all(self, added: Iterable[str], use_tqdm: bool) -> list[dict[str, Any]]:
        """Run what is added, one id each, to its end. Whatever is raised, nothing of it is live afterwards."""
        ids: list[str] = []
        try:
            for request_id in added:
                ids.append(request_id)
            return self._finish(ids, use_tqdm)
        finally:
            for request_id in ids:
                self.cancel(request_id)

    def _finish(self, ids: list[str], use_tqdm: bool) -> list[dict[str, Any]]:
        """Run until these requests have ended; their results. Those of others are returned by the next `step`."""
        wanted = set(ids)
        results: dict[str, dict[str, Any]] = {}
        others: list[dict[str, Any]] = []
        with tqdm(total=len(ids), desc="Requests", disable=not use_tqdm) as progress:
            try:
                while len(results) < len(wanted):
                    for result in self.step():
                        if result["request_id"] in wanted:
                            results[result["request_id"]] = result
                            progress.update()
                        else:
                            others.append(result)
            finally:
                self._ended = [*others, *self._ended]
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Answer one conversation, or each of a list; results as `generate`'s. Messages are OpenAI's dicts.

        The rest is as in a request of the server's chats, for all of them: `Manner` says what is meant.
        """
        manner = Manner(add_generation_prompt, continue_final_message, chat_template_kwargs, tools)
        one = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if one else messages
        check_conversations(conversations)
        prompts = self._chats.encode(conversations, manner)
        return self._generate(prompts, sampling_params, use_tqdm, after_prompt=continue_final_message)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        on_token: OnToken | None = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        after_prompt: bool = False,
    ) -> str:
        """Queue one prompt and return its id; `on_token(id, delta)` is called from `step` for every token.

        eos_token_ids: what ends a choice, by default the tokenizer's. after_prompt: see `ChoiceOutput`.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params are SamplingParams, not {type(params).__name__}")
        if params.grammar:
            self._check_grammar(params)
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        eos = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        return self._add(self._message(prompt, params, eos), on_token, after_prompt=after_prompt)

    def _message(
        self, prompt: Prompt, params: SamplingParams, eos_token_ids: Sequence[int], *, embed: bool = False
    ) -> AddRequest:
        token_ids = self.tokenizer.encode(checked_text(prompt)) if isinstance(prompt, str) else checked_ids(prompt)
        return AddRequest(f"offline-{next(self._numbers)}", token_ids, params, list(eos_token_ids), embed=embed)

    def _add(
        self,
        message: AddRequest,
        on_token: OnToken | None,
        *,
        after_prompt: bool,
        finish_vector: Callable[[bytes], list[float]] | None = None,
    ) -> str:
        if self._is_broken_off:
            self._start_anew()
        self._engine.add(message, time.monotonic())
        params = message.params
        choices = [ChoiceOutput(self.tokenizer, params, c, after_prompt=after_prompt) for c in range(params.n)]
        live = Live(message, choices, on_token, [[] for _ in choices], finish_vector=finish_vector)
        self._live[message.request_id] = live
        return message.request_id

    def _check_grammar(self, params: SamplingParams) -> None:
        validate(params, vocab_size=self._executor.info.vocab_size)
        try:
            check_grammar(params.grammar, self.tokenizer.special_texts)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param="grammar") from None

    def step(self) -> list[dict[str, Any]]:
        """Run the engine until one step has come back; returns the requests that ended with it.

        If `on_token` raises, its request is cancelled, and the exception raised once all others have their tokens; what
        ended with that step is returned by the next one. Whatever else a step raises (Ctrl-C, `EngineError`), the next
        one goes on with all requests from the tokens that they have; if the workers cannot, it raises `EngineError`.
        """
        if self._is_broken_off:
            self._start_anew()
        try:
            fault = self._run_step()
        except BaseException:
            self._is_broken_off = True
            raise
        if fault is not None:
            raise fault
        return self._take_ended()

    def _run_step(self) -> BaseException | None:
        """A step, and its tokens to their requests; the first thing that an `on_token` has raised."""
        self._engine.submit()
        step = self._engine.collect(None)
        if step is None:
            return None
        for item in step.prompt_logprobs:
            live = self._live.get(item.request_id)
            if live is not None:
                # A preempted prompt is computed again: its first entries are known already.
                live.prompt_logprobs.extend(item.entries[len(live.prompt_logprobs) + 1 - item.start :])
        fault: BaseException | None = None
        for output in step.outputs:
            try:
                self._take(output)
            except BaseException as error:  # the caller's own, Ctrl-C in it as well
                fault = fault or error
                self.cancel(output.request_id)
        return fault

    def _start_anew(self) -> None:
        """Another engine goes on with the live requests, as one does for a gateway that has lost its scheduler."""
        self._executor.start_anew()
        self._engine = self._new_engine()
        for request_id, live in self._live.items():
            emitted = [list(choice.token_ids) for choice in live.choices]
            message = replace(live.message, emitted=emitted)
            if any(emitted):
                message = replace(message, num_cached_tokens=live.num_cached_tokens)
            self._engine.add(message, time.monotonic())
            for choice in live.choices:
                if choice.finish_reason is not None:
                    self._engine.cancel(request_id, choice.choice)
        self._is_broken_off = False

    def _take_ended(self) -> list[dict[str, Any]]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""
        if not self._is_broken_off:
            self._engine.cancel(request_id)
        self._live.pop(request_id, None)
        self._ended = [result for result in self._ended if result["request_id"] != request_id]

    def is_finished(self) -> bool:
        """No request is queued or running, and `step` has returned every result."""
        return not self._live and not self._ended

    def exit(self) -> None:
        """Release the workers (idempotent)."""
        self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit()

    def _params_for(
        self, items: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * len(items)
        if not isinstance(sampling_params, (list, tuple)):
            raise InvalidRequestError(f"sampling_params are SamplingParams, not {type(sampling_params).__name__}")
        if len(sampling_params) != len(items):
            raise InvalidRequestError(f"{len(items)} prompts but {len(sampling_params)} sampling params")
        return list(sampling_params)

    def _take(self, output: TokenOutput) -> None:
        """Give a choice its tokens, and keep the request's result if that was its end."""
        live = self._live.get(output.request_id)
        if live is None:
            return
        choice = live.choices[output.choice]
        delta = choice.push(output)
        live.num_cached_tokens = output.num_cached_tokens
        live.deltas[output.choice].append(delta)
        live.hidden = output.embedding
        if live.on_token is not None and (delta.token_ids or delta.finish_reason):
            live.on_token(output.request_id, delta)
            if output.request_id not in self._live:  # cancelled there
                return
        if choice.ended_here:  # a stop string: the engine does not know it yet
            self._engine.cancel(output.request_id, output.choice, complete=True)
        if all(c.finish_reason is not None for c in live.choices):
            del self._live[output.request_id]
            self._ended.append(result_of(live, self.tokenizer))


def config_from_options(options: dict[str, Any]) -> ServeConfig:
    """A `ServeConfig` from flat field names; an unknown one is a `ConfigError` that names the nearest."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if (flag := flag_without_effect(name, value)) is not None:
            log_without_effect([flag])
            continue
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1)
            why = why_refused("--" + name.replace("_", "-"))
            hint = f": {why}" if why else f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown option {name!r}{hint}")
        # A folder may come as a Path, and several values as a tuple; YAML has neither.
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        values[name] = parse_yaml_value(OPTIONS[name], list(plain) if isinstance(plain, tuple) else plain)
    return build_config(values)


def _as_list(prompts: str | Sequence[Prompt]) -> list[Prompt]:
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _local_executor(config: ServeConfig) -> OwnExecutor:
    from workers.local_executor import LocalExecutor

    return LocalExecutor(config)


def _ray_executor(config: ServeConfig) -> OwnExecutor:
    from workers.ray_executor import RayExecutor

    return RayExecutor(config)
