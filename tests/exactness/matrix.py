"""The exactness matrix: the same requests under every circumstance that must not matter, compared bit for bit.

`python -m tests.exactness.matrix --pairs 5000 [--model DIR] [--dtype float32] [--quantization int8]
[--kv-cache-dtype int8] [--long] [--seconds 80]`

A *case* is a request. Its *reference* is what it gives alone: one row, the whole prompt in one chunk, no cache, one
step in flight, on fresh workers. A *circumstance* is everything else: company, arrival, chunk size, block size, cache,
memory so small that sequences are preempted, threads, resuming from emitted tokens, workers lost in between. Token ids
and log-probabilities must be equal, not close.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.protocol.messages import AddRequest, Logprobs, PromptLogprobs, TokenOutput
from novainfer.sampling.grammars import CHOICE, JSON, REGEX, Thoughts, make_grammar
from novainfer.sampling.params import SamplingParams
from workers.local_executor import LocalExecutor

MAX_MODEL_LEN = 512
LENGTHS = (1, 2, 15, 16, 17, 60, 200)  # tokens of prompts
# Contexts of several chunks of 256 tokens, in which decode attention on a GPU takes partial sums.
LONG_LENGTHS = (60, 240, 255, 256, 257, 300, 370)
_PERSON = """{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
"tags": {"type": "array", "items": {"enum": ["a", "bc"]}}}, "required": ["name", "age", "tags"]}"""
GRAMMARS = (
    make_grammar(JSON, _PERSON, None),
    make_grammar(JSON, "{}", Thoughts("<think>", "</think>", are_special=False, is_inside=False)),
    make_grammar(REGEX, "[A-Z][a-z]+( [a-z]+){3,9}[.!?]", None),
    make_grammar(CHOICE, json.dumps(["yes", "no", "perhaps, but it is hard to say"]), None),
    'start: "(" start ")" start | /[0-9]+/',
)
_MAX_STEPS = 200_000
_REFERENCES_SHARE = 0.5  # of the time, where that is limited: after it there are as many cases as have references


@dataclass(slots=True)
class Answer:
    """What a client gets of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # choice 0 only
    finish_reason: str | None = None
    embedding: bytes = b""


Answers = dict[tuple[str, int], Answer]  # (request id, choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """How the requests are run."""

    max_num_seqs: int = 1
    max_num_batched_tokens: int = MAX_MODEL_LEN
    block_size: int = 16
    num_blocks: int = 256
    prefix_caching: bool = False
    steps_in_flight: int = 1
    threads: int = 1
    all_at_once: bool = True  # else one arrives at each step
    resumed: float = 0.0  # share of the requests that come with some of their tokens emitted
    losses: int = 0  # how often the workers are lost
    speculation: str = "none"

    def config(
        self,
        model: str,
        dtype: str,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        kernel_backend: str = "auto",
    ) -> ServeConfig:
        return ServeConfig(
            model=ModelConfig(model=model, dtype=dtype, quantization=quantization, max_model_len=MAX_MODEL_LEN),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                kv_cache_dtype=kv_cache_dtype,
                enable_prefix_caching=self.prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                steps_in_flight=self.steps_in_flight,
                speculation=self.speculation,
            ),
            parallel=ParallelConfig(
                device=device,
                threads_per_worker=self.threads,
                kernel_backend=kernel_backend,
                deterministic=device == "cuda" or kernel_backend == "triton",
            ),
        )


def make_cases(count: int, vocab_size: int, seed: int, lengths: Sequence[int] = LENGTHS) -> list[AddRequest]:
    """Requests over all features, with prompts of these lengths; about half share a prefix with another one."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab_size) for _ in range(rng.choice((17, 40, 96)))] for _ in range(4)]
    cases = []
    for i in range(count):
        stem = rng.choice(stems)[: rng.randint(1, 96)] if rng.random() < 0.5 else []
        prompt = stem + [rng.randrange(vocab_size) for _ in range(rng.choice(lengths))]
        if rng.random() < 0.3:  # a text that repeats itself, so that there are drafts
            prompt = (prompt * 8)[: max(len(prompt), 120)]
        params = _params(rng, vocab_size)
        case = AddRequest(f"case-{i}", prompt, params, eos_token_ids=[rng.randrange(vocab_size)])
        cases.append(_as_embedding(case) if i % 6 == 5 else case)
    return cases


def _as_embedding(case: AddRequest) -> AddRequest:
    """The vector of its prompt, in place of tokens."""
    return replace(case, params=SamplingParams.for_embedding(), eos_token_ids=[], embed=True)


def _params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def sometimes(value: object, default: object, share: float = 0.25) -> object:
        return value if rng.random() < share else default

    max_tokens = rng.randint(1, 40)
    tokens = tuple(rng.sample(range(vocab_size), 3))
    drawn = {
        "n": sometimes(3, 1, 0.15),
        "max_tokens": max_tokens,
        "min_tokens": sometimes(rng.randint(0, max_tokens), 0),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 1.6)),
        "top_p": sometimes(0.8, 1.0),
        "top_k": sometimes(rng.randint(1, 50), 0),
        "min_p": sometimes(0.05, 0.0),
        "presence_penalty": sometimes(0.7, 0.0),
        "frequency_penalty": sometimes(0.4, 0.0),
        "repetition_penalty": sometimes(1.3, 1.0),
        "seed": rng.getrandbits(62),
        "logit_bias": sometimes({token: rng.uniform(-5.0, 5.0) for token in tokens}, {}),
        "banned_token_ids": sometimes(tokens, ()),
        "stop_token_ids": sometimes(tokens, ()),
        "ignore_eos": rng.random() < 0.3,
        "logprobs": sometimes(rng.choice((0, 1, 5)), None, 0.6),
        "prompt_logprobs": sometimes(2, None, 0.15),
    }
    grammar = sometimes(rng.choice(GRAMMARS), "", 0.3)
    if grammar:
        drawn |= {"grammar": grammar, "min_tokens": 0}
    return SamplingParams(**drawn)  # type: ignore[arg-type]


def draw_circumstance(rng: random.Random) -> Circumstance:
    """Any combination of what must not matter."""
    budget = rng.choice((1, 7, 16, 64, 512))
    block_size = rng.choice((16, 32))  # a size that is no multiple of 16 has another attention kernel, hence other bits
    # Enough for the longest request, and not much more where memory is to be short.
    num_blocks = -(-MAX_MODEL_LEN // block_size) * rng.choice((1, 2, 8))
    return Circumstance(
        max_num_seqs=min(budget, rng.choice((2, 5, 16, 64))),
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=rng.random() < 0.7,
        steps_in_flight=rng.choice((1, 2, 2)),
        threads=rng.choice((1, 2)),
        all_at_once=rng.random() < 0.6,
        resumed=rng.choice((0.0, 0.0, 0.5)),
        losses=rng.choice((0, 0, 1, 3)),
        speculation=rng.choice(("none", "prompt-lookup")),
    )


def _executor(config: ServeConfig) -> LocalExecutor:
    """Fresh workers; on a GPU those of several sequences run by graphs, as after a while in a server."""
    executor = LocalExecutor(config)
    if config.scheduler.max_num_seqs > 1:
        executor.record_graphs()
    return executor


class Runner:
    """Requests through scheduler and workers in this process; `model` is a folder or 'demo'."""

    def __init__(
        self,
        model: str,
        dtype: str,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        kernel_backend: str = "auto",
    ) -> None:
        self._types = (model, dtype, quantization, kv_cache_dtype, device, kernel_backend)

    def vocab_size(self) -> int:
        executor = LocalExecutor(Circumstance().config(*self._types))
        executor.close()
        return executor.info.vocab_size

    def run(self, requests: Sequence[AddRequest], how: Circumstance, rng: random.Random) -> tuple[Answers, EngineCore]:
        """Run all to their ends; answers of resumed requests begin after what was emitted."""
        config = how.config(*self._types)
        engine = EngineCore(_executor(config), config)
        return self.drive(engine, requests, how, rng), engine

    def drive(
        self, engine: EngineCore, requests: Sequence[AddRequest], how: Circumstance, rng: random.Random
    ) -> Answers:
        """The same on an engine that is there."""
        config = how.config(*self._types)
        answers: Answers = {(r.request_id, c): Answer() for r in requests for c in range(r.params.n)}
        waiting = list(requests)
        loss_steps = sorted(rng.randint(1, 60) for _ in range(how.losses))
        for step in range(_MAX_STEPS):
            for _ in range(len(waiting) if how.all_at_once else min(1, len(waiting))):
                _record(answers, engine.add(waiting.pop(0), now=0.0), [])
            engine.submit()
            if loss_steps and step >= loss_steps[0]:
                loss_steps.pop(0)
                _record(answers, engine.lose_workers(faulted=False), [])
                _record(answers, engine.attach_workers(_executor(config)), [])
                continue
            outputs = engine.collect(None)
            if outputs is not None:
                _record(answers, outputs.outputs, outputs.prompt_logprobs)
            elif not waiting and engine.is_idle:
                return answers
        raise RuntimeError("the requests do not end")

    def references(self, cases: Sequence[AddRequest], is_over: Callable[[], bool] = lambda: False) -> Answers:
        """Each case alone on workers that never ran another one; after the first, none is begun once it is over."""
        alone = Circumstance()
        answers: Answers = {}
        for case in cases:
            if answers and is_over():
                break
            answers |= self.run([case], replace(alone, max_num_seqs=case.params.n), random.Random(0))[0]
        return answers


def _record(answers: Answers, outputs: Sequence[TokenOutput], prompts: Sequence[PromptLogprobs]) -> None:
    for item in prompts:
        known = answers[item.request_id, 0].prompt_logprobs
        known.extend(item.entries[len(known) + 1 - item.start :])  # computed again after a preemption
    for output in outputs:
        answer = answers[output.request_id, output.choice]
        answer.token_ids.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs)
        answer.finish_reason = output.finish_reason or answer.finish_reason
        answer.embedding = output.embedding or answer.embedding


def _resume(case: AddRequest, references: Answers, rng: random.Random) -> AddRequest:
    """The case as a journal would send it again in the middle of its streams."""
    emitted = []
    for choice in range(case.params.n):
        tokens = references[case.request_id, choice].token_ids
        emitted.append(tokens[: rng.randint(0, max(len(tokens) - 1, 0))])  # a grammar may leave no first one
    return replace(case, emitted=emitted)


def compare(
    runner: Runner, cases: Sequence[AddRequest], references: Answers, how: Circumstance, rng: random.Random
) -> Iterator[str]:
    """One line for each case that is not what it is alone."""
    requests = [_resume(case, references, rng) if rng.random() < how.resumed else case for case in cases]
    if rng.random() < 0.3:  # one choice instead of three: choice 0 must not notice
        requests = [replace(r, params=replace(r.params, n=1), emitted=r.emitted[:1]) for r in requests]
    rng.shuffle(requests)
    if how.prefix_caching and rng.random() < 0.5:  # the second time the cache is warm
        requests += [replace(r, request_id=f"{r.request_id}-again") for r in requests]
    answers, engine = runner.run(requests, how, rng)
    if engine.scheduler.kv.pool.num_free != how.num_blocks:
        yield f"KV blocks are still held under {how}"
    for request in requests:
        name = request.request_id.removesuffix("-again")
        for choice in range(request.params.n):
            known = len(request.emitted[choice]) if request.emitted else 0
            want, got = references[name, choice], answers[request.request_id, choice]
            expected = replace(want, token_ids=want.token_ids[known:], logprobs=want.logprobs[known:])
            if got != expected:
                what = _first_difference(got, expected)
                yield f"{request.request_id}[{choice}] after {known} tokens under {how}: {what}"


def _first_difference(got: Answer, expected: Answer) -> str:
    for name in Answer.__dataclass_fields__:
        have, want = getattr(got, name), getattr(expected, name)
        if have != want and isinstance(have, list):
            for i, pair in enumerate(zip(have, want, strict=False)):
                if pair[0] != pair[1]:
                    return f"{name}[{i}] is {pair[0]}, alone {pair[1]}"
            return f"there are {len(have)} {name}, alone {len(want)}"
        if have != want:
            return f"{name} is {have}, alone {want}"
    return "nothing"


def run_pairs(
    runner: Runner, cases: Sequence[AddRequest], most: int, seed: int, is_over: Callable[[float], bool]
) -> tuple[int, int, int]:
    """(cases, pairs, differences) of about so many pairs; every difference is printed, and the pairs so far.

    is_over: whether this share of the time has gone, after which no other case or circumstance is begun.
    """
    references = runner.references(cases, lambda: is_over(_REFERENCES_SHARE))
    cases = [case for case in cases if (case.request_id, 0) in references]
    rng = random.Random(seed)
    pairs = num_differences = 0
    while pairs < most and not is_over(1.0):
        differences = list(compare(runner, cases, references, draw_circumstance(rng), rng))
        for line in differences:
            print(line)
        pairs += len(cases)
        num_differences += len(differences)
        print(f"{pairs} pairs so far", flush=True)
    return len(cases), pairs, num_differences


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix and print its size and every difference; 0 if there is none, and something was compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder, or 'demo'")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: in deterministic mode")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4", "w8a8", "fp8"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--long", action="store_true", help="prompts of up to 370 tokens instead of 200")
    parser.add_argument("--pairs", type=int, default=5000, help="(case, circumstance) pairs, about")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other pairs are begun")
    options = parser.parse_args(argv)
    began, seconds = time.monotonic(), float(options.seconds)
    runner = Runner(options.model, options.dtype, options.quantization, options.kv_cache_dtype, options.device)
    lengths = LONG_LENGTHS if options.long else LENGTHS
    cases = make_cases(options.cases, runner.vocab_size(), options.seed, lengths)

    def is_over(share: float) -> bool:
        return time.monotonic() >= began + share * seconds

    num_cases, pairs, num_differences = run_pairs(runner, cases, options.pairs, options.seed, is_over)
    if pairs < options.pairs:
        print(f"stopped after {seconds:.0f} s, with {num_cases} of {len(cases)} cases")
    types = f"{options.dtype}, quantization {options.quantization}, KV cache {options.kv_cache_dtype}"
    print(f"{pairs} pairs, {num_differences} differences (torch {torch.__version__}, {types})")
    return 1 if num_differences or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
