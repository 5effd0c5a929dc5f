"""Whole offline jobs for `bench.gpu`: through scheduler, workers and sampler, as `LLM.generate` runs them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_peers import transformers_seconds
from novainfer import LLM, SamplingParams
from workers import worker

_PROFILED = 64  # tokens of each sequence
_WORKER: Any = worker
_AUTOGRAD: Any = torch.autograd


@dataclass(frozen=True, slots=True)
class Job:
    """So many sequences at once. least_input: prompts are between that and num_input tokens long, likewise outputs."""

    sequences: int
    num_input: int
    num_output: int
    least_input: int | None = None


# The last is the workload that nano-vllm and mini-sglang report: lengths of 100 to 1024, seed 0.
JOBS: dict[str, Job] = {
    "1 x (1024 -> 128)": Job(1, 1024, 128),
    "64 x (1024 -> 128)": Job(64, 1024, 128),
    "256 x (1024 -> 1024)": Job(256, 1024, 1024),
    "256 of 100 to 1024": Job(256, 1024, 1024, 100),
}
TOY_JOBS: dict[str, Job] = {"2 x (6 -> 3)": Job(2, 6, 3)}
_TOY_OPTIONS = {"device": "cpu", "kernel_backend": "triton", "max_model_len": 64, "num_blocks": 32, "max_num_seqs": 2,
                "max_num_batched_tokens": 64}  # fmt: skip


def run_job(
    model: str, jobs: dict[str, Job], deterministic: bool, is_toy: bool
) -> Iterator[tuple[str, dict[str, float]]]:
    """Name and figures of each, with one engine.

    Start: seconds until the engine is ready, in all and from when the weights were there. busy: see `busy_share`.
    """
    options: dict[str, Any] = _TOY_OPTIONS if is_toy else {"device": "cuda", "max_model_len": 4096, "max_num_seqs": 256}
    with _Loading() as loading:
        llm = LLM(model, deterministic=deterministic, **options)
    with llm:
        vocab = llm.tokenizer.vocab_size
        began = time.perf_counter()
        _record_graphs(llm)
        graph_seconds = time.perf_counter() - began
        for name, job in jobs.items():
            prompts, params = requests(job, vocab)
            _run(llm, prompts, [SamplingParams(max_tokens=2, ignore_eos=True) for _ in params])  # warms up
            whole = _run(llm, *requests(job, vocab, seed=1))
            tokens = sum(one.max_tokens for one in params)
            figures = {"seconds": whole, "tokens_per_second": tokens / whole}
            figures |= {"start_seconds": loading.start, "after_weights_seconds": loading.after_weights}
            figures["graph_seconds"] = graph_seconds
            if job.least_input is None:
                fresh, _ = requests(job, vocab, seed=2)
                first = _run(llm, fresh, [SamplingParams(max_tokens=1, ignore_eos=True) for _ in params])
                figures["step_ms"] = 1000 * (whole - first) / max(job.num_output - 1, 1)
                figures["prompt_tokens_per_second"] = job.sequences * job.num_input / first
                figures["busy"] = busy_share(llm, requests(job, vocab, seed=3)[0], min(job.num_output, _PROFILED))
            yield name, figures


def _record_graphs(llm: LLM) -> None:
    """A server does so in its first idle seconds; in the middle of a job it would be part of its time."""
    executor: Any = llm._executor
    executor.record_graphs()


def run_transformers(model: str, device: torch.device) -> tuple[str, dict[str, float]]:
    """A small job by transformers' continuous batching; no figures where it cannot do it."""
    name, job = ("2 x (6 -> 3)", Job(2, 6, 3)) if device.type == "cpu" else ("64 x (1024 -> 128)", Job(64, 1024, 128))
    prompts, _ = requests(job, vocab=100 if device.type == "cpu" else 10_000)
    try:
        seconds = transformers_seconds(model, prompts, job.num_output, device)
    except Exception as error:  # of a version that we do not know, or without a kernel: it is not ours
        print(f"transformers is left out: {type(error).__name__}: {error}")
        return name, {}
    return name, {"seconds": seconds, "tokens_per_second": job.sequences * job.num_output / seconds}


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


def busy_share(llm: LLM, prompts: list[list[int]], num_output: int) -> float:
    """The part of the time in which the GPU runs some kernel, while all of these sequences decode; NaN without one."""
    if not torch.cuda.is_available():
        return float("nan")
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_output) for _ in prompts]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _run(llm, prompts, params)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == _AUTOGRAD.DeviceType.CUDA
    )
    return covered(spans[len(spans) // 2 : len(spans) * 9 // 10])  # prompts first, and at the end steps run dry


def covered(spans: list[tuple[float, float]]) -> float:
    """The part of the time from the first one's start to the last one's end in which at least one of them is on."""
    if not spans:
        return float("nan")
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return busy / (end - spans[0][0])


def requests(job: Job, vocab: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, and how many tokens each shall get."""
    rng = random.Random(seed)
    least_output = job.num_output if job.least_input is None else job.least_input
    lengths = [rng.randint(job.least_input or job.num_input, job.num_input) for _ in range(job.sequences)]
    prompts = [[rng.randrange(min(vocab, 10_000)) for _ in range(length)] for length in lengths]
    outputs = [rng.randint(least_output, job.num_output) for _ in range(job.sequences)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in outputs]


def _run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began
