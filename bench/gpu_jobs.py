"""Whole offline jobs for `bench.gpu`: through scheduler, workers and sampler, as `LLM.generate` runs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench import workloads
from bench.gpu_clock import Clock
from bench.gpu_steps import NotDecodesError, Step, decode_gaps, decodes, longest_run, watched
from novainfer import LLM, SamplingParams
from workers import worker

_WINDOW = 100  # decodes that are timed, or profiled, at a time
_TOY_WINDOW = 2
_FIRST_TOKENS = 9  # lone prompts
_SEEDS = 100  # of a job
_WORKER: Any = worker


@dataclass(frozen=True, slots=True)
class Job:
    """So many sequences at once. is_shared: they are those of `workloads.shared`, of at most these lengths."""

    sequences: int
    num_input: int
    num_output: int
    is_shared: bool = False


# By what is worth most, should the time not do for all. The second is what nano-vllm and mini-sglang report.
JOBS: dict[str, Job] = {
    "256 x (1024 -> 1024)": Job(256, 1024, 1024),
    "256 of 100 to 1024": Job(256, 1024, 1024, is_shared=True),
    "64 x (1024 -> 128)": Job(64, 1024, 128),
    "1 x (1024 -> 128)": Job(1, 1024, 128),
}
TOY_JOBS: dict[str, Job] = {"2 x (6 -> 3)": Job(2, 6, 3)}
_TOY_OPTIONS = {"device": "cpu", "kernel_backend": "triton", "max_model_len": 64, "num_blocks": 32, "max_num_seqs": 2,
                "max_num_batched_tokens": 12}  # fmt: skip


# With quantised weights: what one sequence and many get of them.
SHORT_JOBS = {name: JOBS[name] for name in ("1 x (1024 -> 128)", "64 x (1024 -> 128)")}


def run_job(
    model: str, jobs: dict[str, Job], clock: Clock, most_rows: int = 256, **options: Any
) -> Iterator[tuple[str, dict[str, float]]]:
    """Name and figures of each, with one engine; options: its own.

    start_seconds: until the engine is ready, and after_weights_seconds of that from when the weights were there.
    first_token_ms: of a lone prompt, the median of nine. step_ms, step_ms_p99: of the first 100 decodes of all
    sequences, whose rows see `context` tokens on average;
    late_step_ms, late_context: of the last ones. prompt_tokens_per_second: until the last prompt is computed, decodes
    beside prompts included. busy, gap_us_...: see `decode_gaps`.
    """
    at: dict[str, Any] = _TOY_OPTIONS
    if not clock.is_toy:
        at = {"device": "cuda", "max_model_len": 4096, "max_num_seqs": most_rows}
    window = _TOY_WINDOW if clock.is_toy else _WINDOW
    with _Loading() as loading:
        llm = LLM(model, **at, **options)
    with llm:
        vocab = llm.tokenizer.vocab_size
        graph_seconds = clock.seconds(lambda: _record_graphs(llm))
        for number, (name, job) in enumerate(jobs.items()):
            seed = _SEEDS * number  # prompts of no other job, nor of this one's other runs: the cache has none
            if not clock.is_toy:
                short = SamplingParams(max_tokens=2, ignore_eos=True)
                _run(llm, requests(job, vocab, seed=seed + 1)[0], [short] * job.sequences)
            prompts, params = requests(job, vocab, seed=seed)
            with watched(llm) as watch:
                began = time.perf_counter()
                whole = _run(llm, prompts, params)
            tokens = sum(one.max_tokens for one in params)
            figures = {"seconds": whole, "tokens": tokens, "tokens_per_second": tokens / whole}
            figures |= {"start_seconds": loading.start, "after_weights_seconds": loading.after_weights}
            figures["graph_seconds"] = graph_seconds
            number_alone = 1 if clock.is_toy else _FIRST_TOKENS
            figures["first_token_ms"] = 1000 * _first_token_seconds(llm, job.num_input, vocab, seed + 4, number_alone)
            if not job.is_shared:
                try:
                    figures |= _steps_of(job, watch.steps(job.sequences), began, window)
                    figures |= decode_gaps(llm, requests(job, vocab, seed=seed + 3)[0], window, clock.wait)
                except NotDecodesError as error:  # memory for all sequences at once is missing, say
                    print(f"{name}: figures of steps are left out: {error}")
            yield name, figures


def _steps_of(job: Job, steps: Sequence[Step], began: float, window: int) -> dict[str, float]:
    """Of a job that was watched from `began` on. Raises `NotDecodesError` if its sequences never decoded at once."""
    run = longest_run(steps)
    first, last = decodes(run[: window + 1]), decodes(run[-window - 1 :])
    if first is None or last is None:
        raise NotDecodesError(f"there are no two decodes of all {job.sequences} sequences one after another")
    prompts_end = next((before.ended for before, after in pairwise(steps) if after.is_decode), began)
    return {
        "context": first.context,
        "step_ms": 1000 * first.step_seconds,
        "step_ms_p99": 1000 * first.p99_seconds,
        "late_context": last.context,
        "late_step_ms": 1000 * last.step_seconds,
        "prompt_tokens_per_second": job.sequences * job.num_input / (prompts_end - began),
    }


def _first_token_seconds(llm: LLM, num_input: int, vocab: int, seed: int, number: int) -> float:
    """The median of so many lone prompts, one after another."""
    one = [SamplingParams(max_tokens=1, ignore_eos=True)]
    prompts = [requests(Job(1, num_input, 1), vocab, seed=seed + i)[0] for i in range(number)]
    return statistics.median(_run(llm, prompt, one) for prompt in prompts)


def _record_graphs(llm: LLM) -> None:
    """A server does so in its first idle seconds; in the middle of a job it would be part of its time."""
    executor: Any = llm._executor
    executor.record_graphs()


class _Loading:
    """When the weights were there."""

    def __enter__(self) -> _Loading:
        self._began = self._loaded = time.perf_counter()
        self._load = _WORKER.load_model

        def timed(*arguments: Any, **options: Any) -> Any:
            model = self._load(*arguments, **options)
            self._loaded = time.perf_counter()
            return model

        _WORKER.load_model = timed
        return self

    def __exit__(self, *_: object) -> None:
        _WORKER.load_model = self._load
        now = time.perf_counter()
        self.start, self.after_weights = now - self._began, now - self._loaded


def requests(job: Job, vocab: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, and how many tokens each shall get."""
    sizes = {"num_seqs": job.sequences, "seed": seed}
    if job.is_shared:
        items = workloads.shared(vocab, longest=job.num_input, **sizes)
    else:
        items = workloads.fixed(min(vocab, 10_000), num_input=job.num_input, num_output=job.num_output, **sizes)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=item.max_tokens) for item in items]
    return [item.prompt_token_ids for item in items], params


def _run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began
