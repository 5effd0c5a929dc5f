"""One small function per model family: from a transformers config to a `DecoderSpec`.

transformers has already turned older config formats (`rope_theta`, `rope_scaling`, `torch_dtype`) into its current one
when the config arrives here. To add a family: say here what it does differently from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from novainfer.errors import UnsupportedModelError
from workers.models.rope import longest_sequence, rotary_spec
from workers.models.spec import DecoderSpec, MlpSpec, MoeSpec, NormNames, RotarySpec

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
LAYER_WINDOWS = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class FamilyInput:
    """What a family's function reads."""

    config: Any  # transformers.PreTrainedConfig of the text model
    dtype: torch.dtype
    serve_length: int | None  # longest sequence asked for, in tokens


def decoder_spec(config: Any, dtype: torch.dtype, serve_length: int | None = None) -> DecoderSpec:
    """The spec of a config whose model_type is in `FAMILIES`.

    Raises `UnsupportedModelError` if it asks for something that the decoder cannot do.
    """
    text_config = config.get_text_config() if config.model_type in _MULTIMODAL else config
    # transformers heeds the first in every family, and some families the second.
    if not getattr(text_config, "is_causal", True) or getattr(text_config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention is not supported: this checkpoint does not generate text")
    spec = FAMILIES[config.model_type](FamilyInput(text_config, dtype, serve_length))
    _check(spec, config.model_type)
    return spec


def _check(spec: DecoderSpec, family: str) -> None:
    """Raises `UnsupportedModelError` for sizes that do not fit together."""
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads ({spec.num_heads}) is not a multiple of num_key_value_heads ({spec.num_kv_heads})"
        )
    for mlp in spec.mlps:
        if isinstance(mlp, MoeSpec) and not 1 <= mlp.top_k <= mlp.num_experts:
            raise UnsupportedModelError(f"num_experts_per_tok ({mlp.top_k}) is not one of {mlp.num_experts} experts")
    is_partial = any(2 * len(rotary.inverse_frequencies) < spec.head_dim for rotary in spec.rotaries)
    if is_partial and family not in _PARTIAL_ROTARY:
        raise UnsupportedModelError(f"partial_rotary_factor is not known for '{family}': transformers does not read it")


def _without_biases(given: FamilyInput) -> DecoderSpec:
    """What Llama and its relatives have in common. A bias in a config is heeded where transformers' code does so."""
    c = given.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    activation = _activation(c.hidden_activation if c.model_type in _HIDDEN_ACTIVATION else c.hidden_act)
    rotary = _rotary(given, c.rope_parameters, head_dim)
    return DecoderSpec(
        architecture=c.model_type,
        dtype=given.dtype,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads or c.num_attention_heads,
        head_dim=head_dim,
        max_position=longest_sequence(_flat(c.rope_parameters), c.max_position_embeddings, given.serve_length),
        sliding_windows=(None,) * c.num_hidden_layers,
        rotaries=rotary,
        mlps=(MlpSpec(intermediate_size=c.intermediate_size, activation=activation),) * c.num_hidden_layers,
        tie_word_embeddings=bool(c.tie_word_embeddings),
        norm_eps=c.rms_norm_eps,
        attention_scale=head_dim**-0.5,
    )


def _with_attention_bias(given: FamilyInput) -> DecoderSpec:
    bias = bool(getattr(given.config, "attention_bias", False))
    return replace(_without_biases(given), qkv_bias=bias, output_bias=bias)


def _llama(given: FamilyInput) -> DecoderSpec:
    return replace(_with_attention_bias(given), mlp_bias=bool(getattr(given.config, "mlp_bias", False)))


def _mistral(given: FamilyInput) -> DecoderSpec:
    return replace(_without_biases(given), sliding_windows=_same_window(given))


def _qwen2(given: FamilyInput) -> DecoderSpec:
    return replace(_without_biases(given), sliding_windows=_layer_windows(given), qkv_bias=True)


def _qwen3(given: FamilyInput) -> DecoderSpec:
    return replace(_with_attention_bias(given), sliding_windows=_layer_windows(given), qk_norm="head")


def _gemma2(given: FamilyInput) -> DecoderSpec:
    c = given.config
    return replace(
        _with_attention_bias(given),
        sliding_windows=_layer_windows(given),
        norm_weight_offset=1.0,
        norms=NormNames(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        attention_scale=c.query_pre_attn_scalar**-0.5,
        attention_soft_cap=c.attn_logit_softcapping,
        embedding_multiplier=torch.tensor(c.hidden_size**0.5, dtype=given.dtype).item(),  # rounded as in training
        logits_soft_cap=c.final_logit_softcapping,
    )


def _gemma3_text(given: FamilyInput) -> DecoderSpec:
    # Gemma 3's own code ignores attn_logit_softcapping.
    return replace(_gemma2(given), attention_soft_cap=None, qk_norm="head")


def _gemma3(given: FamilyInput) -> DecoderSpec:
    return _inside(_gemma3_text(given))


def _mistral3(given: FamilyInput) -> DecoderSpec:
    inside = given.config.model_type
    if inside != "mistral":
        raise UnsupportedModelError(f"a text model of the type '{inside}' inside of 'mistral3' is not supported")
    return _inside(_mistral(given))


def _inside(spec: DecoderSpec) -> DecoderSpec:
    """The text model inside a multimodal checkpoint, with its parts' names as transformers saves them."""
    return replace(
        spec,
        prefix="language_model.model.",
        lm_head="language_model.lm_head",
        ignored_prefixes=("vision_tower.", "multi_modal_projector."),
    )


def with_stored_names(spec: DecoderSpec, names: Collection[str]) -> DecoderSpec:
    """For a checkpoint with these tensors: a multimodal one may have the names that the parts have in transformers' own
    modules, and not those that it saves them by. Others may have been saved without the part that makes the logits.
    """
    if spec.prefix == "model." and "model.norm.weight" not in names and "norm.weight" in names:
        return replace(spec, prefix="")
    if spec.prefix != "language_model.model." or "model.language_model.embed_tokens.weight" not in names:
        return spec
    ignored = tuple(f"model.{prefix}" for prefix in spec.ignored_prefixes)
    return replace(spec, prefix="model.language_model.", lm_head="lm_head", ignored_prefixes=ignored)


def _phi3(given: FamilyInput) -> DecoderSpec:
    return replace(_without_biases(given), sliding_windows=_same_window(given), packed_projections=True)


def _olmo2(given: FamilyInput) -> DecoderSpec:
    spec = _with_attention_bias(given)
    return replace(
        spec,
        norms=NormNames(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        qk_norm="full",
        norm_weight_offset=_NO_OFFSET,
        rotaries=tuple(replace(rotary, round_to_dtype=False) for rotary in spec.rotaries),
    )


def _granite(given: FamilyInput) -> DecoderSpec:
    c = given.config
    return replace(
        _llama(given),
        attention_scale=c.attention_multiplier,
        embedding_multiplier=c.embedding_multiplier,
        residual_multiplier=c.residual_multiplier,
        logits_divisor=c.logits_scaling,
    )


def _qwen3_moe(given: FamilyInput) -> DecoderSpec:
    c = given.config
    spec = _with_attention_bias(given)
    experts = MoeSpec(
        num_experts=c.num_experts,
        top_k=c.num_experts_per_tok,
        intermediate_size=c.moe_intermediate_size,
        activation=_activation(c.hidden_act),
        normalize_weights=bool(c.norm_topk_prob),
        round_weights=True,
        router="mlp.gate",
        expert="mlp.experts.{}",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    )
    sparse = [
        i not in c.mlp_only_layers and c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0
        for i in range(c.num_hidden_layers)
    ]
    return replace(
        spec,
        sliding_windows=_same_window(given),
        qk_norm="head",
        mlps=tuple(experts if is_sparse else mlp for is_sparse, mlp in zip(sparse, spec.mlps, strict=True)),
    )


def _mixtral(given: FamilyInput) -> DecoderSpec:
    c = given.config
    experts = MoeSpec(
        num_experts=c.num_local_experts,
        top_k=c.num_experts_per_tok,
        intermediate_size=c.intermediate_size,
        activation=_activation(c.hidden_act),
        normalize_weights=True,
        round_weights=False,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        gate="w1",
        up="w3",
        down="w2",
    )
    return replace(_without_biases(given), sliding_windows=_same_window(given), mlps=(experts,) * c.num_hidden_layers)


FAMILIES: dict[str, Callable[[FamilyInput], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "mistral3": _mistral3,
}
# Changes no weight; but with an offset a norm multiplies by its weights in float32 and rounds once, as OLMo 2's does.
_NO_OFFSET = float(torch.finfo(torch.float32).tiny)
_MULTIMODAL = ("gemma3", "mistral3")  # families whose text model is a part of the checkpoint
_HIDDEN_ACTIVATION = ("gemma2", "gemma3_text")  # families that read this in place of `hidden_act`
_PARTIAL_ROTARY = ("phi3",)  # families whose embedding may turn a part of each head alone


def _activation(name: str) -> str:
    if name not in ACTIVATION_NAMES:
        words = f"activation '{name}' is not supported by the native decoder: try --model-backend transformers"
        raise UnsupportedModelError(words)
    return ACTIVATION_NAMES[name]


def _layer_types(config: Any) -> list[str]:
    types: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = sorted(set(types) - set(LAYER_WINDOWS))
    if unknown:
        raise UnsupportedModelError(f"layer types {', '.join(unknown)} are not supported")
    return types


def _same_window(given: FamilyInput) -> tuple[int | None, ...]:
    window: int | None = given.config.sliding_window
    return tuple(window for _ in range(given.config.num_hidden_layers))


def _layer_windows(given: FamilyInput) -> tuple[int | None, ...]:
    types = _layer_types(given.config)
    if given.config.sliding_window is None and any(LAYER_WINDOWS[layer_type] for layer_type in types):
        raise UnsupportedModelError("there are layers of the type 'sliding_attention', but sliding_window is null")
    return tuple(given.config.sliding_window if LAYER_WINDOWS[layer_type] else None for layer_type in types)


def _is_per_layer_type(rope_parameters: dict[str, Any]) -> bool:
    return any(name in rope_parameters for name in LAYER_WINDOWS)


def _flat(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that set the model's length: those of the full-attention layers."""
    if not _is_per_layer_type(rope_parameters):
        return rope_parameters
    parameters: dict[str, Any] = rope_parameters.get("full_attention") or rope_parameters["sliding_attention"]
    return parameters


def _rotary(given: FamilyInput, rope_parameters: dict[str, Any], head_dim: int) -> tuple[RotarySpec, ...]:
    """Per layer; Gemma 3 has other parameters for sliding than for full layers."""
    c = given.config

    def spec(parameters: dict[str, Any]) -> RotarySpec:
        return rotary_spec(parameters, head_dim, c.max_position_embeddings, given.serve_length)

    if not _is_per_layer_type(rope_parameters):
        one = spec(rope_parameters)
        return tuple(one for _ in range(c.num_hidden_layers))
    if not getattr(c, "layer_types", None):
        raise UnsupportedModelError("rope_parameters are given by layer type, but there are no layer_types")
    types = _layer_types(c)
    missing = sorted(name for name in set(types) if not rope_parameters.get(name))
    if missing:
        raise UnsupportedModelError(f"rope_parameters are given by layer type, but not for {', '.join(missing)}")
    # transformers looks for this one value of yarn beside the layer types, and never among a layer type's own.
    shared = {"truncate": rope_parameters.get("truncate", True)}
    by_type = {name: spec(rope_parameters[name] | shared) for name in set(types)}
    return tuple(by_type[name] for name in types)
