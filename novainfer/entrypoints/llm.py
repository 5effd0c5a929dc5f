"""Offline inference: the same scheduler, text handling and workers as the server, driven by the caller's thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import count
from types import TracebackType
from typing import Any

from tqdm import tqdm

from novainfer.checkpoint import resolve_checkpoint
from novainfer.client.output import ChoiceDelta, ChoiceOutput, TokenLogprob, describe_prompt
from novainfer.config import COMPONENTS, DEMO_MODEL, ServeConfig, check
from novainfer.engine.core import EngineCore
from novainfer.errors import ConfigError, InvalidRequestError, NovaInferError
from novainfer.executor.base import Executor
from novainfer.protocol.messages import AddRequest, Logprobs, TokenOutput
from novainfer.sampling.params import MAX_SEED, SamplingParams
from novainfer.text.chat_template import ChatTemplate
from novainfer.text.tokenizer import Tokenizer

OnToken = Callable[[str, ChoiceDelta], None]
Prompt = str | list[int]


@dataclass(slots=True)
class _Live:
    """A request that has not ended: its choices as text, and what was asked."""

    message: AddRequest
    choices: list[ChoiceOutput]
    on_token: OnToken | None
    deltas: list[list[ChoiceDelta]]
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0


class LLM:
    """A model in this process (`executor="local"`) or on Ray workers (`"ray"`, and always for several ranks).

    Options are the fields of the config dataclasses, e.g. `LLM("demo", max_model_len=512, dtype="float32")`.
    Usable as a context manager. Not thread-safe: one thread drives it.
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
        self.tokenizer = Tokenizer.load(resolve_checkpoint(names.tokenizer or names.model, revision=names.revision))
        use_ray = executor == "ray" or self.config.parallel.tensor_parallel_size > 1
        self._executor = _ray_executor(self.config) if use_ray else _local_executor(self.config)
        self._engine = EngineCore(self._executor, self.config)
        vocab_size = self._executor.info.vocab_size  # an id beyond it is never sampled
        self._eos_token_ids = [i for i in self.tokenizer.eos_token_ids if i < vocab_size]
        self._live: dict[str, _Live] = {}
        self._numbers = count()

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
        prompt_logprobs and `choices` (one dict per choice; the keys above it repeat choice 0).
        Raises `InvalidRequestError` before anything runs if a prompt or its parameters are wrong.
        """
        items: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._params_for(items, sampling_params)
        ids: list[str] = []
        try:
            ids.extend(self.add_request(item, p) for item, p in zip(items, params, strict=True))
        except NovaInferError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        wanted = set(ids)
        results: dict[str, dict[str, Any]] = {}
        with tqdm(total=len(ids), desc="Requests", disable=not use_tqdm) as progress:
            while len(results) < len(wanted):
                for result in self.step():
                    if result["request_id"] in wanted:
                        results[result["request_id"]] = result
                        progress.update()
        return [results[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Answer one conversation, or each of a list; results as `generate`'s. Messages are OpenAI's dicts."""
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if one else messages
        template = ChatTemplate.of(self.tokenizer)
        texts = [template.render(each) for each in conversations]
        # The template writes the special tokens itself.
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm)

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
        params = sampling_params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt)
        eos = self._eos_token_ids if eos_token_ids is None else eos_token_ids
        message = AddRequest(f"offline-{next(self._numbers)}", token_ids, params, list(eos))
        self._engine.add(message, time.monotonic())
        choices = [ChoiceOutput(self.tokenizer, params, c, after_prompt=after_prompt) for c in range(params.n)]
        self._live[message.request_id] = _Live(message, choices, on_token, [[] for _ in choices])
        return message.request_id

    def step(self) -> list[dict[str, Any]]:
        """Run the engine until one step has come back; returns the requests that ended with it."""
        self._engine.submit()
        step = self._engine.collect(None)
        if step is None:
            return []
        for item in step.prompt_logprobs:
            live = self._live.get(item.request_id)
            if live is not None:
                # A preempted prompt is computed again: its first entries are known already.
                live.prompt_logprobs.extend(item.entries[len(live.prompt_logprobs) + 1 - item.start :])
        done = []
        for output in step.outputs:
            result = self._take(output)
            if result is not None:
                done.append(result)
        return done

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""
        self._engine.cancel(request_id)
        self._live.pop(request_id, None)

    def is_finished(self) -> bool:
        """No request is queued or running."""
        return not self._live

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
        if len(sampling_params) != len(items):
            raise InvalidRequestError(f"{len(items)} prompts but {len(sampling_params)} sampling params")
        return list(sampling_params)

    def _take(self, output: TokenOutput) -> dict[str, Any] | None:
        """Give a choice its tokens; the request's result if that was its end."""
        live = self._live.get(output.request_id)
        if live is None:
            return None
        choice = live.choices[output.choice]
        delta = choice.push(output)
        live.num_cached_tokens = output.num_cached_tokens
        live.deltas[output.choice].append(delta)
        if live.on_token is not None and (delta.token_ids or delta.finish_reason):
            live.on_token(output.request_id, delta)
        if choice.ended_here:  # a stop string: the engine does not know it yet
            self._engine.cancel(output.request_id, output.choice)
        if any(c.finish_reason is None for c in live.choices):
            return None
        del self._live[output.request_id]
        return self._result(live)

    def _result(self, live: _Live) -> dict[str, Any]:
        choices = [_choice_result(choice, deltas) for choice, deltas in zip(live.choices, live.deltas, strict=True)]
        prompt_ids = live.message.prompt_token_ids
        completion = sum(choice.num_tokens for choice in live.choices)
        result = {
            "request_id": live.message.request_id,
            "prompt_token_ids": prompt_ids,
            **{key: value for key, value in choices[0].items() if key != "index"},
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": completion,
                "total_tokens": len(prompt_ids) + completion,
                "prompt_tokens_details": {"cached_tokens": live.num_cached_tokens},
            },
        }
        if live.message.params.prompt_logprobs is not None:
            described = describe_prompt(self.tokenizer, prompt_ids, live.prompt_logprobs)
            result["prompt_logprobs"] = [None if item is None else _logprob_dict(item) for item in described]
        return result


def config_from_options(options: dict[str, Any]) -> ServeConfig:
    """A `ServeConfig` from flat field names; an unknown one is a `ConfigError` that names the nearest."""
    owner = {f.name: part for part, component in COMPONENTS.items() for f in fields(component)}
    values: dict[str, dict[str, Any]] = {part: {} for part in COMPONENTS}
    for name, value in options.items():
        if name not in owner:
            near = get_close_matches(name, owner, n=1)
            raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        values[owner[name]][name] = value
    return ServeConfig(**{part: component(**values[part]) for part, component in COMPONENTS.items()})


def _local_executor(config: ServeConfig) -> Executor:
    from workers.local_executor import LocalExecutor

    return LocalExecutor(config)


def _ray_executor(config: ServeConfig) -> Executor:
    from workers.ray_executor import RayExecutor

    return RayExecutor(config)


def _checked_ids(prompt: list[int]) -> list[int]:
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in prompt):
        raise InvalidRequestError("a prompt is text or a list of token ids", param="prompt")
    return list(prompt)


def _choice_result(choice: ChoiceOutput, deltas: list[ChoiceDelta]) -> dict[str, Any]:
    last = deltas[-1]
    return {
        "index": choice.choice,
        "text": "".join(delta.text for delta in deltas),
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": last.stop_reason,
        "error": last.error,
        "logprobs": [_logprob_dict(entry) for delta in deltas for entry in delta.logprobs] or None,
    }


def _logprob_dict(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token.token_id,
        "token": entry.token.text,
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [{"token_id": t.token_id, "token": t.text, "logprob": value} for t, value in entry.top],
    }
