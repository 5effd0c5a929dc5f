"""What a config.json says of quantised weights: read as the formats mean it, or refused with what is not supported."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from novainfer.errors import UnsupportedModelError
from novainfer.mode import Mode
from tests.quantized import scheme_of
from workers.quantized.scheme import StoredScheme, read_scheme

pytestmark = pytest.mark.stage0

# As the writers of each format leave it in config.json.
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.1,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True, "backend": "autoawq"}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS}
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.9,
    "ignore": ["lm_head", "re:.*gate$"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
}


def compressed(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    config = copy.deepcopy(COMPRESSED) | changes
    config["config_groups"]["group_0"] |= group or {}
    config["config_groups"]["group_0"]["weights"] |= weights or {}
    return config


def floating(weights: dict[str, Any] | None = None, **group: Any) -> dict[str, Any]:
    """As llm-compressor writes FP8."""
    own = {"num_bits": 8, "type": "float", "group_size": None, "strategy": "channel"}
    return compressed(own | (weights or {}), group, format="float-quantized", ignore=["lm_head"])


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    "weight_block_size": [128, 64],
}
# AutoFP8's; the first FP8 checkpoints are of its kind.
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def float8(form: str, **values: Any) -> StoredScheme:
    return StoredScheme(form=form, bits=8, symmetric=True, **({"group": None} | values))


@pytest.mark.parametrize(
    ("config", "expected", "name"),
    [
        (
            GPTQ,
            StoredScheme(form="gptq", bits=4, group=128, symmetric=True, zeros_minus_one=True),
            "gptq-int4",
        ),
        (
            GPTQ | {"bits": 8, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
            StoredScheme(form="gptq", bits=8, group=None, symmetric=False, needs_order=True),
            "gptq-int8",
        ),
        (
            GPTQ | {"dynamic": {"-:.*down_proj": {}}, "pack_dtype": "int32", "format": "gptq"},
            StoredScheme(form="gptq", bits=4, group=128, symmetric=True, zeros_minus_one=True),
            "gptq-int4",
        ),
        (AWQ, StoredScheme(form="awq", bits=4, group=128, symmetric=False), "awq-int4"),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False},
            StoredScheme(form="awq", bits=4, group=64, symmetric=True),
            "awq-int4",
        ),
        (
            COMPRESSED,
            StoredScheme(form="pack-quantized", bits=4, group=128, symmetric=True, ignored=("lm_head", "re:.*gate$")),
            "compressed-int4",
        ),
        (
            compressed({"group_size": 32, "symmetric": False, "actorder": "group"}, ignore=[]),
            StoredScheme(form="pack-quantized", bits=4, group=32, symmetric=False, needs_order=True),
            "compressed-int4",
        ),
        (
            compressed(
                {"num_bits": 8, "strategy": "channel", "group_size": None, "actorder": "weight"},
                {"input_activations": {"num_bits": 8, "dynamic": True}},
                format="int-quantized",
                quantization_status="frozen",
                ignore=None,
            ),
            StoredScheme(form="int-quantized", bits=8, group=None, symmetric=True, skips_activations=True),
            "compressed-int8",
        ),
        (
            compressed({"num_bits": 8, "strategy": "tensor", "group_size": None}, ignore=[]),
            StoredScheme(form="pack-quantized", bits=8, group=None, per_tensor=True, symmetric=True),
            "compressed-int8",
        ),
        (
            compressed({"strategy": None, "group_size": -1}, ignore=[]),
            StoredScheme(form="pack-quantized", bits=4, group=None, symmetric=True),
            "compressed-int4",
        ),
        (
            FP8,
            float8("fp8", block=(128, 64), ignored=("lm_head", "model.layers.0.mlp.gate"), skips_activations=True),
            "fp8-e4m3",
        ),
        (
            FP8 | {"scale_fmt": "ue8m0", "fmt": "float8_e4m3fn", "modules_to_not_convert": None},
            float8("fp8", block=(128, 64), skips_activations=True),
            "fp8-e4m3",
        ),
        (AUTO_FP8, float8("fp8", per_tensor=True, ignored=("lm_head",), skips_activations=True), "fp8-e4m3"),
        (
            {"quant_method": "fp8", "weight_block_size": None, "kv_cache_scheme": None},
            float8("fp8", per_tensor=True, skips_activations=True),
            "fp8-e4m3",
        ),
        (floating(), float8("float-quantized", ignored=("lm_head",)), "compressed-e4m3"),
        (
            floating({"strategy": "tensor"}, input_activations={"num_bits": 8, "type": "float", "dynamic": False}),
            float8("float-quantized", per_tensor=True, ignored=("lm_head",), skips_activations=True),
            "compressed-e4m3",
        ),
        (
            floating({"strategy": "block", "block_structure": [128, 128]}, format="float-quantized"),
            float8("float-quantized", block=(128, 128), ignored=("lm_head",)),
            "compressed-e4m3",
        ),
        (
            floating({"strategy": "group", "group_size": 128, "actorder": "static"}),
            float8("float-quantized", group=128, ignored=("lm_head",)),
            "compressed-e4m3",
        ),
    ],
)
def test_config_of_a_known_method_when_read_then_the_scheme_that_it_means(
    config: dict[str, Any], expected: StoredScheme, name: str
) -> None:
    assert scheme_of(config) == expected
    assert scheme_of(config).name == name
    mode = f"cpu avx2 cpu/native bfloat16 {name} tp2 exact"
    assert str(Mode.parse(mode)) == mode


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "fbgemm_fp8"}, "the method 'fbgemm_fp8' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "the method 'modelopt' is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fp8 with fmt 'e5m2'"),
        (FP8 | {"fmt": "float8_e4m3fnuz"}, "fp8 with fmt 'float8_e4m3fnuz'"),
        (FP8 | {"activation_scheme": "token"}, "fp8 with activation_scheme 'token'"),
        (FP8 | {"scale_fmt": "e5m3"}, "fp8 with scale_fmt 'e5m3'"),
        (FP8 | {"expert_dtype": "fp4"}, "fp8 with expert_dtype 'fp4'"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, "fp8 with modules_to_convert"),
        (FP8 | {"kv_cache_scheme": "static"}, "fp8 with kv_cache_scheme"),
        (AUTO_FP8 | {"kv_cache_quant_targets": ["k_proj"]}, "fp8 with kv_cache_quant_targets"),
        (FP8 | {"weight_block_size": [128]}, r"fp8 with weight_block_size \[128\]"),
        (FP8 | {"weight_block_size": [128, 0]}, r"fp8 with weight_block_size \[128, 0\]"),
        (FP8 | {"weight_block_size": [1.5, 128]}, r"fp8 with weight_block_size \[1.5, 128\]"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size is 128"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (floating({"type": "int"}), "type 'int'"),
        (floating({"num_bits": 4}), "num_bits 4"),
        (floating({"symmetric": False}), "symmetric False"),
        (floating({"strategy": "block"}), "strategy 'block' and block_structure None"),
        (floating({"block_structure": [128, 128]}), r"strategy 'channel' and block_structure \(128, 128\)"),
        (floating({"strategy": "block", "block_structure": "128x128"}), "block_structure is '128x128'"),
        (floating({"strategy": "block", "block_structure": [128, -1]}), r"block_structure \[128, -1\]"),
        (floating({"strategy": "tensor_group", "group_size": 16}), "strategy 'tensor_group' and group_size 16"),
        (floating({"strategy": "group", "group_size": 128, "actorder": "group"}), "actorder 'group'"),
        (floating({"dynamic": True}), "with dynamic"),
        (floating(format="int-quantized"), "format 'int-quantized'"),
        (floating(targets=["re:.*q_proj"]), "targets"),
        (floating() | {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        (floating() | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the method 'bitsandbytes'"),
        ({"quant_method": "gguf"}, "the method 'gguf'"),
        ({"quant_method": "mxfp4"}, "the method 'mxfp4'"),
        ({"bits": 4}, "the method '' is not supported"),
        ({"quant_method": ["gptq"]}, r"quant_method is \['gptq'\]"),
        ("gptq", "quantization_config is 'gptq'"),
        (GPTQ | {"bits": 3}, "gptq with bits 3"),
        (GPTQ | {"bits": 2}, "gptq with bits 2"),
        (GPTQ | {"bits": "4"}, "gptq with bits '4'"),
        (GPTQ | {"bits": 4.0}, "gptq with bits 4.0"),
        (GPTQ | {"group_size": 8}, "gptq with group_size 8"),
        (GPTQ | {"group_size": 2048}, "gptq with group_size 2048"),
        (GPTQ | {"group_size": None}, "gptq with group_size None"),
        (GPTQ | {"sym": "yes"}, "sym is 'yes'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        (GPTQ | {"format": "bitblas"}, "gptq in the format 'bitblas'"),
        (GPTQ | {"is_marlin_format": True}, "gptq with is_marlin_format"),
        (GPTQ | {"pack_dtype": "int16"}, "gptq with pack_dtype 'int16'"),
        (GPTQ | {"adapter": {"name": "lora"}}, "gptq with adapter"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "other settings for some modules"),
        (AWQ | {"version": "gemv"}, "awq in the version 'gemv'"),
        (AWQ | {"backend": "llm-awq"}, "of llm-awq"),
        (AWQ | {"bits": 8}, "awq with bits 8"),
        (AWQ | {"group_size": 100}, "awq with group_size 100"),
        (compressed(format="float-quantized"), "type 'int'"),
        (compressed(format="naive-quantized"), "format 'naive-quantized'"),
        (compressed(format="mxfp8-quantized"), "format 'mxfp8-quantized'"),
        (compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (compressed(format="marlin-24"), "format 'marlin-24'"),
        (compressed(format=None), "format None"),
        (compressed({"type": "float"}), "type 'float'"),
        (compressed({"num_bits": 3}), "num_bits 3"),
        (compressed({"strategy": "block", "block_structure": [128, 128]}), "block_structure"),
        (compressed({"strategy": "block"}), "strategy 'block'"),
        (compressed({"strategy": "group", "group_size": -1}), "strategy 'group' and group_size -1"),
        (compressed({"dynamic": True}), "with dynamic"),
        (compressed({"actorder": "sideways"}), "actorder 'sideways'"),
        (compressed(group={"targets": ["Linear", "Embedding"]}), "targets"),
        (compressed(group={"targets": ["re:.*q_proj"]}), "targets"),
        (compressed(group={"format": "int-quantized"}), "format 'int-quantized'"),
        (compressed() | {"config_groups": {}}, "0 config_groups"),
        (compressed() | {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        (compressed() | {"config_groups": {"a": {"targets": ["Linear"]}}}, "without weights"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "format 'sparse-24-bitmask'"),
        (compressed(quantization_status="initialized"), "quantization_status 'initialized'"),
    ],
)
def test_config_of_something_else_when_read_then_refused_with_what_it_is_and_what_is_supported(
    config: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*; supported are gptq .* awq .* compressed-tensors"):
        scheme_of(config)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
def test_gptq_of_a_group_size_when_read_then_it_is_the_scheme_s(size: int) -> None:
    assert scheme_of(GPTQ | {"group_size": size}).group == size


def test_config_of_the_text_model_or_by_its_old_name_when_read_then_found_and_none_where_there_is_none() -> None:
    plain = SimpleNamespace()
    plain.get_text_config = lambda: plain
    assert read_scheme(plain) is None
    for name in ("quantization_config", "compression_config"):
        outer = SimpleNamespace(get_text_config=lambda name=name: SimpleNamespace(**{name: AWQ}))
        assert read_scheme(outer) == scheme_of(AWQ)
