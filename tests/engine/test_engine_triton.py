"""The whole engine over Triton's kernels, interpreted where there is no GPU: the tokens that the CPU's kernels give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kernels.triton_launch import INTERPRETED
from novainfer import LLM, SamplingParams
from tests.parity.builders import build_checkpoint
from workers import worker

pytestmark = [
    pytest.mark.stage1,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not INTERPRETED, reason="Triton compiles for a GPU here; the interpreter is what runs on a CPU"),
]

SMALL = {"device": "cpu", "num_blocks": 64, "max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 4}
QUESTIONS = ("Hi", "Hello!")
PARAMS = (SamplingParams(temperature=0.0, max_tokens=2), SamplingParams(temperature=1.0, seed=3, max_tokens=2))
VARIANTS: list[dict[str, Any]] = [{"deterministic": True}, {"quantization": "int4"}]


def answers(model: str, num_recorded: int = 0, **options: Any) -> list[list[int]]:
    """Of two requests in one batch, once so many graphs of steps with prompts were recorded."""
    with LLM(model, **SMALL, **options) as llm:
        for _ in range(num_recorded):
            executor: Any = llm._executor
            assert executor._worker.runner._graphs.steps.record_next()
        found = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], list(PARAMS))
    return [answer["token_ids"] for answer in found]


def test_the_demo_model_when_its_steps_are_recorded_then_its_tokens_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[str] = []

    def record(call: Callable[[], None]) -> Callable[[], None]:
        """In a graph's place: the same call again."""

        def replay() -> None:
            replayed.append(call.__name__)
            call()

        return replay

    wanted = answers("demo", kernel_backend="cpu", deterministic=True)
    monkeypatch.setattr(worker, "has_graphs", lambda config, model, device: True)
    monkeypatch.setattr(worker, "cuda_recorder", lambda device: record)
    assert answers("demo", 1, kernel_backend="triton", deterministic=True) == wanted
    assert set(replayed) == {"forward", "compute", "sample"}


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "plain")
def test_a_small_model_when_triton_computes_then_its_tokens_are_those_of_the_cpu(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = str(build_checkpoint("qwen3", tmp_path / "model", "bfloat16"))
    wanted = answers(model, kernel_backend="cpu", **options)
    assert [len(tokens) for tokens in wanted] == [2, 2]
    assert answers(model, kernel_backend="triton", **options) == wanted
