"""How large a step may be where nobody says."""

from __future__ import annotations

import pytest
import torch

from novainfer.config import SchedulerConfig
from workers.models.spec import ModelSpec
from workers.step_tokens import step_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def shape(hidden_size: int, num_layers: int) -> ModelSpec:
    return ModelSpec(
        architecture="any",
        dtype=torch.float32,
        vocab_size=1000,
        hidden_size=hidden_size,
        num_heads=8,
        num_kv_heads=8,
        head_dim=hidden_size // 8,
        max_position=4096,
        sliding_windows=(None,) * num_layers,
    )


@pytest.mark.parametrize(
    ("spec", "num_threads", "expected"),
    [(shape(256, 4), 2, 2048), (shape(1024, 28), 2, 256), (shape(1024, 28), 8, 768), (shape(4096, 36), 16, 256)],
)
def test_a_cpu_when_nothing_is_said_then_a_step_is_as_large_as_it_computes_soon(
    spec: ModelSpec, num_threads: int, expected: int
) -> None:
    assert step_tokens(SchedulerConfig(), spec, CPU, num_threads) == expected


def test_a_gpu_when_nothing_is_said_then_a_step_is_large() -> None:
    assert step_tokens(SchedulerConfig(), shape(4096, 36), GPU, 2) == 2048


def test_more_sequences_than_such_a_step_has_tokens_when_nothing_is_said_then_each_has_its_token() -> None:
    assert step_tokens(SchedulerConfig(max_num_seqs=300), shape(4096, 36), CPU, 2) == 300


def test_a_number_when_it_is_said_then_it_holds() -> None:
    assert step_tokens(SchedulerConfig(max_num_batched_tokens=64), shape(256, 4), CPU, 2) == 64
