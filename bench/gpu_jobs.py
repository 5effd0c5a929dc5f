"""Whole offline jobs for `bench.gpu`: through scheduler, workers and sampler, as `LLM.generate` runs them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from novainfer import LLM, SamplingParams


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
    """Name and figures of each, with one engine. Start: seconds until the engine is ready."""
    options: dict[str, Any] = _TOY_OPTIONS if is_toy else {"device": "cuda", "max_model_len": 4096, "max_num_seqs": 256}
    began = time.perf_counter()
    with LLM(model, deterministic=deterministic, **options) as llm:
        start = time.perf_counter() - began
        vocab = llm.tokenizer.vocab_size
        for name, job in jobs.items():
            prompts, params = requests(job, vocab)
            _run(
                llm, prompts, [SamplingParams(max_tokens=1, ignore_eos=True) for _ in params]
            )  # warms up, and its prompts
            whole = _run(llm, *requests(job, vocab, seed=1))
            tokens = sum(one.max_tokens for one in params)
            figures = {"seconds": whole, "tokens_per_second": tokens / whole, "start_seconds": start}
            if job.least_input is None:
                fresh, _ = requests(job, vocab, seed=2)
                first = _run(llm, fresh, [SamplingParams(max_tokens=1, ignore_eos=True) for _ in params])
                figures["step_ms"] = 1000 * (whole - first) / max(job.num_output - 1, 1)
                figures["prompt_tokens_per_second"] = job.sequences * job.num_input / first
            yield name, figures


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
