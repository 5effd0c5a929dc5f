"""Steps as recorded calls, here without a GPU: what a graph would do again, a function does again.

What is tested is all but CUDA: which steps a graph takes, over memory that stays where it is, padded, and that nothing
of a row's tokens depends on that. On the CPU's kernels a row's bits depend on the row alone, so tokens must be equal.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.backend import KernelBackend, select_backend
from novainfer.config import ModelConfig
from novainfer.protocol.step import StepPlan
from tests.builders import CPU, PlanWriter, execute, generate, limits, make_runner
from tests.parity.builders import build_checkpoint
from workers.decode_graphs import graph_sizes
from workers.graphs import cuda_recorder
from workers.model_runner import ModelRunner
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.step_graphs import token_sizes
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

PROMPTS = [[(7 * i * i + 3 * i + row) % 251 for i in range(3 + 11 * row)] for row in range(5)]
FIELDS: list[dict[str, object]] = [
    {"temperature": 1.0, "top_p": 0.95, "seed": 12345},
    {},
    {"temperature": 0.8, "seed": -3 + 2**63, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.2, "seed": 9, "choice": 3},
    {"temperature": 0.7, "seed": 1},
]
PENALISED = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5}


class Recorder:
    """Calls again what was recorded, and counts."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.replayed: list[str] = []

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        name = getattr(call, "__name__", "")
        self.recorded.append(name)
        call()

        def replay() -> None:
            self.replayed.append(name)
            call()

        return replay

    @property
    def decodes(self) -> list[str]:
        """Calls of steps that only decode."""
        return [name for name in self.replayed if name != "forward"]

    @property
    def num_forwards(self) -> int:
        """Steps of other kinds."""
        return self.replayed.count("forward")


STEP_TOKENS = limits().max_num_batched_tokens
EVERY_GRAPH = ["compute", "sample"] * len(graph_sizes(8)) + ["forward"] * len(token_sizes(STEP_TOKENS))


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return select_backend(CPU)


@pytest.fixture(scope="module")
def model(kernels: KernelBackend, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = build_checkpoint("qwen3", tmp_path_factory.mktemp("graphs") / "qwen3", "bfloat16")
    return load_model(ModelConfig(model=str(folder)), tp=TensorParallel.single(), kernels=kernels, device=CPU)


def with_graphs(
    model: CausalLM, kernels: KernelBackend, count: int = 99, **limits: int
) -> tuple[ModelRunner, Recorder]:
    """A runner that has had the time to record so many."""
    recorder = Recorder()
    runner = make_runner(model, kernels, record=recorder, **limits)
    for _ in range(count):
        runner.use_idle_time()
    return runner, recorder


def test_traffic_when_its_decodes_are_graphs_then_every_row_has_the_tokens_of_a_run_alone(
    model: CausalLM, kernels: KernelBackend
) -> None:
    alone = []
    for prompt, fields in zip(PROMPTS, FIELDS, strict=True):
        writer = PlanWriter()
        writer.add(0, prompt, **fields)
        alone.append(generate(make_runner(model, kernels), writer, 0, 15))
    runner, recorder = with_graphs(model, kernels)
    assert recorder.recorded == EVERY_GRAPH
    writer = PlanWriter()
    got: dict[int, list[int]] = {row: [] for row in range(5)}
    for row in range(5):  # each joins while the others decode: a mixed step, then two of decodes alone
        writer.add(row + 2, PROMPTS[row], **FIELDS[row])
        for work in ({row + 2: len(PROMPTS[row])}, {}, {}):
            decodes = dict.fromkeys((old + 2 for old in range(row + (not work))), 1)
            result = execute(runner, writer.plan(decodes | work))
            for place, token in zip(result.rows, result.token_ids, strict=True):
                got[place - 2].append(token)
    assert recorder.decodes == ["compute", "sample"] * 10
    assert recorder.num_forwards == 5
    assert [len(tokens) for tokens in got.values()] == [15, 12, 9, 6, 3]
    assert list(got.values()) == [tokens[: len(got[row])] for row, tokens in enumerate(alone)]


def test_rows_with_penalties_or_logprobs_when_decoded_then_their_logits_come_from_the_graph_and_are_sampled_as_ever(
    model: CausalLM, kernels: KernelBackend
) -> None:
    def run(runner: ModelRunner) -> list[object]:
        writer = PlanWriter()
        writer.add(0, PROMPTS[2], **PENALISED)
        writer.add(1, PROMPTS[3], logprobs=3, **FIELDS[3])
        plans = [writer.plan({0: len(PROMPTS[2]), 1: len(PROMPTS[3])}), *(writer.plan({0: 1, 1: 1}) for _ in range(4))]
        results = [execute(runner, plan) for plan in plans]
        return [(result.rows, result.token_ids, result.logprobs) for result in results]

    runner, recorder = with_graphs(model, kernels)
    assert run(runner) == run(make_runner(model, kernels))
    assert recorder.decodes == ["compute"] * 4


def test_steps_that_are_no_plain_decodes_when_planned_then_no_graph_of_decodes_takes_them(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, recorder = with_graphs(model, kernels)
    writer = PlanWriter()
    writer.add(0, PROMPTS[1])
    writer.add(1, [5, 6], prompt_logprobs=1)
    plans: list[StepPlan] = [
        writer.plan({0: 1}),  # one token of a longer prompt
        writer.plan({0: len(PROMPTS[1]) - 1}),
        writer.plan({0: 1, 1: 2}),  # a prompt of two
    ]
    for plan in plans:
        execute(runner, plan)
    assert recorder.replayed == ["forward"] * 3
    execute(runner, writer.plan({0: 1, 1: 1}))  # nothing of the prompt is left to report
    assert recorder.decodes == ["compute", "sample"]


def test_no_idle_time_when_a_size_is_wanted_often_then_it_is_recorded_and_a_larger_one_serves_meanwhile(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, recorder = with_graphs(model, kernels, 1)
    assert recorder.recorded == ["compute", "sample"]  # the largest
    writer = PlanWriter()
    writer.add(0, PROMPTS[0], **FIELDS[0])
    runner_alone, alone = make_runner(model, kernels), PlanWriter()
    alone.add(0, PROMPTS[0], **FIELDS[0])
    assert generate(runner, writer, 0, 40) == generate(runner_alone, alone, 0, 40)
    assert recorder.recorded == ["compute", "sample"] * 2
    assert recorder.replayed == ["compute", "sample"] * 39


def left_early() -> RuntimeError:
    """As a capture ends in which the driver found no memory."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = torch.AcceleratorError("CUDA error: out of memory")
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none is left"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        left_early(),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:40],
)
def test_no_memory_for_a_graph_when_recorded_then_steps_run_without(
    error: RuntimeError, model: CausalLM, kernels: KernelBackend
) -> None:
    calls = []

    def record(call: Callable[[], None]) -> Callable[[], None]:
        calls.append(call)
        raise error

    runner, writer = make_runner(model, kernels, record=record), PlanWriter()
    writer.add(0, PROMPTS[0], **FIELDS[0])
    runner.use_idle_time()
    alone = PlanWriter()
    alone.add(0, PROMPTS[0], **FIELDS[0])
    assert generate(runner, writer, 0, 40) == generate(make_runner(model, kernels), alone, 0, 40)
    while runner.use_idle_time():
        pass
    assert len(calls) == 2  # one of each kind


def test_a_graph_that_fails_for_another_reason_when_recorded_then_it_is_raised(
    model: CausalLM, kernels: KernelBackend
) -> None:
    def record(call: Callable[[], None]) -> Callable[[], None]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal"):
        make_runner(model, kernels, record=record).use_idle_time()


def test_a_capture_that_fails_at_its_end_when_left_then_the_stream_is_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, current, collects = SimpleNamespace(), [], []

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        collects.append(gc.isenabled())
        yield
        raise RuntimeError("CUDA error: out of memory")

    side = SimpleNamespace(wait_stream=lambda stream: None, synchronize=lambda: None)
    fakes = {
        "graph_pool_handle": lambda: None,
        "Stream": lambda device: side,
        "current_stream": lambda device: before,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": capture,
        "set_stream": current.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_recorder(CPU)(lambda: None)
    assert current == [before]
    assert (collects, gc.isenabled()) == ([False], True)  # an older graph that was collected would end the capture


def test_rows_in_use_when_graphs_are_recorded_then_they_go_on_as_if_nothing_had_been(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, recorder = with_graphs(model, kernels, 0)
    writer, alone = PlanWriter(), PlanWriter()
    writer.add(0, PROMPTS[2], **FIELDS[0])
    alone.add(0, PROMPTS[2], **FIELDS[0])
    tokens = generate(runner, writer, 0, 3)
    while runner.use_idle_time():  # rows that have ended are freed by the next plan: they are in use meanwhile
        pass
    tokens += generate(runner, writer, 0, 5)
    assert tokens == generate(make_runner(model, kernels), alone, 0, 8)
    assert recorder.recorded == EVERY_GRAPH
    assert recorder.replayed == ["compute", "sample"] * 5


def test_a_poisoned_row_when_decoded_by_a_graph_then_it_alone_is_bad(model: CausalLM, kernels: KernelBackend) -> None:
    runner, recorder = with_graphs(model, kernels)
    writer = PlanWriter()
    writer.add(0, PROMPTS[3])
    writer.add(1, PROMPTS[4])
    execute(runner, writer.plan({0: len(PROMPTS[3]), 1: len(PROMPTS[4])}))
    blocks = runner.states.block_table[0, :3].long()
    for key_cache, _ in runner.cache.layers:
        key_cache[blocks] = math.nan
    result = execute(runner, writer.plan({0: 1, 1: 1}))
    assert (result.bad_rows, recorder.decodes) == ([0], ["compute", "sample"])


@pytest.mark.parametrize("most", [1, 3, 8, 60, 64, 100, 256])
def test_sizes_when_chosen_then_they_ascend_to_the_most(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)


@pytest.mark.parametrize("most", [1, 9, 16, 64, 100, 512, 2048, 8192])
def test_sizes_of_steps_with_prompts_when_chosen_then_they_ascend_and_little_is_computed_for_nobody(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 2048)
    assert all(after - before <= max(16, before / 4) for before, after in pairwise(sizes))


def test_prompts_in_chunks_beside_decodes_when_graphs_run_them_then_tokens_and_logprobs_are_those_of_other_steps(
    model: CausalLM, kernels: KernelBackend
) -> None:
    def run(runner: ModelRunner) -> list[object]:
        writer = PlanWriter()
        writer.add(4, PROMPTS[4], prompt_logprobs=2, **FIELDS[0])
        writer.add(1, PROMPTS[3], logprobs=3, **FIELDS[3])
        plans = [writer.plan({1: len(PROMPTS[3])}), writer.plan({1: 1, 4: 20})]
        writer.add(0, PROMPTS[0], **PENALISED)
        plans += [writer.plan({1: 1, 4: 20, 0: len(PROMPTS[0])}), writer.plan({1: 1, 0: 1, 4: len(PROMPTS[4]) - 40})]
        results = [execute(runner, plan) for plan in plans]
        return [(result.rows, result.token_ids, result.logprobs, result.prompt_logprobs) for result in results]

    runner, recorder = with_graphs(model, kernels)
    assert run(runner) == run(make_runner(model, kernels))
    assert recorder.num_forwards == 4


def test_a_prompt_when_only_much_larger_graphs_are_there_then_it_runs_without(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, recorder = with_graphs(model, kernels, len(graph_sizes(8)) + 1, max_num_batched_tokens=64)
    assert recorder.recorded.count("forward") == 1  # the largest
    writer = PlanWriter()
    writer.add(0, PROMPTS[1])
    writer.add(1, PROMPTS[4])
    execute(runner, writer.plan({0: len(PROMPTS[1])}))  # 14 tokens
    assert recorder.num_forwards == 0
    execute(runner, writer.plan({1: len(PROMPTS[4])}))  # 47
    assert recorder.num_forwards == 1


def test_what_was_never_written_when_tokens_are_nobodys_then_it_is_no_id(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, recorder = with_graphs(model, kernels, 0)
    runner.states.token_ids.fill_(2**31 - 1)
    while runner.use_idle_time():  # an embedding of such an id would raise
        pass
    assert recorder.recorded == EVERY_GRAPH
