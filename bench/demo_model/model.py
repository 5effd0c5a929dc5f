"""The demo model's configuration, and its files in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.demo_model.tokenizer import END_OF_TEXT, MAX_LENGTH, TURN_END, VOCAB_SIZE, save_tokenizer

# 4,657,152 parameters, 9.3 MB in bfloat16.
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": MAX_LENGTH,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}

_EMBEDDING_STD = 0.1


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model in fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config.from_dict({**ARCHITECTURE, "use_cache": False})
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    _initialise(model)
    return model


@torch.no_grad()
def _initialise(model: Qwen3ForCausalLM) -> None:
    """Embeddings loud enough not to be drowned by the first layer; layers that begin as the identity.

    The final norm makes up for the loud embedding, which is also the output matrix: logits begin with deviation 1.
    """
    model.model.embed_tokens.weight.normal_(std=_EMBEDDING_STD)
    model.model.norm.weight.fill_(1 / (_EMBEDDING_STD * model.config.hidden_size**0.5))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the checkpoint: weights rounded to bfloat16, configuration, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    weights = directory / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private
    turn_end, end_of_text = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    ends = {"bos_token_id": None, "eos_token_id": turn_end, "pad_token_id": end_of_text}
    config = {**ARCHITECTURE, **ends, "torch_dtype": "bfloat16", "use_cache": True}
    generation = {"eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text, "do_sample": False}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, directory)
