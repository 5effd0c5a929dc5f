"""What an offline engine's steps are and how long they take: by its plans, and by the kernels that a profiler sees.

A step counts as a decode only if all sequences of the job are in it, each with one token behind its whole prompt: what
is reported of decodes has no prompt in it, and no step that runs dry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from bench.report import percentile
from novainfer import LLM, SamplingParams
from novainfer.protocol.step import StepPlan

FIRST_KERNEL, LAST_KERNEL = "_inputs_kernel", "_append_kernel"  # of each decode that is recorded as graphs
_AUTOGRAD: Any = torch.autograd
_WARM_UP_STEPS = 16  # under the profiler before those that count: its start has stopped the device


class NotDecodesError(RuntimeError):
    """What was to be decodes alone had other steps among them: the figures would be of something else."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a plan asked for, and when its result was there."""

    is_decode: bool  # of all sequences, and of nothing else
    context: float  # tokens that a row sees, on average
    ended: float  # of time.perf_counter()


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decodes one after another without any other step between them. Seconds."""

    context: float  # mean
    step_seconds: float  # mean
    p99_seconds: float


@dataclass
class Watch:
    """The plans of an engine in their order, and when each was answered; read afterwards, so that it costs nothing."""

    plans: list[StepPlan] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def steps(self, num_sequences: int) -> list[Step]:
        """Of a job of so many sequences, each step that was answered."""
        computed: dict[int, int] = {}
        prompts: dict[int, int] = {}
        found = []
        for plan, ended in zip(self.plans, self.ends, strict=False):
            for new in plan.new_rows:
                computed[new.row], prompts[new.row] = new.num_computed_tokens, new.prompt_len
            is_decode = len(plan.rows) == num_sequences
            for row, count in zip(plan.rows, plan.num_new_tokens, strict=True):
                is_decode &= count == 1 and computed[row] >= prompts[row]
                computed[row] += count
            found.append(Step(is_decode, sum(computed[row] for row in plan.rows) / max(len(plan.rows), 1), ended))
        return found


@contextmanager
def watched(llm: LLM) -> Iterator[Watch]:
    """See `Watch`: what this engine does meanwhile."""
    executor: Any = llm._executor
    watch, submit, collect = Watch(), executor.submit, executor.collect

    def submitted(plan: StepPlan) -> None:
        watch.plans.append(plan)
        submit(plan)

    def collected(timeout: float | None) -> Any:
        result = collect(timeout)
        if result is not None:
            watch.ends.append(time.perf_counter())
        return result

    executor.submit, executor.collect = submitted, collected
    try:
        yield watch
    finally:
        executor.submit, executor.collect = submit, collect


def longest_run(steps: Sequence[Step]) -> list[Step]:
    """Of decodes without any other step between them."""
    first = best = best_length = 0
    for i, step in enumerate(steps):
        if not step.is_decode:
            first = i + 1
        elif i + 1 - first > best_length:
            best, best_length = first, i + 1 - first
    return list(steps[best : best + best_length])


def decodes(steps: Sequence[Step]) -> Decodes | None:
    """How long steps take of which the first, whose beginning nobody saw, only says when the second began."""
    times = [after.ended - before.ended for before, after in pairwise(steps)]
    if not times:
        return None
    context = sum(step.context for step in steps[1:]) / len(times)
    return Decodes(context, sum(times) / len(times), percentile(times, 99))


def decode_gaps(llm: LLM, prompts: Sequence[list[int]], num_steps: int, wait: Callable[[], None]) -> dict[str, float]:
    """Of so many decodes of all these sequences: `busy`, the share of the time in which the GPU runs some kernel, and
    microseconds for which it runs none between two steps. Without a GPU the steps are run, and nothing is said.

    Raises `NotDecodesError` if any other step was among them.
    """
    limits = llm._executor.info
    most = limits.max_model_len - max(len(prompt) for prompt in prompts)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=most)
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    try:
        with watched(llm) as watch:
            while not (watch.ends and watch.steps(len(ids))[-1].is_decode):
                llm.step()
            first = len(watch.ends)
            warm_up = min(_WARM_UP_STEPS, num_steps)
            spans = _profiled(lambda: [llm.step() for _ in range(warm_up + num_steps)], wait)
            others = [step for step in watch.steps(len(ids))[first:] if not step.is_decode]
    finally:
        for request_id in ids:
            llm.cancel(request_id)
        while not llm._engine.is_idle:
            llm.step()
    if others:
        raise NotDecodesError(f"{len(others)} of {warm_up + num_steps} steps were no decodes of {len(ids)} sequences")
    return {} if spans is None else gap_figures(spans)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Something that the GPU did. Microseconds."""

    start: float
    stop: float
    name: str = ""


def gap_figures(spans: Sequence[Span]) -> dict[str, float]:
    """Of spans in the order of their starts, without the first steps."""
    begins = [i for i, span in enumerate(spans) if span.name.startswith(FIRST_KERNEL)]
    if len(begins) <= _WARM_UP_STEPS + 1:  # not recorded as graphs
        return {"busy": covered(spans)}
    spans = spans[begins[_WARM_UP_STEPS] : begins[-1] + 1]
    figures, gaps = {"busy": covered(spans)}, idle_gaps(spans)
    if gaps:  # else no step's end was found, and 0 would look perfect
        figures |= {"gaps": len(gaps), "gap_us_p50": percentile(gaps, 50), "gap_us_p99": percentile(gaps, 99)}
    return figures


def idle_gaps(spans: Sequence[Span]) -> list[float]:
    """For how long nothing ran between the last kernel of one step and the first of the next. Microseconds."""
    gaps = []
    idle: float | None = None  # so far, while a step has ended and none begun
    end = float("-inf")
    for span in spans:
        if idle is not None:
            idle += max(span.start - end, 0.0)
        end = max(end, span.stop)
        if idle is not None and span.name.startswith(FIRST_KERNEL):
            gaps.append(idle)
            idle = None
        if span.name.startswith(LAST_KERNEL):
            idle = 0.0
    return gaps


def covered(spans: Sequence[Span]) -> float:
    """The part of the time from the first one's start to the last one's end in which at least one of them is on."""
    if not spans:
        return float("nan")
    busy, end = 0.0, spans[0].start
    for span in spans:
        busy += max(span.stop - max(span.start, end), 0.0)
        end = max(end, span.stop)
    return busy / (end - spans[0].start)


def _profiled(call: Callable[[], object], wait: Callable[[], None]) -> list[Span] | None:
    """What the GPU does meanwhile, in order; None where there is none, or no profiler."""
    if not torch.cuda.is_available():
        call()
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        wait()
    events = [event for event in profile.events() or [] if event.device_type == _AUTOGRAD.DeviceType.CUDA]
    return sorted(Span(event.time_range.start, event.time_range.end, event.name) for event in events)
