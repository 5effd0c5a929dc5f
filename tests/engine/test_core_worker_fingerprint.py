"""What a group of ranks computes at its start, as one text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.mode import Mode
from novainfer.protocol.messages import Logprobs
from novainfer.protocol.step import StepResult
from workers.fingerprint import StrangeRankError, check_fingerprint, fingerprint
from workers.launch import RankPlace
from workers.layers import rotary
from workers.models import decoder
from workers.models.spec import RotarySpec
from workers.tensor_parallel import TensorParallel
from workers.worker import Worker

pytestmark = pytest.mark.stage1

MODE = Mode(
    device="cpu",
    hardware="avx2",
    kernel_backend="cpu",
    model_backend="native",
    dtype="float32",
    tensor_parallel_size=1,
    is_exact=True,
)


def tables() -> list[Tensor]:
    return [torch.arange(64, dtype=torch.float32).view(8, 2, 4), torch.ones(8, 2, 4)]


def results(logprob: float = -0.5) -> list[StepResult]:
    return [StepResult(0, 0, [0], [7], [Logprobs(7, logprob, 1)]), StepResult(0, 1, [0], [8])]


def of(mode: Mode = MODE, logprob: float = -0.5, last: float | None = None) -> str:
    made = tables()
    if last is not None:
        made[1][7, 1, 3] = last
    return fingerprint(mode, TensorParallel.single(), made, results(logprob))


def test_fingerprint_given_any_other_bit_when_taken_then_it_is_another_one() -> None:
    assert of() == of()
    others = [
        of(logprob=math.nextafter(-0.5, 0.0)),
        of(last=float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))),
        of(mode=replace(MODE, hardware="avx512f")),
        fingerprint(MODE, TensorParallel.single(), [], results()),
    ]
    assert len({of(), *others}) == 5


def test_fingerprint_given_a_mode_that_is_not_exact_when_taken_then_it_is_of_the_mode_alone() -> None:
    mode = replace(MODE, is_exact=False)
    assert of(mode) == of(mode, logprob=-0.25, last=3.0)
    assert of(mode) != of(replace(mode, dtype="bfloat16"))


def test_check_given_fingerprints_when_none_is_known_or_it_is_one_of_them_then_it_passes_else_not() -> None:
    check_fingerprint("a", ())
    check_fingerprint("a", ("b", "a"))
    check_fingerprint("", ("b",))  # of a rank that is not the first one
    with pytest.raises(StrangeRankError, match="fingerprint a") as caught:
        check_fingerprint("a", ("b", "c"))
    assert caught.value.fingerprint == "a"


def build(threads: int) -> str:
    config = ServeConfig(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(num_blocks=8),
        scheduler=SchedulerConfig(max_num_seqs=2),
        parallel=ParallelConfig(device="cpu", threads_per_worker=threads),
    )
    place = RankPlace(rank=0, world_size=1, epoch=threads, meeting_point="")
    return Worker.build(config, place, lambda stage, done, total: None).fingerprint


def test_worker_given_other_threads_and_epochs_when_built_then_its_fingerprint_is_the_same_unless_a_table_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()

    def inaccurate(spec: RotarySpec, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        table = rotary.rotary_table(spec, max_position, dtype, device)
        table[-1, 0, 0] += 2**-8  # far behind the positions that are computed at the start
        return table

    try:
        first = build(1)
        assert first
        assert build(2) == first
        monkeypatch.setattr(decoder, "rotary_table", inaccurate)
        assert build(1) != first
    finally:
        torch.set_num_threads(before)
