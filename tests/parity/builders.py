"""Random checkpoints in Hugging Face format, made on the spot from transformers' own config and model classes.

Each is tiny, has a byte-level tokenizer and a chat template (a server can serve it), and weights large enough that
greedy decoding has clear margins. Everything is a function of the family's name.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

VOCAB_SIZE = 271  # 256 bytes, 3 special tokens, and some ids that no text maps to; odd, so that ranks need padding
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint: transformers' model_type and the config values that it tests."""

    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    vision_config: dict[str, Any] | None = None  # the text model is a part of a multimodal one


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


_LAYERS_4 = {"num_hidden_layers": 4, "sliding_window": 12}
_LATENT = {  # multi-head latent attention: values are shorter than keys
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MOE = {"num_experts_per_tok": 2, "sliding_window": None}
_LONGROPE = _rope(
    "longrope",
    partial_rotary_factor=0.5,
    original_max_position_embeddings=128,
    short_factor=[1.0, 1.25, 1.5, 2.0],
    long_factor=[1.0, 2.0, 4.0, 8.0],
)

_FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": Family(
        "llama",
        {
            "tie_word_embeddings": True,
            **_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
            ),
        },
    ),
    "llama_linear": Family("llama", {"head_dim": 32, **_rope("linear", factor=4.0)}),
    "llama_dynamic": Family("llama", _rope("dynamic", factor=2.0)),
    "qwen2": Family(
        "qwen2", {**_LAYERS_4, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True}
    ),
    "qwen2_yarn": Family("qwen2", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen3": Family("qwen3", {"head_dim": 32}),
    "mistral": Family("mistral", {"sliding_window": 12, "num_key_value_heads": 1}),
    "gemma2": Family(
        "gemma2", {**_LAYERS_4, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            **_LAYERS_4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            },
        },
    ),
    "gemma3_multimodal": Family(
        "gemma3",
        {**_LAYERS_4, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16},
        {"model_type": "siglip_vision_model", **_VISION},
    ),
    "mistral3": Family(
        "mistral3",
        {"model_type": "mistral", "sliding_window": 12, "head_dim": 32},
        {"model_type": "pixtral", **_VISION},
    ),
    "phi3": Family("phi3", {"sliding_window": 12, "pad_token_id": 0}),
    "phi3_longrope": Family("phi3", {**_LONGROPE, "original_max_position_embeddings": 128, "pad_token_id": 0}),
    "olmo2": Family("olmo2", {}),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        {**_MOE, "num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "mixtral": Family("mixtral", {**_MOE, "num_local_experts": 4, "sliding_window": 12}),
}

FAMILIES: list[str] = list(_FAMILIES)  # those that the native decoder runs

_FOREIGN: dict[str, Family] = {
    "starcoder2": Family("starcoder2", {"sliding_window": 12}),
    "gpt_neox": Family("gpt_neox"),
    "gpt2": Family("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "cohere": Family("cohere", {"logit_scale": 0.5}),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "glm": Family("glm", {"head_dim": 16, "pad_token_id": 0}),
}

FOREIGN_FAMILIES: list[str] = list(_FOREIGN)  # those that only the transformers backend runs

_UNSUPPORTED: dict[str, Family] = {
    "stablelm": Family("stablelm"),
    "bloom": Family("bloom"),
    "gpt_oss": Family("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def family(name: str) -> Family:
    """Its definition."""
    return (_FAMILIES | _FOREIGN | _UNSUPPORTED)[name]


def build_checkpoint(name: str, path: Path, dtype: str = "float32") -> Path:
    """Write the family's checkpoint into the new folder `path` and return it."""
    path.mkdir(parents=True)
    config = build_config(name)
    model = auto_class(config.model_type).from_config(config)
    _randomize(model, zlib.crc32(name.encode()))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _write_tokenizer(path)
    return path


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; the names' dots are written as double underscores."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    """Of config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def auto_class(model_type: str) -> Any:
    """transformers' own, which makes a model that writes text of such a config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type == "mistral3" else AutoModelForCausalLM


def build_config(name: str) -> Any:
    """The family's transformers config."""
    from transformers import AutoConfig

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    definition = family(name)
    if definition.vision_config is None:
        return AutoConfig.for_model(definition.model_type, **(values | definition.values))
    return AutoConfig.for_model(
        definition.model_type,
        text_config=values | definition.values,
        vision_config=definition.vision_config,
        tie_word_embeddings=False,
    )


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Projections keep their input's size; norms are near 1, and logits spread by about 3."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            elif parameter is model.get_output_embeddings().weight:  # type: ignore[operator]
                parameter.copy_((0.3 if tied else 0.4) * noise)
            elif parameter is model.get_input_embeddings().weight:  # type: ignore[operator]
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def _write_tokenizer(path: Path) -> None:
    """One token per byte; the special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
