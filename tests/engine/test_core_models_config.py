"""From config.json to the declarative spec: formats old and new, windows, limits, and how heads are split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kernels.backend import select_backend
from novainfer.checkpoint import check_split
from novainfer.errors import ConfigError, UnsupportedModelError
from tests.parity.builders import FAMILIES, build_config, family
from workers.layers.attention import HeadShard
from workers.layers.norm import RmsNorm
from workers.layers.rotary import rotary_table
from workers.models.families import decoder_spec
from workers.models.loader import load_hf_config
from workers.models.spec import DecoderSpec, MlpSpec, MoeSpec, RotarySpec
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0


def spec_of(name: str, serve_length: int | None = None) -> DecoderSpec:
    return decoder_spec(build_config(name), torch.float32, serve_length)


def spec_of_json(config: dict[str, Any], folder: Path) -> DecoderSpec:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return decoder_spec(load_hf_config(folder), torch.float32)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith(("gemma3", "mistral3"))])
def test_config_given_older_format_when_read_then_gives_the_same_spec(name: str, tmp_path: Path) -> None:
    config = build_config(name).to_dict()
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config.pop("dtype", None)
    config["torch_dtype"] = "float32"
    assert spec_of_json(config, tmp_path / "old") == spec_of(name)


def test_gemma3_given_older_format_when_read_then_sliding_and_full_layers_have_their_own_rotary(
    tmp_path: Path,
) -> None:
    config = build_config("gemma3").to_dict()
    config.pop("rope_parameters")
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    spec = spec_of_json(config, tmp_path / "old")
    sliding, full = spec.rotaries[0], spec.rotaries[2]
    assert sliding.inverse_frequencies[0] == 1.0
    assert full.inverse_frequencies[0] == 1 / 8
    assert spec.rotaries == (sliding, sliding, full, sliding)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", (None, None)),
        ("mistral", (12, 12)),
        ("mistral3", (12, 12)),
        ("qwen2", (None, None, 12, 12)),
        ("gemma2", (12, None, 12, None)),
        ("gemma3", (12, 12, None, 12)),
        ("qwen3_moe", (None, None)),
    ],
)
def test_spec_given_family_when_built_then_each_layer_has_its_window(name: str, windows: tuple[int | None]) -> None:
    assert spec_of(name).sliding_windows == windows


def test_qwen3_moe_given_dense_layers_when_built_then_only_the_others_have_experts() -> None:
    assert [type(mlp) for mlp in spec_of("qwen3_moe").mlps] == [MoeSpec, MlpSpec]


@pytest.mark.parametrize(("serve_length", "limit", "long"), [(None, 128, False), (128, 128, False), (129, 512, True)])
def test_longrope_given_length_to_serve_when_built_then_chooses_one_set_of_factors(
    serve_length: int | None, limit: int, long: bool
) -> None:
    spec = spec_of("phi3_longrope", serve_length)
    assert spec.max_position == limit
    factors = family("phi3_longrope").values["rope_parameters"]["long_factor" if long else "short_factor"]
    plain = [10000.0 ** (-i / 4) for i in range(4)]
    assert spec.rotaries[0].inverse_frequencies == pytest.approx([p / f for p, f in zip(plain, factors, strict=True)])


def test_gemma_given_bidirectional_attention_when_built_then_refused() -> None:
    config = build_config("gemma3")
    config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        decoder_spec(config, torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_given_a_mask_that_is_not_causal_when_built_then_refused(name: str) -> None:
    config = build_config(name)
    config.get_text_config().is_causal = False
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        decoder_spec(config, torch.float32)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_layers_given_their_type_without_a_window_when_built_then_refused(name: str) -> None:
    config = build_config(name)
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="sliding_window is null"):
        decoder_spec(config, torch.float32)


def test_mistral3_given_another_text_model_when_built_then_refused_by_its_name() -> None:
    config = build_config("mistral3")
    config.text_config = build_config("llama")
    with pytest.raises(UnsupportedModelError, match="'llama' inside of 'mistral3'"):
        decoder_spec(config, torch.float32)


def test_longrope_given_its_first_name_when_read_then_gives_the_same_spec(tmp_path: Path) -> None:
    config = build_config("phi3_longrope").to_dict()
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    factors = {name: rope[name] for name in ("short_factor", "long_factor")}
    for kind in ("type", "rope_type"):
        config["rope_scaling"] = {kind: "su", **factors}
        assert spec_of_json(config, tmp_path / kind) == spec_of("phi3_longrope")


def test_rotary_given_unknown_type_when_built_then_refused() -> None:
    config = build_config("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="'spiral' is not supported"):
        decoder_spec(config, torch.float32)


def test_rotary_table_given_model_dtype_when_built_then_values_are_rounded_to_it_but_held_in_float32() -> None:
    spec = RotarySpec(inverse_frequencies=(1.0, 0.1), attention_factor=2.0)
    table = rotary_table(spec, 50, torch.bfloat16, torch.device("cpu"))
    assert table.shape == (50, 2, 2)
    assert table.dtype == torch.float32
    assert torch.equal(table, table.to(torch.bfloat16).float())
    assert table[0].tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_rotary_table_given_several_threads_when_built_then_one_makes_it_and_all_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    for name in ("cos", "sin"):
        function = getattr(torch.Tensor, name)

        def watched(angles: torch.Tensor, function: Callable[..., torch.Tensor] = function) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return function(angles)

        monkeypatch.setattr(torch.Tensor, name, watched)
    torch.set_num_threads(3)
    try:
        rotary_table(RotarySpec(inverse_frequencies=(1.0, 0.1)), 50, torch.float32, torch.device("cpu"))
        assert (seen, torch.get_num_threads()) == ([1, 1], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (8, 4, 1, [(8, 4, 0, 0, 1)]),
        (8, 4, 2, [(4, 2, 0, 0, 1), (4, 2, 4, 2, 1)]),
        (8, 2, 4, [(2, 1, 0, 0, 2), (2, 1, 2, 0, 2), (2, 1, 4, 1, 2), (2, 1, 6, 1, 2)]),
        (4, 1, 2, [(2, 1, 0, 0, 2), (2, 1, 2, 0, 2)]),
    ],
)
def test_head_shard_given_ranks_when_split_then_every_query_head_meets_its_kv_head(
    heads: int, kv_heads: int, ranks: int, expected: list[tuple[int, ...]]
) -> None:
    spec = _with_heads(heads, kv_heads)
    shards = [HeadShard.of(spec, TensorParallel(rank, ranks, None)) for rank in range(ranks)]
    assert [(s.num_heads, s.num_kv_heads, s.first_head, s.first_kv_head, s.kv_replicas) for s in shards] == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "reason"),
    [
        (9, 3, 2, "9 attention heads cannot be split evenly over 2 ranks"),
        (12, 3, 2, "3 key/value heads cannot be split evenly over 2 ranks"),
        (12, 3, 4, "3 key/value heads cannot be replicated evenly over 4 ranks"),
    ],
)
def test_head_shard_given_indivisible_heads_when_split_then_refused(
    heads: int, kv_heads: int, ranks: int, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        HeadShard.of(_with_heads(heads, kv_heads), TensorParallel(0, ranks, None))


def test_given_heads_and_ranks_when_the_config_alone_is_looked_at_then_the_same_are_refused(tmp_path: Path) -> None:
    for heads, kv_heads, ranks in product((4, 6, 9, 12), (1, 2, 3, 4), range(1, 13)):
        values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": values}), encoding="utf-8")
        early = late = None
        try:
            check_split(tmp_path, ranks)
        except ConfigError as error:
            early = str(error).partition(": ")[2]
        try:
            HeadShard.of(_with_heads(heads, kv_heads), TensorParallel(0, ranks, None))
        except UnsupportedModelError as error:
            late = str(error)
        assert early == late, (heads, kv_heads, ranks)


def _with_heads(heads: int, kv_heads: int) -> DecoderSpec:
    return replace(spec_of("llama"), num_heads=heads, num_kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("rope", "asked", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, None, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, None, 512),
        ({"rope_type": "linear", "factor": 4.0}, None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 1024, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024, 512),
    ],
)
def test_config_given_a_length_extension_when_read_then_the_model_is_as_long_as_that_makes_it(
    rope: dict[str, Any], asked: int | None, longest: int
) -> None:
    config = build_config("llama")
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    assert decoder_spec(config, torch.float32, asked).max_position == longest


@pytest.mark.parametrize("name", ["mistral", "mixtral", "phi3", "qwen2"])
def test_config_given_biases_that_the_familys_code_does_not_read_when_read_then_they_are_not_asked_for(
    name: str,
) -> None:
    config = build_config(name)
    plain = decoder_spec(config, torch.float32)
    config.attention_bias = config.mlp_bias = True
    assert decoder_spec(config, torch.float32) == plain


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_given_the_activation_of_other_families_when_read_then_its_own_counts(name: str) -> None:
    config = build_config(name)
    config.hidden_act = "gelu"
    assert {mlp.activation for mlp in decoder_spec(config, torch.float32).mlps if isinstance(mlp, MlpSpec)} == {
        "gelu_tanh"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_olmo2_norm_given_a_narrow_type_when_computed_then_rounded_once_as_in_transformers(dtype: torch.dtype) -> None:
    spec = decoder_spec(build_config("olmo2"), dtype)
    torch.manual_seed(0)
    x, theirs = torch.randn(64, 64).to(dtype), Olmo2RMSNorm(64, spec.norm_eps).to(dtype)
    theirs.weight.data = (1 + 0.2 * torch.randn(64)).to(dtype)
    ours = RmsNorm(select_backend(torch.device("cpu")), theirs.weight.data, spec.norm_eps, spec.norm_weight_offset)
    twice = RmsNorm(select_backend(torch.device("cpu")), theirs.weight.data, spec.norm_eps, 0.0)
    with torch.inference_mode():
        expected = theirs(x)
        assert (ours(x) != expected).float().mean() < 0.01  # sums of squares in another order
        assert (twice(x) != expected).float().mean() > 0.1
