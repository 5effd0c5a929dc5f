"""What transformers' own code is asked before it is trusted, and in which words it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, RobertaConfig, RobertaForCausalLM
from transformers.models.starcoder2 import modeling_starcoder2

from novainfer.errors import UnsupportedModelError
from tests.parity.builders import build_checkpoint
from tests.parity.harness import load
from workers.models import transformers_probe

pytestmark = pytest.mark.stage0

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HUNYUAN: dict[str, Any] = {
    "head_dim": 16, "num_experts": 2, "moe_topk": [1, 1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("hunyuan_v1_moe", _HUNYUAN, r"does not work with packed weights .*\(AttributeError: .* 'weight'\)"),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, r"does not work with .* a paged KV cache .*\(Attribute"),
        ("modernbert-decoder", {"global_attn_every_n_layers": 1}, "does not tell which part of it is the decoder"),
    ],
)
def test_foreign_code_that_fails_when_it_is_probed_then_the_words_are_a_users_and_keep_the_cause(
    kind: str, values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**_SMALL, **values})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' cannot run .*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_with_positions_of_its_own_when_they_matter_little_then_refused_whatever_its_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(**_SMALL, is_decoder=True))
    model.roberta.embeddings.position_embeddings.weight.data *= 0.05
    model.to(dtype).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="its positions do not begin at 0"):
        load(tmp_path)


@pytest.mark.parametrize(("hidden", "is_served"), [(0.0, True), (0.4, False)])
def test_attention_with_a_term_that_the_interface_does_not_show_when_probed_in_bf16_then_refused_if_it_exceeds_rounding(
    hidden: float, is_served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = modeling_starcoder2.eager_attention_forward

    def with_sink(module: Any, *arguments: Any, **more: Any) -> tuple[Tensor, Any]:
        attended, weights = eager(module, *arguments, **more)
        return attended * (1.0 - hidden * 0.1), weights

    folder = build_checkpoint("starcoder2", tmp_path / "model", "bfloat16")
    monkeypatch.setattr(modeling_starcoder2, "eager_attention_forward", with_sink)
    if is_served:
        load(folder)
        return
    with pytest.raises(UnsupportedModelError, match="the attention interface does not show") as caught:
        load(folder)
    difference = re.search(r"by (\S+) of", str(caught.value))
    assert difference is not None
    assert float(difference[1]) < transformers_probe.TOLERANCE[torch.bfloat16]  # what let it pass before


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("phimoe", {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "qwen2_moe",
            {
                "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4,
                "use_sliding_window": True, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 48,
            },
        ),
    ],
)  # fmt: skip
def test_foreign_code_with_a_window_in_its_mask_alone_then_served_only_as_far_as_that_does_not_matter(
    kind: str, values: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SMALL, **values})).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"window of 12 tokens .* --max-model-len 12"):
        load(tmp_path)
    load(tmp_path, max_model_len=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreign_code_that_shows_a_window_which_its_mask_lacks_then_served_only_as_far_as_that_does_not_matter(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("olmoe", **_SMALL, num_experts=4, num_experts_per_tok=2, sliding_window=8)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"window of 8 tokens .* --max-model-len 8"):
        load(tmp_path)
    load(tmp_path, max_model_len=8)


@pytest.mark.parametrize("family", ["starcoder2", "gemma2", "qwen2"])
def test_foreign_code_that_shows_the_window_of_its_mask_then_served_at_any_length(family: str, tmp_path: Path) -> None:
    folder = build_checkpoint(family, tmp_path / "model")
    windows = load(folder, model_backend="transformers")[0].spec.sliding_windows
    assert set(windows) - {None} == {12}
