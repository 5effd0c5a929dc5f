"""What a group of ranks computes at its start, as one text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.weights import Deferred
from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.mode import Mode
from novainfer.protocol.columns import column
from novainfer.protocol.messages import Logprobs
from novainfer.protocol.step import StepResult
from workers import fingerprint as module
from workers.fingerprint import StrangeRankError, check_fingerprint, checksum_of, fingerprint
from workers.launch import RankPlace
from workers.layers import embedding, rotary
from workers.layers.build import LayerBuilder
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


@dataclass(slots=True)
class Part:
    """As the model's parts are: of this package's making (see `ours`)."""

    weight: Tensor
    more: dict[str, list[Tensor]]


class Model:
    """Holds tensors in all ways that models do, one of them twice."""

    def __init__(self) -> None:
        self._norm = torch.ones(7, dtype=torch.bfloat16)
        self._parts = [Part(torch.arange(64, dtype=torch.float32).view(8, 8), {"scales": [torch.ones(3)]})]
        self._first = self._parts[0]
        self._other = object()


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OURS", ("tests.", "workers.", "kernels."))


def results(logprob: float = -0.5) -> list[StepResult]:
    return [
        StepResult(0, 0, column([0]), column([7]), [Logprobs(7, logprob, 1)]),
        StepResult(0, 1, column([0]), column([8])),
    ]


def of(mode: Mode = MODE, checksum: int = 1, logprob: float = -0.5) -> str:
    return fingerprint(mode, TensorParallel.single(), checksum, results(logprob))


def test_fingerprint_given_another_mode_checksum_or_result_when_taken_then_it_is_another_one() -> None:
    others = [
        of(mode=replace(MODE, hardware="avx512f")),
        of(checksum=2),
        of(logprob=math.nextafter(-0.5, 0.0)),
    ]
    assert of() == of()
    assert len({of(), *others}) == 4


@pytest.mark.parametrize("tensor", ["_norm", "weight", "scales"])
def test_checksum_given_a_model_when_a_bit_of_any_tensor_is_another_one_then_so_is_the_checksum(tensor: str) -> None:
    model, first = Model(), checksum_of(Model())
    part = model._parts[0]
    spoiled = {"_norm": model._norm, "weight": part.weight, "scales": part.more["scales"][0]}[tensor]
    assert checksum_of(model) == first
    bits = spoiled.view(torch.uint8).view(-1)
    for byte in (0, len(bits) // 2, len(bits) - 1):
        bits[byte] ^= 16
        assert checksum_of(model) != first
        bits[byte] ^= 16
    assert checksum_of(model) == first


def test_checksum_given_a_tensor_whose_words_are_not_aligned_when_taken_then_its_bytes_alone_count() -> None:
    data = torch.arange(40, dtype=torch.uint8)
    moved = torch.cat((torch.zeros(3, dtype=torch.uint8), data))[3:]
    assert moved.storage_offset() == 3
    assert checksum_of([moved]) == checksum_of([data]) != checksum_of([data[1:]])


def test_check_given_fingerprints_when_none_is_known_or_it_is_one_of_them_then_it_passes_else_not() -> None:
    check_fingerprint("a", ())
    check_fingerprint("a", ("b", "a"))
    check_fingerprint("", ("b",))  # of a rank that is not the first one
    with pytest.raises(StrangeRankError, match="fingerprint a") as caught:
        check_fingerprint("a", ("b", "c"))
    assert caught.value.fingerprint == "a"


def build(threads: int, backend: str = "auto") -> Worker:
    config = ServeConfig(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(num_blocks=8),
        scheduler=SchedulerConfig(max_num_seqs=2),
        parallel=ParallelConfig(device="cpu", threads_per_worker=threads, kernel_backend=backend),
    )
    place = RankPlace(rank=0, world_size=1, epoch=threads, meeting_point="")
    return Worker.build(config, place, lambda stage, done, total: None)


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
def test_worker_given_other_threads_and_epochs_when_built_then_its_fingerprint_is_the_same_unless_a_table_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inaccurate(spec: RotarySpec, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        table = rotary.rotary_table(spec, max_position, dtype, device)
        last = table[-1, 0]  # behind all that is computed at the start
        last[0] = torch.nextafter(last[0], torch.tensor(2.0))
        return table

    first = build(1)
    assert Mode.parse(first.info.mode).is_exact
    assert build(2).fingerprint == first.fingerprint
    monkeypatch.setattr(decoder, "rotary_table", inaccurate)
    assert build(1).fingerprint != first.fingerprint


@pytest.mark.usefixtures("num_threads")
def test_worker_given_a_weight_that_no_first_step_reads_when_it_was_packed_wrongly_then_its_fingerprint_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoiled(build: LayerBuilder, module: str, vocab_size: int, hidden_size: int) -> Deferred:
        rows = embedding.vocab_rows(build, module, vocab_size, hidden_size).make()
        rows[5] = -rows[5]
        return Deferred(tuple(rows.shape), rows.dtype, lambda: rows)

    first = build(1)
    monkeypatch.setattr(decoder, "vocab_rows", spoiled)
    assert build(1).fingerprint != first.fingerprint


@pytest.mark.usefixtures("num_threads")
def test_worker_given_a_mode_that_is_not_exact_when_built_then_it_has_no_fingerprint() -> None:
    worker = build(1, "reference")
    assert (Mode.parse(worker.info.mode).is_exact, worker.fingerprint) == (False, "")
