"""The in-process executor keeps the contract of `Executor`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import ConfigError, EngineError
from novainfer.protocol.columns import column
from novainfer.protocol.step import StepPlan, StepResult
from tests.builders import PlanWriter
from workers import worker as worker_module
from workers.local_executor import LocalExecutor
from workers.model_runner import ModelRunner, PendingStep

pytestmark = pytest.mark.stage1

CONFIG = ServeConfig(
    model=ModelConfig(max_model_len=64),
    cache=CacheConfig(num_blocks=8),
    scheduler=SchedulerConfig(max_num_seqs=2),
    parallel=ParallelConfig(device="cpu"),
)


def test_two_steps_when_in_flight_then_results_come_in_order_and_equal_those_one_by_one() -> None:
    stages: list[str] = []
    executor = LocalExecutor(CONFIG, epoch=3, progress=lambda stage, done, total: stages.append(stage))
    writer = PlanWriter(epoch=3)
    writer.add(0, [5, 6, 7])
    executor.submit(writer.plan({0: 3}))
    executor.submit(writer.plan({0: 1}))
    first, second = executor.collect(None), executor.collect(0)
    assert first is not None
    assert second is not None
    assert (first.step, second.step, executor.collect(None)) == (0, 1, None)
    writer.add(1, [5, 6, 7, *first.token_ids], prompt_len=3)
    executor.submit(writer.plan({1: 4}))
    again = executor.collect(None)
    assert again is not None
    assert again.token_ids == second.token_ids
    assert (executor.info.epoch, executor.info.num_blocks, executor.info.max_model_len) == (3, 8, 64)
    assert set(stages) == {"weights", "kv cache", "warm-up"}
    with pytest.raises(EngineError, match="epoch 1"):
        executor.submit(StepPlan(epoch=1, step=3, rows=column(), num_new_tokens=column()))
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.submit(StepPlan(epoch=3, step=3, rows=column(), num_new_tokens=column()))
    assert executor.collect(None) is None


def test_a_device_that_works_on_its_own_when_two_plans_wait_then_both_are_launched_before_the_first_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    launch, finish = ModelRunner.launch, PendingStep.finish

    def noting_launch(runner: ModelRunner, plan: StepPlan) -> PendingStep | None:
        events.append(f"launch {plan.step}")
        return launch(runner, plan)

    def noting_finish(pending: PendingStep) -> StepResult:
        events.append(f"finish {pending.plan.step}")
        return finish(pending)

    executor = LocalExecutor(CONFIG)
    assert executor._worker is not None
    monkeypatch.setattr(executor, "_worker", replace(executor._worker, max_launched=2))
    monkeypatch.setattr(ModelRunner, "launch", noting_launch)
    monkeypatch.setattr(PendingStep, "finish", noting_finish)
    writer = PlanWriter()
    writer.add(0, [5, 6, 7])
    for count in (3, 1, 1):
        executor.submit(writer.plan({0: count}))
    assert [executor.collect(None) is None for _ in range(4)] == [False, False, False, True]
    assert events == ["launch 0", "launch 1", "finish 0", "launch 2", "finish 1", "finish 2"]
    executor.close()


def test_several_ranks_when_asked_for_in_process_then_config_error() -> None:
    with pytest.raises(ConfigError, match="one rank"):
        LocalExecutor(ServeConfig(parallel=ParallelConfig(tensor_parallel_size=2)))


def test_a_worker_with_graphs_when_closed_then_its_memory_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []

    def record(call: Callable[[], None]) -> Callable[[], None]:
        call()
        return call

    monkeypatch.setattr(worker_module, "has_graphs", lambda config, model, device: True)
    monkeypatch.setattr(worker_module, "cuda_recorder", lambda device: record)
    executor = LocalExecutor(CONFIG)
    executor.record_graphs()
    assert executor._worker is not None
    cache = weakref.ref(executor._worker.cache)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(cache() is None))
    gc.disable()
    try:
        executor.close()
    finally:
        gc.enable()
    assert emptied == [True]
