"""Models whose weights are quantised while they load: the same bits alone and in company, on one rank and on two."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.backend import KernelBackend, Linear
from kernels.cpu_backend import CpuBackend
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.schemes import INT4, INT8, SCHEMES, W8A8, WeightScheme
from kernels.reference_backend import ReferenceBackend
from kernels.weights import Kind
from novainfer.config import ModelConfig
from novainfer.errors import ConfigError
from tests.parity.builders import build_checkpoint
from tests.parity.harness import CPU, Generation, largest_difference, load, paged_greedy, ragged_prompts
from workers.layers.build import LayerBuilder, PaddedLinear, RowSlice
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel
from workers.worker import check_quantization

pytestmark = pytest.mark.stage0

NUM_TOKENS = 12


class Recorder(CpuBackend):
    """Remembers which weight was packed how."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[tuple[tuple[int, ...], str | None]] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        self.packed.append((tuple(weight.shape), scheme and scheme.name))
        return super().pack_linear(weight, bias, scheme)


class OneTensor:
    """A checkpoint that has the same weight under every name."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        assert shape == tuple(self._weight.shape)
        return self._weight[index]


class Kept:
    """What was packed last, as long as it is asked for as what it is."""

    def __init__(self) -> None:
        self.tensors: dict[Kind, Tensor] = {}

    def next(self, kind: Kind) -> Tensor | None:
        return self.tensors.get(kind)

    def add(self, kind: Kind, tensor: Tensor) -> None:
        self.tensors[kind] = tensor


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "float32"), ("gemma2", "bfloat16"), ("qwen3_moe", "bfloat16")])
def test_model_given_any_batch_and_chunking_when_decoded_then_logprobs_have_the_same_bits(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    model, kernels = load(build_checkpoint(name, tmp_path / name), dtype=dtype, quantization=quantization)
    prompts = ragged_prompts()
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, budget=512) for prompt in prompts]
    for budget in (7, 512):
        together = paged_greedy(model, kernels, prompts, NUM_TOKENS, budget)
        assert together.tokens == [generation.tokens[0] for generation in alone]
        assert together.logprobs == [generation.logprobs[0] for generation in alone]


def test_model_when_quantised_then_near_the_reference_and_nearer_to_the_full_one_with_more_bits(tmp_path: Path) -> None:
    folder, prompts = build_checkpoint("qwen3", tmp_path / "qwen3"), ragged_prompts()
    answers = {}
    for quantization in ("none", "int8", "int4"):
        model, kernels = load(folder, dtype="float32", quantization=quantization)
        answers[quantization] = paged_greedy(model, kernels, prompts, 1)
    config = ModelConfig(model=str(folder), dtype="float32", quantization="int8")
    oracle = load_model(config, tp=TensorParallel.single(), kernels=ReferenceBackend(), device=CPU)
    assert largest_difference(paged_greedy(oracle, ReferenceBackend(), prompts, 1), answers["int8"]) < 1e-4
    off = {name: largest_difference(answers[name], answers["none"]) for name in ("int8", "int4")}
    assert 0.0 < off["int8"] < off["int4"]


def test_model_in_fp8_when_triton_computes_then_near_the_reference_and_off_the_full_one(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from kernels.triton_backend import TritonBackend
    from kernels.triton_launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("Triton compiles for a GPU here; the interpreter is what runs on a CPU")
    folder, prompts = build_checkpoint("qwen3", tmp_path / "qwen3"), ragged_prompts(3)

    def answers(kernels: KernelBackend, quantization: str) -> Generation:
        config = ModelConfig(model=str(folder), dtype="float32", quantization=quantization)
        model = load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)
        return paged_greedy(model, kernels, prompts, 1)

    ours, definition = answers(TritonBackend(CPU), "fp8"), answers(ReferenceBackend(), "fp8")
    assert largest_difference(ours, definition) < 0.1 * largest_difference(answers(ReferenceBackend(), "none"), ours)


def test_linears_of_a_model_when_quantised_then_routers_are_not_and_the_vocabulary_keeps_eight_bits(
    tmp_path: Path,
) -> None:
    for name, backend in (("qwen3_moe", "native"), ("qwen3", "transformers")):
        kernels = Recorder()
        config = ModelConfig(
            model=str(build_checkpoint(name, tmp_path / name)), quantization="int4", model_backend=backend
        )
        model = load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)
        vocab = [scheme for shape, scheme in kernels.packed if shape[0] == model.spec.vocab_size]
        others = [scheme for shape, scheme in kernels.packed if shape[0] != model.spec.vocab_size]
        assert vocab == ["int8"]
        assert others.count(None) == (1 if name == "qwen3_moe" else 0)  # one of its layers has experts
        assert set(others) <= {"int4", None}


# Parts that are whole groups, that begin or end within one, and that do both.
@pytest.mark.parametrize(("num_ranks", "num_groups"), [(2, 4.0), (2, 3.0), (2, 1.0), (3, 2.25)])
@pytest.mark.parametrize("scheme", [INT8, INT4, W8A8], ids=lambda scheme: scheme.name)
def test_layers_split_over_ranks_when_quantised_then_their_weights_are_those_of_one(
    scheme: WeightScheme, num_ranks: int, num_groups: float
) -> None:
    kernels, weight = CpuBackend(), torch.randn(96, int(num_groups * (scheme.group or 64)))
    weight[::2, 0] = 9.0  # the first rank has what the scales of both are for
    x, units = torch.randn(5, weight.shape[1]), torch.eye(weight.shape[1])
    whole = kernels.pack_linear(weight, None, scheme)
    rows, picked = [], []
    for rank in range(num_ranks):
        tp = TensorParallel(rank, num_ranks, None)
        build = LayerBuilder(OneTensor(weight), tp, kernels, torch.float32, CPU, scheme)  # type: ignore[arg-type]
        part = tp.shard(96, "rows")
        rows.append(build.merged_linear([RowSlice("a", 96, part.start, part.stop)], x.shape[1], bias=False)(x))
        columns = tp.shard(x.shape[1], "columns")
        split = build.row_parallel_linear("a", x.shape[1], 96, bias=False)._linear
        assert isinstance(split, QuantizedLinear if scheme is INT8 or num_groups == 4 else PaddedLinear)
        picked.append(split(units[columns, columns]))
        assert torch.equal(split.in_float32(units[columns, columns]), picked[-1])
    assert torch.equal(torch.cat(rows, dim=1), whole(x))
    assert torch.equal(torch.cat(picked), whole(units))


def test_a_layers_columns_when_they_were_packed_before_then_nobody_looks_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, weight, kept = CpuBackend(), torch.randn(48, 128), Kept()

    def split(how: str) -> Tensor:
        build = LayerBuilder(OneTensor(weight), TensorParallel(1, 2, None), kernels, torch.float32, CPU, SCHEMES[how])  # type: ignore[arg-type]
        with kernels.weight_memory.keeping(kept):
            return build.row_parallel_linear("a", 128, 48, bias=False)._linear(torch.eye(64))

    def look(*_: object) -> Tensor:
        raise AssertionError("looked at once more")

    first = {how: split(how) for how in ("int8", "int4")}
    monkeypatch.setattr("workers.layers.build.find_peaks", look)
    assert all(torch.equal(split(how), first[how]) for how in first)
    kept.tensors.clear()
    with pytest.raises(AssertionError, match="once more"):
        split("int8")


def test_quantisation_where_kernels_have_none_when_checked_then_config_error_and_none_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Triton:
        name = "triton"

    def check(quantization: str, kernels: object, device: torch.device = CPU) -> None:
        check_quantization(ModelConfig(quantization=quantization), kernels, device)  # type: ignore[arg-type]

    for name in ("none", *SCHEMES):
        if name != "fp8":
            check(name, CpuBackend())
        if name != "w8a8":
            check(name, Triton())
    check("fp8", ReferenceBackend())
    with pytest.raises(ConfigError, match="--quantization w8a8 runs on CPUs only so far"):
        check("w8a8", Triton())
    with pytest.raises(ConfigError, match="--quantization fp8 runs on GPUs only"):
        check("fp8", CpuBackend())
    for capability, is_new in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        check("int8", Triton(), torch.device("cuda", 1))
        with nullcontext() if is_new else pytest.raises(ConfigError, match="from Ada and Hopper on"):
            check("fp8", Triton(), torch.device("cuda", 1))
