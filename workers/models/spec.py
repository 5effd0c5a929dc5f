"""What distinguishes one decoder from another, as data: `families` makes it from a config, `decoder` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from novainfer.mode import NOT_QUANTIZED


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes that the worker runtime needs of any model."""

    architecture: str  # the config's model_type
    dtype: torch.dtype  # of weights, activations, keys and values
    vocab_size: int  # width of the logits
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # over all ranks
    head_dim: int
    max_position: int  # longest sequence in tokens
    sliding_windows: tuple[int | None, ...]  # [num_layers]; None = full attention
    stored_quantization: str = NOT_QUANTIZED  # of the weights as the checkpoint has them; see `Mode.quantization`

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of one kind of layer. Layers with equal specs share one table."""

    inverse_frequencies: tuple[float, ...]  # [rotary_dim / 2], float32 values
    attention_factor: float = 1.0  # multiplies cos and sin
    round_to_dtype: bool = True  # cos and sin are rounded to the model's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Gated MLP: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: str  # one of kernels.backend.ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixture of gated MLPs: each token goes through its top_k experts. Names are relative to the layer."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    activation: str
    normalize_weights: bool  # the top_k probabilities are divided by their sum
    round_weights: bool  # ... and rounded to the model's dtype
    router: str
    expert: str  # with {} for the expert's number
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Which RMSNorms a layer has before and after each of its two parts, by their names in the checkpoint."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A transformer decoder with rotary positions, RMSNorm, grouped-query attention and gated MLPs."""

    rotaries: tuple[RotarySpec, ...]  # [num_layers]
    mlps: tuple[MlpSpec | MoeSpec, ...]  # [num_layers]
    tie_word_embeddings: bool
    norm_eps: float
    norm_weight_offset: float = 0.0  # 1.0: the checkpoint stores weight - 1 (Gemma)
    norms: NormNames = NormNames()
    attention_scale: float
    attention_soft_cap: float | None = None
    qk_norm: Literal["none", "head", "full"] = (
        "none"  # RMSNorm of queries and keys: per head, or over all heads at once
    )
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    packed_projections: bool = False  # the checkpoint holds qkv_proj and gate_up_proj (Phi-3)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    prefix: str = "model."  # of every tensor but the vocabulary projection
    lm_head: str = "lm_head"
    ignored_prefixes: tuple[str, ...] = ()  # tensors that are not the text model's

    @property
    def has_plain_logits(self) -> bool:
        """Whether they are what the vocabulary projection yields."""
        return self.logits_divisor == 1.0 and self.logits_soft_cap is None
