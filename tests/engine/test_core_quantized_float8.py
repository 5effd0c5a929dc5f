"""FP8 checkpoints: exactly the weights that their formats define, and models with the bits of their plain twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.backend import Linear
from kernels.cpu_backend import CpuBackend
from kernels.linear.schemes import WeightScheme
from kernels.weights import Deferred, made
from novainfer.config import ModelConfig, ServeConfig
from novainfer.errors import ConfigError, UnsupportedModelError
from novainfer.mode import Mode
from tests.float8 import Float8
from tests.parity.builders import build_checkpoint, edit_config, edit_tensors
from tests.parity.harness import CPU, Generation, largest_difference, load, paged_greedy, ragged_prompts
from tests.quantized import quantize_checkpoint, scheme_of
from workers import kept_config
from workers.layers.build import LayerBuilder, RowSlice
from workers.mode import find_mode
from workers.models import loader
from workers.models.loader import load_model
from workers.models.transformers_backend import TransformersModel
from workers.quantized.linears import QuantizedLinears
from workers.quantized.tensors import QuantizedTensors
from workers.tensor_parallel import TensorParallel
from workers.weights import WeightReader, find_bad_tensor

pytestmark = pytest.mark.stage0

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# No size of the models is a multiple of 40 or 24, and the two ranks' parts begin within a block.
BLOCKS = Float8(form="fp8", block=(40, 24), scale_name="weight_scale_inv")
LARGE = Float8(form="fp8", block=(128, 128), scale_name="weight_scale_inv", scale_dtype=BF16)
AUTO = Float8(form="fp8", per_tensor=True, is_scalar=True)
TENSOR = Float8(form="float-quantized", per_tensor=True, scale_dtype=BF16)
CHANNEL = Float8(form="float-quantized", scale_dtype=BF16)
BLOCK = Float8(form="float-quantized", block=(16, 40))
FORMATS = [
    BLOCKS,
    LARGE,
    AUTO,
    TENSOR,
    CHANNEL,
    BLOCK,
    Float8(form="fp8", block=(8, 5), scale_name="weight_scale_inv", scale_dtype=F16),
    Float8(form="fp8", block=(16, 25), scale_name="weight_scale_inv", scale_dtype=BF16),
    Float8(form="fp8", per_tensor=True, scale_name="weight_scale_inv", is_scalar=True),
    Float8(form="fp8", per_tensor=True),
    Float8(form="float-quantized", per_tensor=True, is_scalar=True),
    Float8(form="float-quantized"),
    Float8(form="float-quantized", group=32),
]
SHAPE = (48, 75)  # [N, K]
SLICES = [(slice(5, 19), slice(None)), (slice(None), slice(32, 64)), (slice(3, 43), slice(13, 71))]
DOWN = "model.layers.0.mlp.down_proj"


class Recorder(CpuBackend):
    """Remembers the weights that it packs."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[Tensor] = []

    def pack_linear(
        self, weight: Tensor | Deferred, bias: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> Linear:
        self.packed.append(made(weight))
        return super().pack_linear(self.packed[-1], bias, scheme)


def reader(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedTensors:
    save_file(tensors, folder / "model.safetensors")
    return QuantizedTensors(WeightReader(folder), scheme_of(config))


def written(how: Float8, name: str = "m", shape: tuple[int, int] = SHAPE) -> tuple[dict[str, Tensor], Tensor]:
    return how.write(name, shape, torch.Generator().manual_seed(3))


def quantized(tmp_path: Path, how: Float8, family: str = "qwen3", modules: str = "_proj") -> tuple[Path, Path]:
    """The folder of the quantised checkpoint, and that of its plain twin."""
    folder = build_checkpoint(family, tmp_path / family)
    return folder, quantize_checkpoint(folder, how, modules=modules)


def answers(folder: Path, **config: Any) -> Generation:
    return paged_greedy(*load(folder, **config), ragged_prompts(), 8)


def weights_of(folder: Path, rank: int, dtype: str) -> list[Tensor]:
    """All that one of two ranks multiplies by, in the order in which it is packed."""
    kernels = Recorder()
    config = ModelConfig(model=str(folder), dtype=dtype, weight_cache_gib=0.0)
    load_model(config, tp=TensorParallel(rank, 2, None), kernels=kernels, device=CPU)
    return kernels.packed


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_a_weight_when_read_whole_and_in_slices_then_it_is_the_one_that_the_format_defines(
    how: Float8, tmp_path: Path
) -> None:
    tensors, expected = written(how)
    quantized = reader(tmp_path, tensors, how.config())
    assert quantized.modules() == ["m"]
    assert quantized.holds("m")
    assert quantized.shape("m") == SHAPE
    for dtype in (F32, BF16, F16):
        assert torch.equal(quantized.read("m", SHAPE).widen(dtype), expected.float().to(dtype))
        for index in SLICES:
            assert torch.equal(quantized.read("m", SHAPE, index).widen(dtype), expected[index].float().to(dtype))
    assert quantized.weights.unread() == []


def test_each_number_when_read_then_it_is_what_e4m3_means(tmp_path: Path) -> None:
    def value(octet: int) -> float:
        sign, exponent, mantissa = -1.0 if octet >> 7 else 1.0, octet >> 3 & 15, octet & 7
        return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))

    octets = [octet for octet in range(256) if octet & 127 != 127]  # those are NaN
    tensors = {
        "m.weight": torch.tensor([octets], dtype=torch.uint8).view(E4M3),
        "m.weight_scale": torch.tensor([0.5]),
    }
    read = reader(tmp_path, tensors, AUTO.config()).read("m", (1, len(octets)))
    assert read.widen(F32).tolist() == [[0.5 * value(octet) for octet in octets]]


@pytest.mark.parametrize(
    ("how", "changes", "reason"),
    [
        (BLOCKS, {"weight": torch.zeros(SHAPE)}, "type F32, expected F8_E4M3"),
        (BLOCKS, {"weight": torch.zeros(SHAPE).to(torch.float8_e5m2)}, "type F8_E5M2, expected F8_E4M3"),
        (BLOCKS, {"weight": torch.zeros(48, 74).to(E4M3)}, r"has shape \[48, 74\]"),
        (BLOCKS, {"weight": None}, "no tensor 'm.weight'"),
        (BLOCKS, {"weight_scale_inv": None}, "no tensor 'm.weight_scale_inv'"),
        (BLOCKS, {"weight_scale_inv": torch.ones(1, 3)}, r"has shape \[1, 3\], the model needs \[2, 4\]"),
        (BLOCKS, {"weight_scale_inv": torch.ones(1)}, r"has shape \[1\], the model needs \[2, 4\]"),
        (BLOCKS, {"weight_scale_inv": torch.ones(2, 4, dtype=torch.uint8)}, "type U8, expected F16 or BF16 or F32"),
        (BLOCKS, {"weight_scale_inv": torch.ones(2, 4).to(torch.float8_e8m0fnu)}, "type F8_E8M0, expected F16"),
        (BLOCKS, {"weight_scale_inv": None, "weight_scale": torch.ones(2, 4)}, "no tensor 'm.weight_scale_inv'"),
        (AUTO, {"weight_scale": torch.ones(48, 1)}, r"has shape \[48, 1\], the model needs \[1\]"),
        (AUTO, {"weight_scale": torch.ones(3)}, r"has shape \[3\], the model needs \[1\]"),
        (CHANNEL, {"weight_scale": torch.ones(48)}, r"has shape \[48\], the model needs \[48, 1\]"),
        (TENSOR, {"weight_scale": torch.ones(1, dtype=torch.float64)}, "type F64, expected F16 or BF16 or F32"),
    ],
)
def test_tensors_that_do_not_fit_together_when_read_then_refused_by_name(
    how: Float8, changes: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    tensors, _ = written(how)
    reader(tmp_path, tensors, how.config()).read("m", SHAPE)
    for name, tensor in changes.items():
        tensors.pop(f"m.{name}", None)
        if tensor is not None:
            tensors[f"m.{name}"] = tensor
    with pytest.raises(UnsupportedModelError, match=reason):
        reader(tmp_path, tensors, how.config()).read("m", SHAPE)


@pytest.mark.parametrize(
    ("entry", "is_ignored"),
    [
        ("model.layers.1.mlp.gate_proj", True),
        ("model.layers.1", True),
        ("gate_proj", True),
        ("mlp.gate_proj", True),
        ("model.layers.1.mlp.gate", False),
        ("model.layers.11", False),
        ("proj", False),
        ("", False),
    ],
)
def test_a_module_when_the_list_of_full_ones_has_it_or_what_it_is_in_then_it_may_not_be_quantized(
    entry: str, is_ignored: bool, tmp_path: Path
) -> None:
    tensors, _ = written(BLOCKS, "model.layers.1.mlp.gate_proj")
    quantized = reader(tmp_path, tensors, BLOCKS.config() | {"modules_to_not_convert": [entry]})
    if not is_ignored:
        assert quantized.holds("model.layers.1.mlp.gate_proj")
        return
    with pytest.raises(UnsupportedModelError, match=r"'model.layers.1.mlp.gate_proj' is in the ignore list"):
        quantized.holds("model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize("how", [BLOCKS, LARGE, AUTO, TENSOR, CHANNEL, BLOCK], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_moe"])
def test_model_when_loaded_then_bitwise_the_answers_of_its_twin_in_the_type_of_the_model(
    family: str, how: Float8, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, how, family)
    assert answers(folder, dtype="float32") == answers(twin, dtype="float32")
    plain = {name: tensor.bfloat16() for name, tensor in load_file(twin / "model.safetensors").items()}
    save_file(plain, twin / "model.safetensors")  # the float32 product, rounded once
    assert answers(folder, dtype="bfloat16") == answers(twin, dtype="bfloat16")
    lines = [record.message for record in caplog.records if "weights: " in record.message]
    name = "fp8-e4m3" if how.form == "fp8" else "compressed-e4m3"
    count = 18 if family == "qwen3_moe" else 8  # 6 experts, a plain MLP, two attentions; two of each layer
    assert [line.split(" (")[0] for line in lines] == [
        f"{name} weights: 0 linear layers stay packed; {count} widened to torch.{dtype}"
        for dtype in ("float32", "bfloat16")
    ]


@pytest.mark.parametrize("how", [BLOCKS, AUTO, CHANNEL, BLOCK], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_moe"])
def test_model_when_two_ranks_load_it_then_each_has_its_part_of_the_weights_that_the_format_defines(
    family: str, how: Float8, tmp_path: Path
) -> None:
    folder, twin = quantized(tmp_path, how, family)
    for rank in range(2):
        ours, plain = weights_of(folder, rank, "bfloat16"), weights_of(twin, rank, "bfloat16")
        assert len(ours) == len(plain) > 8
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_layers_split_over_two_ranks_when_blocks_do_not_divide_then_rows_and_columns_of_one(
    how: Float8, tmp_path: Path
) -> None:
    n, k = 60, 100  # parts of 30 and 50: within blocks
    tensors, exact = written(how, shape=(n, k))
    save_file(tensors, tmp_path / "model.safetensors")
    weights, kernels = WeightReader(tmp_path), Recorder()
    for rank in range(2):
        tp = TensorParallel(rank, 2, None)
        linears = QuantizedLinears(QuantizedTensors(weights, scheme_of(how.config())), kernels, F32, CPU)
        build = LayerBuilder(weights, tp, kernels, F32, CPU, None, linears)
        part = tp.shard(n, "rows")
        build.merged_linear([RowSlice("m", n, part.start, part.stop)], k, bias=False)
        build.row_parallel_linear("m", k, n, bias=False)
        assert linears.widened == {"no kernel takes fp8 numbers with the scales of a checkpoint": 2}
    top, left, bottom, right = kernels.packed
    assert torch.equal(torch.cat((top, bottom)).double(), exact)
    assert torch.equal(torch.cat((left, right), dim=1).double(), exact)


def test_modules_that_are_not_to_be_converted_when_loaded_then_they_are_as_they_were(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, BLOCKS, modules="gate_proj")
    full = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "self_attn"]
    edit_config(folder, quantization_config=BLOCKS.config() | {"modules_to_not_convert": full})
    assert answers(folder, dtype="bfloat16") == answers(twin, dtype="bfloat16")
    edit_config(folder, quantization_config=BLOCKS.config() | {"ignored_layers": ["model.layers.1.mlp"]})
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.gate_proj' is in the ignore list"):
        load(folder)


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    ("how", "suffix"), [(AUTO, "input_scale"), (AUTO, "activation_scale"), (TENSOR, "input_scale")]
)
def test_scales_of_activations_when_there_then_not_read_and_one_line_says_so(
    how: Float8, suffix: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, how)
    config = how.config() | {"activation_scheme": "static"}
    if how is TENSOR:
        activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        config["config_groups"]["group_0"]["input_activations"] = activations
    edit_config(folder, quantization_config=config)
    edit_tensors(folder, **{f"{DOWN}.{suffix}".replace(".", "__"): torch.tensor(2.0)})
    ours, plain = (answers(path, dtype="float32", model_backend=backend) for path in (folder, twin))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) <= (0.0 if backend == "native" else 1e-5)
    assert caplog.text.count("activations stay as they are, although the checkpoint wants them quantized too") == 1


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({f"{DOWN}.weight_scale_inv": None}, "type F8_E4M3, expected F64 or F32 or F16 or BF16"),
        ({f"{DOWN}.weight": torch.zeros(64, 96, dtype=BF16)}, "type BF16, expected F8_E4M3"),
        ({f"{DOWN}.weight_scale": torch.ones(1)}, r"layers\.0\.mlp\.down_proj\.weight_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, r"self_attn\.k_scale"),
    ],
)
def test_tensors_that_do_not_belong_together_when_loaded_then_refused_by_name(
    changes: dict[str, Tensor | None], reason: str, backend: str, tmp_path: Path
) -> None:
    folder, _ = quantized(tmp_path, BLOCKS)
    edit_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder, model_backend=backend)


@pytest.mark.parametrize("how", [BLOCKS, AUTO, CHANNEL], ids=str)
@pytest.mark.parametrize("family", ["starcoder2", "qwen3_moe"])
def test_transformers_code_when_it_runs_the_model_then_the_answers_of_the_plain_twin(
    family: str, how: Float8, tmp_path: Path
) -> None:
    """Bitwise where all linears are ours; torch's, in experts and routers, look at where a weight lies in memory."""
    folder, twin = quantized(tmp_path, how, family)
    model, kernels = load(folder, dtype="float32", model_backend="transformers")
    assert isinstance(model, TransformersModel)
    ours = paged_greedy(model, kernels, ragged_prompts(), 8)
    plain = answers(twin, dtype="float32", model_backend="transformers")
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) <= (0.0 if family == "starcoder2" else 1e-5)
    assert model.spec.stored_quantization == scheme_of(how.config()).name


@pytest.mark.parametrize(("how", "name"), [(BLOCKS, "fp8-e4m3"), (CHANNEL, "compressed-e4m3")], ids=str)
def test_mode_when_loaded_then_it_says_what_the_checkpoint_has_and_not_that_it_was_asked_for(
    how: Float8, name: str, tmp_path: Path
) -> None:
    folder, _ = quantized(tmp_path, how)
    edit_config(folder, dtype="bfloat16")
    kernels = CpuBackend("portable")
    config = ModelConfig(model=str(folder))
    model = load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)
    mode = find_mode(ServeConfig(model=config), kernels, model, TensorParallel.single(), CPU)
    assert str(mode) == f"cpu portable cpu/native bfloat16 {name} tp1 exact"
    assert Mode.parse(str(mode)) == mode
    assert mode.asked_quantization == "none"
    for quantization in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=rf"--quantization {quantization} .* quantized already \({name}\)"):
            load(folder, quantization=quantization)


def test_checkpoint_when_loaded_again_then_its_kept_config_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_config, "cache_dir", lambda: tmp_path / "cache")
    folder, _ = quantized(tmp_path, BLOCKS)
    edit_config(folder, quantization_config=BLOCKS.config() | {"ignored_layers": ["lm_head"]})
    first = answers(folder, dtype="bfloat16")

    def refuse(*_: object) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(loader, "load_hf_config", refuse)
    assert answers(folder, dtype="bfloat16") == first
    edit_config(folder, quantization_config=BLOCKS.config() | {"fmt": "e5m2"})
    with pytest.raises(AssertionError, match="transformers was asked"):
        load(folder)


def test_fp8_numbers_when_one_is_nan_then_the_tensor_is_found(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, BLOCKS)
    assert find_bad_tensor(folder) is None
    numbers = load_file(folder / "model.safetensors")[f"{DOWN}.weight"]
    numbers.view(torch.uint8)[3, 5] = 127
    edit_tensors(folder, **{f"{DOWN}.weight".replace(".", "__"): numbers})
    assert find_bad_tensor(folder) == f"{DOWN}.weight"
