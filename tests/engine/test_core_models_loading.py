"""Reading a checkpoint: sharded files, progress, and a reason for everything that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, Starcoder2Config, Starcoder2ForCausalLM

from kernels.backend import select_backend
from novainfer.config import ModelConfig
from novainfer.errors import UnsupportedModelError
from tests.parity.builders import VOCAB_SIZE, build_checkpoint, edit_config, edit_tensors
from tests.parity.harness import CPU, load, paged_greedy, ragged_prompts, transformers_greedy
from workers.checkpoint import find_checkpoint, read_json
from workers.layers.build import LayerBuilder
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel
from workers.weights import WeightReader, stored_type

pytestmark = pytest.mark.stage0

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_checkpoint("qwen3", tmp_path / "qwen3")


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        shards[i % 3][name] = tensor
    weight_map = {}
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_checkpoint_given_shards_when_loaded_then_equals_single_file(folder: Path) -> None:
    single = paged_greedy(*load(folder), ragged_prompts(2), 4)
    split_into_shards(folder)
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == single


def test_checkpoint_given_the_index_of_shards_that_were_there_before_when_loaded_then_the_single_file_counts(
    folder: Path,
) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(folder, model__norm__weight=torch.zeros(64))
    split_into_shards(folder)
    save_file(tensors, folder / "model.safetensors")
    single = paged_greedy(*load(folder), ragged_prompts(2), 4)
    for shard in folder.glob("part-*"):
        shard.unlink()
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == single
    (folder / "model.safetensors.index.json").unlink()
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == single


def test_multimodal_checkpoint_given_the_names_of_the_modules_when_loaded_then_equals_the_saved_ones(
    tmp_path: Path,
) -> None:
    folder = build_checkpoint("gemma3_multimodal", tmp_path / "gemma3")
    saved = paged_greedy(*load(folder), ragged_prompts(2), 4)
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        place = name.removeprefix("language_model.")
        is_head = place.startswith("lm_head.")
        renamed[place if is_head else f"model.{name.replace('language_model.model.', 'language_model.')}"] = tensor
    assert "model.language_model.embed_tokens.weight" in renamed
    save_file(renamed, folder / "model.safetensors")
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == saved


def test_checkpoint_given_progress_callback_when_loaded_then_counts_every_tensor_once(folder: Path) -> None:
    _, kernels = load(folder)
    seen: list[tuple[int, int]] = []
    load_model(
        ModelConfig(model=str(folder)),
        tp=TensorParallel.single(),
        kernels=kernels,
        device=CPU,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = len(load_file(folder / "model.safetensors"))
    assert seen[:total] == [(done, total) for done in range(1, total + 1)]


def test_tensor_when_read_once_more_then_counted_once_and_its_file_is_closed_again(tmp_path: Path) -> None:
    stored = {"a": torch.randn(3, 4), "b": torch.randn(2)}
    seen: list[tuple[int, int]] = []
    save_file(stored, tmp_path / "model.safetensors")
    reader = WeightReader(tmp_path, lambda done, total: seen.append((done, total)))
    for name in ("a", "a", "b", "a"):
        assert torch.equal(reader.read(name, tuple(stored[name].shape)), stored[name])
        assert bool(reader._open) is (len(seen) < 2)
    assert seen == [(1, 2), (2, 2)]


def test_builder_given_a_slice_when_read_then_owns_no_more_than_the_slice(folder: Path) -> None:
    build = LayerBuilder(WeightReader(folder), TensorParallel.single(), select_backend(CPU), torch.float32, CPU)
    rows = build.tensor("lm_head.weight", (VOCAB_SIZE, 64), (slice(10, 20),))
    assert torch.equal(rows, load_file(folder / "model.safetensors")["lm_head.weight"][10:20])
    assert rows.untyped_storage().nbytes() == 10 * 64 * 4


def test_tied_checkpoint_given_stored_projection_when_loaded_then_it_is_used_as_transformers_does(
    folder: Path,
) -> None:
    untied = paged_greedy(*load(folder), ragged_prompts(2), 4)
    edit_config(folder, tie_word_embeddings=True)
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == untied


def test_tied_checkpoint_given_the_projection_alone_when_loaded_then_tokens_are_looked_up_in_it(tmp_path: Path) -> None:
    folder = build_checkpoint("qwen2", tmp_path / "qwen2")
    both = paged_greedy(*load(folder), ragged_prompts(2), 4)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, model__embed_tokens__weight=None, lm_head__weight=table)
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == both
    assert both.tokens == transformers_greedy(folder, ragged_prompts(2), 4).tokens


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # tied and not
def test_checkpoint_given_the_names_of_the_base_model_when_loaded_then_equals_the_saved_ones(
    family: str, tmp_path: Path
) -> None:
    folder = build_checkpoint(family, tmp_path / "model")
    saved = paged_greedy(*load(folder), ragged_prompts(2), 4)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert paged_greedy(*load(folder), ragged_prompts(2), 4) == saved
    assert saved.tokens == transformers_greedy(folder, ragged_prompts(2), 4).tokens


@pytest.mark.parametrize("family", ["qwen3", "starcoder2"])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_given_a_config_without_a_type_when_loaded_then_the_weights_have_it(
    dtype: str, is_sharded: bool, family: str, tmp_path: Path
) -> None:
    folder = build_checkpoint(family, tmp_path / "model", dtype)
    edit_config(folder, dtype=None)
    if is_sharded:
        split_into_shards(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert load(folder)[0].spec.dtype == theirs == getattr(torch, dtype)


def test_checkpoint_given_weights_of_eight_bits_first_when_its_type_is_looked_for_then_they_do_not_count(
    folder: Path,
) -> None:
    edit_config(folder, dtype=None)
    edit_tensors(folder, a=torch.zeros(2, dtype=torch.float8_e4m3fn), b=torch.zeros(2, dtype=torch.float16))
    assert stored_type(folder) == "float16"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({GATE: None}, f"no tensor '{GATE}'"),
        ({GATE: torch.zeros(3, 64)}, r"has shape \[3, 64\], the model needs \[96, 64\]"),
        ({GATE: torch.zeros(96, 64, dtype=torch.int8)}, "type I8, expected F64 or F32 or F16 or BF16"),
        ({"model.layers.0.extra.weight": torch.zeros(2)}, "does not use: model.layers.0.extra.weight"),
    ],
)
def test_checkpoint_given_wrong_tensors_when_loaded_then_refused_by_name(
    folder: Path, tensors: dict[str, Tensor | None], reason: str
) -> None:
    edit_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "the method 'mxfp4' is not supported; supported are gptq"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"model_type": "no_such_model"}, "nor transformers .* knows the model type 'no_such_model'"),
        ({"model_type": "no_such_model", "auto_map": {"AutoConfig": "code.Config"}}, "only with --trust-remote-code"),
        ({"dtype": "float64"}, "type float64 is not supported"),
    ],
)
def test_checkpoint_given_unsupported_config_when_loaded_then_refused_with_reason(
    folder: Path, config: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **config)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder)


def test_checkpoint_given_too_long_service_when_loaded_then_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="max_model_len 513 is above the model's own limit of 512 tokens"):
        load(folder, max_model_len=513)


def test_checkpoint_given_missing_shard_or_weights_when_loaded_then_refused(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"missing .*part-1\.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModelError, match="only safetensors are supported"):
        load(folder)


def test_checkpoint_given_an_index_that_names_another_shard_when_loaded_then_the_shard_is_named(folder: Path) -> None:
    split_into_shards(folder)
    index = folder / "model.safetensors.index.json"
    names = read_json(folder, index.name)["weight_map"]
    wrong = "part-0.safetensors" if names[GATE] != "part-0.safetensors" else "part-1.safetensors"
    index.write_text(json.dumps({"weight_map": names | {GATE: wrong}}))
    with pytest.raises(UnsupportedModelError, match=rf"{wrong}' has no tensor '{GATE}'"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_when_loaded_then_refused_whatever_its_type(dtype: torch.dtype, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).to(dtype).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="it is an encoder"):
        load(tmp_path)


def test_a_vocabulary_of_few_when_transformers_runs_the_model_then_served(tmp_path: Path) -> None:
    config = Starcoder2Config(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Starcoder2ForCausalLM(config).save_pretrained(tmp_path)
    tokens = paged_greedy(*load(tmp_path), [[3, 4, 5]], 4)
    assert all(0 <= token < 37 for row in tokens.tokens for token in row)


def test_checkpoint_given_truncated_file_when_loaded_then_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UnsupportedModelError, match="not a readable safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/no/such/folder", "'/no/such/folder' is neither a folder nor"),
        ("./nothing", "'./nothing' is neither a folder nor"),
        ("a/b/c", "'a/b/c' is neither a folder nor"),
        ("nobody/nothing", "not a local folder, and could not be had from the hub"),
    ],
)
def test_find_checkpoint_given_nothing_there_when_offline_then_says_so(
    model: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModelError, match=reason):
        find_checkpoint(model)


def test_find_checkpoint_given_folder_without_config_when_asked_then_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("starcoder2", {"model_backend": "native"}, "no native decoder for 'starcoder2'"),
        ("gpt2", {"max_model_len": 513}, "above the model's own limit"),
    ],
)
def test_foreign_family_given_impossible_config_when_loaded_then_refused(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(build_checkpoint(family, tmp_path / "model"), **config)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 4}, "not a multiple of num_key_value_heads"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, r"num_experts_per_tok \(99\)"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_sizes_that_do_not_fit_together_when_loaded_then_refused(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = build_checkpoint(family, tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder)


def test_foreign_family_given_two_ranks_when_loaded_then_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="use tensor_parallel_size 1"):
        load(build_checkpoint("gpt_neox", tmp_path / "model"), TensorParallel(0, 2, None))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("stablelm", "do not pass the step on"),
        ("bloom", "not every layer goes through transformers' attention interface"),
        ("gpt_oss", "differ from those of transformers' eager attention"),
    ],
)
def test_foreign_family_given_attention_we_cannot_take_over_when_loaded_then_refused(
    family: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(build_checkpoint(family, tmp_path / "model"))


def test_foreign_checkpoint_given_missing_tensor_when_loaded_then_refused_by_name(tmp_path: Path) -> None:
    folder = build_checkpoint("starcoder2", tmp_path / "model")
    edit_tensors(folder, model__layers__0__mlp__c_fc__weight=None)
    with pytest.raises(UnsupportedModelError, match=r"missing keys: model\.layers\.0\.mlp\.c_fc\.weight"):
        load(folder)
