"""Models from quantised checkpoints: the answers of a plain checkpoint with the same weights, in any company."""

from __future__ import annotations

import json
import logging
import multiprocessing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.backend import KernelBackend
from kernels.cpu_backend import CpuBackend
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.schemes import IntegerWeight
from kernels.reference_backend import ReferenceBackend
from novainfer.config import ModelConfig, ServeConfig
from novainfer.errors import ConfigError, UnsupportedModelError
from novainfer.mode import Mode
from tests.parity.builders import build_checkpoint, edit_config
from tests.parity.harness import CPU, Generation, largest_difference, load, paged_greedy, ragged_prompts
from tests.quantized import Format, quantize_checkpoint, scheme_of
from workers.layers.build import LayerBuilder, RowSlice
from workers.mode import find_mode
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.models.transformers_backend import TransformersModel
from workers.quantized.linears import QuantizedLinears
from workers.quantized.tensors import QuantizedTensors
from workers.tensor_parallel import TensorParallel
from workers.weights import WeightReader

pytestmark = pytest.mark.stage0

BF16, F32 = torch.bfloat16, torch.float32
NUM_TOKENS = 8
GPTQ = Format(form="gptq", symmetric=True)
REORDERED = Format(form="gptq_v2", group=32, reordered=True)
AWQ = Format(form="awq", group=64)
PACKED = Format(form="pack-quantized", group=-1, symmetric=True, scale_dtype=BF16)
W8A8 = Format(form="int-quantized", bits=8, group=-1, symmetric=True, scale_dtype=BF16)
WIDE = Format(form="pack-quantized", bits=8, scale_dtype=F32)


class NoIntegers(CpuBackend):
    """It multiplies by plain weights alone."""

    def pack_integers(self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype) -> Any:
        return None


def quantized(tmp_path: Path, how: Format, family: str = "qwen3", modules: str = "_proj") -> tuple[Path, Path]:
    """The folder of the quantised checkpoint, and that of its plain twin."""
    folder = build_checkpoint(family, tmp_path / family)
    return folder, quantize_checkpoint(folder, how, modules=modules)


def load_with(folder: Path, kernels: KernelBackend, **config: Any) -> CausalLM:
    model_config = ModelConfig(model=str(folder), **config)
    return load_model(model_config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


def answers(model: CausalLM, kernels: KernelBackend) -> Generation:
    return paged_greedy(model, kernels, ragged_prompts(), NUM_TOKENS)


@pytest.mark.parametrize("how", [GPTQ, REORDERED, AWQ, PACKED, W8A8], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama", "phi3"])
def test_model_when_its_integers_stay_packed_then_the_answers_of_its_plain_twin_within_rounding(
    family: str, how: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="workers.quantized")
    folder, twin = quantized(tmp_path, how, family)
    ours = answers(*load(folder, dtype="float32"))
    plain = answers(*load(twin, dtype="float32"))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) < 1e-4
    (line,) = [record.message for record in caplog.records if "weights: " in record.message]
    assert "8 linear layers stay packed" in line
    assert "widened" not in line


@pytest.mark.parametrize("how", [GPTQ, REORDERED, AWQ, W8A8], ids=str)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("llama", "float16"), ("qwen3_moe", "bfloat16")])
def test_model_given_any_batch_and_chunking_when_decoded_then_logprobs_have_the_same_bits(
    family: str, dtype: str, how: Format, tmp_path: Path
) -> None:
    model, kernels = load(quantized(tmp_path, how, family)[0], dtype=dtype)
    prompts = ragged_prompts()
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, budget=512) for prompt in prompts]
    for budget in (7, 512):
        together = paged_greedy(model, kernels, prompts, NUM_TOKENS, budget)
        assert together.tokens == [generation.tokens[0] for generation in alone]
        assert together.logprobs == [generation.logprobs[0] for generation in alone]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_model_when_its_weights_are_widened_then_bitwise_the_answers_of_its_plain_twin(
    family: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, WIDE, family)
    assert answers(*load(folder, dtype=dtype)) == answers(*load(twin, dtype=dtype))
    (line,) = [record.message for record in caplog.records if "weights: " in record.message]
    count = 8 if family == "qwen3" else 4  # Mixtral's experts have other names, and stay as they are
    assert f"{count} widened to torch.{dtype} (scales in float32)" in line


@pytest.mark.parametrize("how", [GPTQ, REORDERED, AWQ, PACKED, W8A8], ids=str)
def test_backend_without_integers_when_it_loads_then_bitwise_the_answers_of_the_plain_twin(
    how: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, how)
    kernels = NoIntegers()
    for dtype in ("float32", "bfloat16"):
        ours = load_with(folder, kernels, dtype=dtype)
        assert answers(ours, kernels) == answers(load_with(twin, kernels, dtype=dtype), kernels)
    assert "8 widened to torch.float32 (kernel backend 'cpu' has no kernel for such integers)" in caplog.text


def test_reference_backend_when_it_loads_then_the_answers_of_the_plain_twin(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, AWQ)
    kernels = ReferenceBackend()
    ours, plain = (answers(load_with(path, kernels, dtype="float32"), kernels) for path in (folder, twin))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) < 1e-4


@pytest.mark.parametrize("how", [GPTQ, REORDERED, AWQ, W8A8], ids=str)
def test_triton_when_it_loads_then_integers_stay_packed_and_the_answers_are_those_of_the_plain_twin(
    how: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from kernels.triton_backend import TritonBackend
    from kernels.triton_launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("Triton compiles for a GPU here; the interpreter is what runs on a CPU")
    caplog.set_level(logging.INFO, logger="workers.quantized")
    folder, twin = quantized(tmp_path, how)
    kernels, prompts = TritonBackend(CPU), ragged_prompts(2)
    ours = paged_greedy(load_with(folder, kernels, dtype="float32"), kernels, prompts, 1)
    plain = paged_greedy(*load(twin, dtype="float32"), prompts, 1)
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) < 1e-4
    assert "8 linear layers stay packed" in caplog.text
    assert "widened" not in caplog.text


@pytest.mark.parametrize("how", [GPTQ, REORDERED, AWQ, PACKED, W8A8], ids=str)
@pytest.mark.parametrize("family", ["starcoder2", "qwen3_moe"])
def test_transformers_code_when_it_runs_the_model_then_the_answers_of_the_plain_twin(
    family: str, how: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bitwise where all linears are ours; torch's, in experts and routers, look at where a weight lies in memory."""
    folder, twin = quantized(tmp_path, how, family)
    model, kernels = load(folder, dtype="float32", model_backend="transformers")
    assert isinstance(model, TransformersModel)
    ours, plain = answers(model, kernels), answers(*load(twin, dtype="float32", model_backend="transformers"))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) <= (0.0 if family == "starcoder2" else 1e-5)
    assert model.spec.stored_quantization == scheme_of(how.config()).name
    count = 10 if family == "starcoder2" else 29  # matrix by matrix: two layers of 5; 18 of experts, 3 and 8
    assert f"{count} widened to torch.float32 (the model runs through transformers' own code)" in caplog.text


def test_experts_when_each_has_tensors_of_its_own_then_they_stay_packed_and_the_router_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="workers.quantized")
    folder, twin = quantized(tmp_path, GPTQ, "qwen3_moe")
    ours, plain = answers(*load(folder, dtype="float32")), answers(*load(twin, dtype="float32"))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) < 1e-4
    assert "gptq-int4 weights: 18 linear layers stay packed" in caplog.text  # 6 experts, a plain MLP, two attentions


def test_quantized_vocabulary_when_loaded_then_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, twin = quantized(tmp_path, PACKED, modules="lm_head")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=config | {"ignore": []})
    assert answers(*load(folder, dtype="float32")) == answers(*load(twin, dtype="float32"))
    assert "1 widened to torch.float32 (a matrix of the vocabulary)" in caplog.text


def test_layer_that_is_ignored_when_loaded_then_it_is_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, W8A8, modules="layers.1.mlp.down_proj")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*gate_proj", "re:.*up_proj", "model.layers.0.mlp.down_proj"]
    edit_config(folder, quantization_config=config | {"ignore": ignore})
    ours, plain = answers(*load(folder, dtype="float32")), answers(*load(twin, dtype="float32"))
    assert ours.tokens == plain.tokens
    assert largest_difference(ours, plain) < 1e-4
    edit_config(folder, quantization_config=config | {"ignore": ["re:.*down_proj"]})
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.down_proj' is in the ignore list"):
        load(folder)


def test_one_of_merged_parts_when_it_is_plain_then_the_layer_is_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, AWQ, modules="q_proj")
    assert answers(*load(folder, dtype="float32")) == answers(*load(twin, dtype="float32"))
    assert "2 widened to torch.float32 (only a part of the layer is quantized)" in caplog.text


def test_activations_that_are_to_be_quantized_when_loaded_then_one_line_says_that_they_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = quantized(tmp_path, W8A8)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    edit_config(folder, quantization_config=config)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    ours, plain = answers(*load(folder, dtype="float32")), answers(*load(twin, dtype="float32"))
    assert ours.tokens == plain.tokens
    assert caplog.text.count("activations stay as they are, although the checkpoint wants them quantized too") == 1


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("native", r"'model\.layers\.1\.self_attn\.o_proj\.bias' is not zero"),
        ("transformers", r"unexpected keys: .*o_proj\.bias$"),
    ],
)
def test_bias_of_zeros_when_the_model_has_none_then_taken_for_nothing_and_any_other_refused(
    backend: str, words: str, tmp_path: Path
) -> None:
    folder, _ = quantized(tmp_path, GPTQ)
    before = answers(*load(folder, dtype="float32", model_backend=backend))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    assert answers(*load(folder, dtype="float32", model_backend=backend)) == before
    tensors["model.layers.1.self_attn.o_proj.bias"][3] = 1.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=words):
        load(folder, model_backend=backend)


@pytest.mark.parametrize("how", [GPTQ, AWQ, PACKED, W8A8, REORDERED], ids=str)
def test_layers_split_over_two_ranks_when_groups_divide_then_packed_with_the_weights_of_one(
    how: Format, tmp_path: Path
) -> None:
    n, k = 96, 4 * max(how.group, 32)
    tensors, exact = how.write("m", (n, k), torch.Generator().manual_seed(0))
    save_file(tensors, tmp_path / "model.safetensors")
    weights = WeightReader(tmp_path)
    kernels, x = CpuBackend(), torch.randn(5, k)
    rows, columns_of = [], []
    for rank in range(2):
        tp = TensorParallel(rank, 2, None)
        linears = QuantizedLinears(QuantizedTensors(weights, scheme_of(how.config())), kernels, F32, CPU)
        build = LayerBuilder(weights, tp, kernels, F32, CPU, None, linears)
        part, columns = tp.shard(n, "rows"), tp.shard(k, "columns")
        rows.append(build.merged_linear([RowSlice("m", n, part.start, part.stop)], k, bias=False).in_float32(x))
        split = build.row_parallel_linear("m", k, n, bias=False)._linear
        columns_of.append(split.in_float32(torch.eye(columns.stop - columns.start)))
        assert isinstance(split, QuantizedLinear) != how.reordered  # a rank has columns of all groups then
        assert linears.num_packed == (1 if how.reordered else 2)
    linears = QuantizedLinears(QuantizedTensors(weights, scheme_of(how.config())), kernels, F32, CPU)
    build = LayerBuilder(weights, TensorParallel.single(), kernels, F32, CPU, None, linears)
    whole = build.merged_linear([RowSlice("m", n, 0, n)], k, bias=False)
    assert torch.equal(torch.cat(rows, dim=1), whole.in_float32(x))
    assert torch.equal(torch.cat(columns_of).T.double(), exact)


def _run_rank(rank: int, store: str, folder: str, out: str) -> None:
    """One of two ranks decodes and writes down what it saw."""
    torch.set_num_threads(1)
    tp = TensorParallel.init(rank, 2, store, CPU)
    model, kernels = load(Path(folder), tp, dtype="float32")
    Path(out, f"{rank}.json").write_text(json.dumps(asdict(answers(model, kernels))))
    tp.close()


def test_model_given_two_ranks_when_decoded_then_the_tokens_of_one(tmp_path: Path) -> None:
    for how in (GPTQ, REORDERED, AWQ):
        place = tmp_path / str(how)
        folder, _ = quantized(place, how)
        context = multiprocessing.get_context("spawn")
        arguments = (str(place / "store"), str(folder), str(place))
        ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0, 0]
        seen = [Generation(**json.loads((place / f"{rank}.json").read_text())) for rank in range(2)]
        one = answers(*load(folder, dtype="float32"))
        assert seen[0] == seen[1]
        assert seen[0].tokens == one.tokens
        assert largest_difference(seen[0], one) < 1e-4


def test_type_and_mode_when_loaded_then_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, GPTQ)
    edit_config(folder, dtype=None, torch_dtype="float16")
    for backend, promise in (("native", "exact"), ("transformers", "best-effort")):
        config = ServeConfig(model=ModelConfig(model=str(folder), model_backend=backend))
        kernels = CpuBackend("portable")
        model = load_with(folder, kernels, model_backend=backend)
        mode = find_mode(config, kernels, model, TensorParallel.single(), CPU)
        assert str(mode) == f"cpu portable cpu/{backend} float16 gptq-int4 tp1 {promise}"
        assert Mode.parse(str(mode)) == mode
        assert mode.asked_quantization == "none"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_quantized_checkpoint_when_it_is_to_be_quantized_again_then_config_error(
    backend: str, quantization: str, tmp_path: Path
) -> None:
    folder, _ = quantized(tmp_path, AWQ)
    with pytest.raises(ConfigError, match=rf"--quantization {quantization} .* quantized already \(awq-int4\)"):
        load(folder, quantization=quantization, model_backend=backend)


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_config_that_does_not_say_it_when_a_file_beside_it_does_then_refused_with_that_file(
    name: str, method: str, backend: str, tmp_path: Path
) -> None:
    folder, twin = quantized(tmp_path, GPTQ if method == "gptq" else AWQ)
    edit_config(folder, quantization_config=None)
    for path in (folder, twin):
        (path / name).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' beside it may: .* \"quant_method\": \"{method}\""):
        load(folder, model_backend=backend)
    load(twin, model_backend=backend)  # a file that was left behind


def test_conv1d_when_its_weight_is_quantized_then_refused(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, AWQ, "gpt2", modules="attn.c_proj")  # square: no shape tells
    with pytest.raises(UnsupportedModelError, match="Conv1D"):
        load(folder)


def test_tensor_that_belongs_to_nothing_when_loaded_then_refused_by_name(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, GPTQ)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(96, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"does not use: model\.layers\.0\.mlp\.gate_proj\.weight"):
        load(folder)
