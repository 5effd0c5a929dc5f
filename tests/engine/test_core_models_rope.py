"""Rotary parameters as transformers has them when it builds a model, wherever a config.json says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from novainfer.errors import UnsupportedModelError
from tests.parity.builders import build_checkpoint, build_config
from tests.parity.harness import load, paged_greedy, ragged_prompts, transformers_greedy
from workers.models.families import decoder_spec
from workers.models.loader import load_hf_config
from workers.models.spec import DecoderSpec

pytestmark = pytest.mark.stage0

_YARN = {"type": "yarn", "factor": 8.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


def change(folder: Path, **values: Any) -> Path:
    """Without the rotary parameters that it had."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | values))
    return folder


def spec_of(folder: Path) -> DecoderSpec:
    return decoder_spec(load_hf_config(folder), torch.float32)


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 256}])
@pytest.mark.parametrize(
    ("name", "rope", "longest"),
    [
        ("qwen2_yarn", _YARN, 512),
        ("llama", _LLAMA3, 512),
        ("llama", _LONGROPE, 64),
        ("mistral", _LONGROPE, 64),
        ("phi3", _LONGROPE, 64),
    ],
)
def test_a_pretrained_length_beside_the_rotary_parameters_when_loaded_then_it_counts_as_in_transformers(
    name: str, rope: dict[str, Any], longest: int, inner: dict[str, Any], tmp_path: Path
) -> None:
    folder = build_checkpoint(name, tmp_path / "model")
    change(folder, rope_scaling=rope | inner, rope_theta=1e4, original_max_position_embeddings=64)
    theirs = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    spec = spec_of(folder)
    assert spec.max_position == longest
    assert spec.rotaries[0].inverse_frequencies == pytest.approx(theirs.inv_freq.tolist(), rel=1e-6)
    assert spec.rotaries[0].attention_factor == pytest.approx(theirs.attention_scaling)
    prompts = ragged_prompts(5)  # with the new tokens within the pretrained length
    assert paged_greedy(*load(folder), prompts, 16).tokens == transformers_greedy(folder, prompts, 16).tokens


@pytest.mark.parametrize("shared", [{}, {"truncate": False}, {"truncate": True}])
def test_yarn_of_a_layer_type_when_it_says_whether_to_truncate_then_only_what_stands_beside_it_counts(
    shared: dict[str, bool], tmp_path: Path
) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "truncate": False, "beta_fast": 8,
    }  # fmt: skip
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}, "full_attention": yarn, **shared}
    folder = tmp_path / "model"
    config = build_config("gemma3")
    config.save_pretrained(folder)
    change(folder, rope_parameters=rope)
    spec = spec_of(folder)
    theirs = AutoModelForCausalLM.from_config(load_hf_config(folder)).model.rotary_emb
    for rotary, layer_type in zip(spec.rotaries, config.layer_types, strict=True):
        expected = getattr(theirs, f"{layer_type}_inv_freq").tolist()
        assert rotary.inverse_frequencies == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "parts", "reason"),
    [
        ("llama", ["full_attention"], "there are no layer_types"),
        ("qwen2", ["sliding_attention"], "not for full_attention"),
    ],
)
def test_rotary_parameters_by_layer_type_when_they_are_not_those_of_the_layers_then_refused(
    name: str, parts: list[str], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    build_config(name).save_pretrained(folder)
    change(folder, rope_parameters={part: {"rope_type": "default", "rope_theta": 1e4} for part in parts})
    with pytest.raises(UnsupportedModelError, match=reason):
        spec_of(folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("starcoder2", {"rope_scaling": _LONGROPE, "rope_theta": 1e4, "original_max_position_embeddings": 48}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "longrope",
                        "rope_theta": 1e4,
                        "original_max_position_embeddings": 48,
                        "short_factor": [1.0] * 16,
                        "long_factor": [4.0] * 16,
                    },
                },
            },
        ),
    ],
)
def test_transformers_code_with_longrope_when_asked_for_more_than_it_was_pretrained_on_then_refused(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder = change(build_checkpoint(name, tmp_path / "model"), **values)
    assert load(folder, model_backend="transformers")[0].spec.max_position == 48
    with pytest.raises(UnsupportedModelError, match="max_model_len 200 is above the model's own limit of 48"):
        load(folder, model_backend="transformers", max_model_len=200)
