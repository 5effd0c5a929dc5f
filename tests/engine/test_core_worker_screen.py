"""A runner whose tokens are picked from few logits: the demo model's head is screened, and no token changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kernels.backend import KernelBackend, Linear, MakeSampling
from kernels.cpu_backend import CpuBackend
from kernels.linear.schemes import WeightScheme
from kernels.native.library import load_library
from kernels.weights import Deferred
from novainfer.config import DEMO_MODEL, ModelConfig
from tests.builders import CPU, PlanWriter, execute, make_runner
from tests.parity.builders import build_checkpoint
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

PROMPTS = [[(7 * i * i + 3 * i + row) % 600 + 5 for i in range(9 + 4 * row)] for row in range(4)]
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.9, "seed": 77}
NEEDS_ALL = {"temperature": 0.9, "seed": 78, "top_p": 0.8}


class WholeHeads(CpuBackend):
    """Computes all logits."""

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        return self.pack_linear(weight, None, scheme)


class CountedPicks(CpuBackend):
    """Counts the rows that were picked."""

    num_picked = 0

    def pick(self, head: Linear, x: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        picked = super().pick(head, x, params)
        self.num_picked += 0 if picked is None else len(x)
        return picked


def demo(kernels: KernelBackend, quantization: str) -> CausalLM:
    config = ModelConfig(model=DEMO_MODEL, quantization=quantization)
    return load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


def run(kernels: KernelBackend, rows: list[dict[str, Any]], count: int, quantization: str = "none") -> list[list[int]]:
    """Rows that start one after the other, each a step later."""
    runner, writer = make_runner(demo(kernels, quantization), kernels), PlanWriter()
    got: list[list[int]] = [[] for _ in rows]
    for step in range(count):
        work = dict.fromkeys(range(min(step, len(rows))), 1)
        if step < len(rows):
            writer.add(step, PROMPTS[step], **rows[step])
            work[step] = len(PROMPTS[step])
        result = execute(runner, writer.plan(work))
        for row, token_id in zip(result.rows, result.token_ids, strict=True):
            got[row].append(token_id)
    return got


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_rows_when_picked_from_few_logits_then_tokens_are_those_of_all(quantization: str) -> None:
    rows, kernels = [GREEDY, SAMPLED, GREEDY, SAMPLED], CountedPicks()
    assert run(kernels, rows, 40, quantization) == run(WholeHeads(), rows, 40, quantization)
    picks = quantization == "none" or load_library().isa in ("amxbf16", "avx512bf16")
    assert kernels.num_picked > 60 if picks else kernels.num_picked == 0


def test_rows_beside_one_that_needs_all_logits_when_sampled_then_tokens_are_the_same() -> None:
    rows, kernels = [GREEDY, SAMPLED, NEEDS_ALL], CountedPicks()
    got = run(kernels, rows, 20)
    assert got == run(WholeHeads(), rows, 20)
    assert 0 < kernels.num_picked < 10  # before that one came
    assert got[:2] == run(kernels, rows[:2], 20)


class CountedHeads(CpuBackend):
    """Counts the heads that are packed to be picked from."""

    num_heads = 0

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        self.num_heads += 1
        return super().pack_head(weight, scheme)


@pytest.mark.parametrize(("family", "num_heads"), [("qwen3", 1), ("gemma2", 0), ("granite", 0)])
def test_model_that_changes_its_logits_when_loaded_then_its_head_is_packed_once(
    family: str, num_heads: int, tmp_path: Path
) -> None:
    kernels = CountedHeads()
    config = ModelConfig(model=str(build_checkpoint(family, tmp_path / family, "float32")))
    load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)
    assert kernels.num_heads == num_heads
