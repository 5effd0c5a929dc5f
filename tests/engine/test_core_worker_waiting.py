"""Nothing that a step launches on a GPU waits for it: watched over Triton's interpreter, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels.backend import KernelBackend
from novainfer.config import ModelConfig
from tests.builders import CPU, PlanWriter, make_runner
from tests.parity.builders import build_checkpoint
from workers import logprobs
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0


class NoWaiting(TorchDispatchMode):
    """Refuses operations that need a value, or a size, from the device, and those that bring a plain number there."""

    def __init__(self, *, brings_arrays: bool) -> None:
        """brings_arrays: copies of arrays to the device are fine, since `to_device` does not wait."""
        super().__init__()
        self._brings_arrays = brings_arrays
        self.num_seen = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags))
        if op is torch.ops.aten.index.Tensor:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if op is torch.ops.aten.lift_fresh.default:
            waits = not self._brings_arrays or args[0].ndim == 0
        assert not waits, f"{op} waits"
        self.num_seen += 1
        return op(*args, **(kwargs or {}))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> KernelBackend:
    """Triton's kernels, whose interpreter is not watched."""
    pytest.importorskip("triton")
    from triton.runtime.interpreter import GridExecutor

    from kernels.triton_backend import TritonBackend
    from kernels.triton_launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("Triton compiles for a GPU here; the interpreter is what runs on a CPU")
    launch = GridExecutor.__call__

    def unwatched(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", unwatched)
    return TritonBackend(CPU, exact=True)


def load(family: str, folder: Path, kernels: KernelBackend, **fields: Any) -> CausalLM:
    config = ModelConfig(model=str(build_checkpoint(family, folder / family, "bfloat16")), **fields)
    return load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {}),
        ("gemma3", {}),
        ("phi3_longrope", {}),
        ("llama_dynamic", {"quantization": "int4"}),
        ("qwen2", {"quantization": "fp8"}),
    ],
)
def test_steps_that_are_recorded_when_called_then_nothing_in_them_waits_or_comes_from_the_host(
    family: str, fields: dict[str, Any], triton: KernelBackend, tmp_path: Path
) -> None:
    watched: list[int] = []

    def record(call: Callable[[], None]) -> Callable[[], None]:
        call()
        with NoWaiting(brings_arrays=False) as mode:
            call()
        watched.append(mode.num_seen)
        return call

    model = load(family, tmp_path, triton, **fields)
    assert model.is_static
    runner = make_runner(model, triton, record=record, max_num_seqs=1, max_num_batched_tokens=16)
    while runner.use_idle_time():
        pass
    assert len(watched) == 3  # a decode, its sample, and a step of sixteen tokens
    assert min(watched) > 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {3: 2.0}, "banned_token_ids": (4,), "min_tokens": 3, "stop_token_ids": [5]},
        {"allowed_token_ids": (1, 2, 3)},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
    ],
)
def test_steps_of_rows_that_ask_for_more_when_launched_then_nothing_waits(
    fields: dict[str, Any], triton: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "top_ids_of", logprobs.top_ids_by_key)  # as on a GPU
    runner, writer = make_runner(load("qwen3", tmp_path, triton), triton), PlanWriter()
    writer.add(0, list(range(1, 20)), **fields)
    for plan in (writer.plan({0: 12}), writer.plan({0: 7}), writer.plan({0: 1}), writer.plan({0: 1})):
        with NoWaiting(brings_arrays=True) as mode:
            pending = runner.launch(plan)
        assert pending is not None
        assert len(pending.finish().token_ids) == (plan.step > 0)
        assert mode.num_seen > 20


def test_no_waiting_when_a_value_or_a_size_or_a_number_is_needed_then_refused() -> None:
    numbers = torch.arange(3)

    def assign() -> None:
        numbers[numbers.clone()] = 7

    for needy in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], lambda: numbers.nonzero(), assign):
        with NoWaiting(brings_arrays=True), pytest.raises(AssertionError, match="waits"):
            needy()
    with NoWaiting(brings_arrays=True):
        numbers[torch.from_numpy(numbers.numpy())]
    with NoWaiting(brings_arrays=False), pytest.raises(AssertionError, match="waits"):
        torch.tensor([1, 2])
