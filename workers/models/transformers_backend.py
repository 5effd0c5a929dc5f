"""Any other causal LM: transformers' own modelling code over our paged KV cache.

transformers lets a model's attention function be chosen by name and hands it every extra argument of the model's
forward. Our function is registered once; a step's batch and caches travel as such an argument, so nothing is ambient.
The flattened tokens of a step are one sequence [1, T] to the model; `position_ids` says where each token really stands.

Before a model is accepted it is probed (`transformers_probe`): which layers call the attention function with which
shapes, and whether tiny prompts give the logits of transformers' eager attention. A model that keeps other state or
needs more than the cache (recurrent layers, ALiBi, attention sinks) fails there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backend import AttentionParams, KernelBackend, MakeSampling
from kernels.backend import Linear as PackedWeight
from kernels.linear.schemes import SCHEMES, WeightScheme, head_scheme
from novainfer.config import ModelConfig
from novainfer.errors import UnsupportedModelError, words_of
from workers.models.base import CausalLM, ForwardBatch, KvCaches
from workers.models.families import LAYER_WINDOWS
from workers.models.rope import longest_sequence
from workers.models.spec import ModelSpec
from workers.quantized.linears import widened_tensors
from workers.quantized.scheme import QUANTIZATION_FIELDS, StoredScheme
from workers.quantized.tensors import QuantizedTensors
from workers.weights import WeightReader

ATTENTION_NAME = "novainfer_paged"
STEP_ARGUMENT = "novainfer_step"
_ROUTERS = ("gate", "router")  # transformers' names for them


class AttentionStep(Protocol):
    """What stands behind the attention function during one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv], Dv <= D -> [T, H, Dv]."""
        ...


class PagedStep:
    """One step of the engine: keys and values go to the paged cache, queries read them from there."""

    def __init__(
        self, model: TransformersModel, kernels: KernelBackend, batch: ForwardBatch, kv_caches: KvCaches
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._batch = batch
        self._kv_caches = kv_caches

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        key_cache, value_cache = self._kv_caches[layer]
        value_dim = value.shape[2]
        padded = F.pad(value, (0, key.shape[2] - value_dim))  # latent attention has shorter values than keys
        self._kernels.store_kv(key, padded, key_cache, value_cache, self._batch.slot_mapping)
        attended = self._kernels.paged_attention(query, key_cache, value_cache, self._batch.metadata, params)
        self._model.progress += 1
        return attended[..., :value_dim]


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,  # transformers' calling convention: sliding_window, softcap, the model's own extras, and ours
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call: ([1, T, H, Dv], no attention weights)."""
    step: AttentionStep | None = arguments.get(STEP_ARGUMENT)
    layer = getattr(module, "layer_idx", None)
    if step is None or layer is None:
        raise UnsupportedModelError("its attention layers do not pass the step on, or have no layer_idx")
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=arguments.get("sliding_window"),
        soft_cap=arguments.get("softcap"),
    )
    attended = step.attend(layer, _tokens_first(query), _tokens_first(key), _tokens_first(value), params)
    return attended.unsqueeze(0), None


def _tokens_first(heads: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D]."""
    return heads[0].transpose(0, 1)


class PackedLinear(nn.Module):
    """Takes the place of `nn.Linear`, so that a row's bits do not depend on the batch."""

    def __init__(self, packed: PackedWeight, out_features: int) -> None:
        super().__init__()
        self._packed = packed
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self._packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)


class HiddenOutput:
    """What a base model would return; every optional part is absent."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class HiddenInput(nn.Module):
    """Takes the place of the decoder inside a causal LM: the hidden states are given instead of computed."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> HiddenOutput:
        """inputs_embeds [1, R, hidden] -> a model output that holds them."""
        return HiddenOutput(inputs_embeds)


class TransformersModel:
    """See `workers.models.base.CausalLM`."""

    def __init__(self, model: Any, spec: ModelSpec, kernels: KernelBackend) -> None:
        self.spec = spec
        self.progress = 0  # see `CausalLM`
        self.num_local_kv_heads = spec.num_kv_heads
        self.decoder = model.get_decoder()
        self._head = _with_replaced(model, _path_of(model, self.decoder), HiddenInput())
        self._kernels = kernels

    @property
    def is_static(self) -> bool:
        """See `CausalLM`: nobody knows."""
        return False

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, kv_caches: KvCaches) -> Tensor:
        """input_ids, positions [T] -> hidden states [T, hidden] after the final norm."""
        step = PagedStep(self, self._kernels, batch, kv_caches)
        hidden = decoder_forward(self.decoder, input_ids, positions, step)
        return hidden if batch.kept is None else hidden[batch.kept.index]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] float32."""
        logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0)).logits
        return logits[0].float()

    def pick(self, hidden: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """Never: only the model itself knows what it does to its logits."""
        return None


def decoder_forward(decoder: Any, input_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
    """One pass through a causal LM's decoder: hidden states [T, hidden]."""
    output = decoder(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        **{STEP_ARGUMENT: step},
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def load_transformers_model(
    folder: Path,
    hf_config: Any,
    config: ModelConfig,
    dtype: torch.dtype,
    kernels: KernelBackend,
    device: torch.device,
    stored: StoredScheme | None = None,
) -> CausalLM:
    """Load and probe; quantised weights are widened. Raises `UnsupportedModelError` if this model cannot run so."""
    from workers.models.transformers_probe import check_against_eager, probe_spec

    text_config = hf_config.get_text_config()
    max_position = _max_position(text_config, config.max_model_len)
    widened = None if stored is None else _widened(folder, hf_config, stored, dtype)
    model = _from_pretrained(folder, hf_config, config.trust_remote_code, dtype, widened).to(device)
    name = hf_config.model_type
    try:
        with torch.inference_mode():
            spec = probe_spec(model, name, dtype, max_position)
            if stored is not None:
                _check_no_conv1d(model)
                spec = replace(spec, stored_quantization=stored.name)
            _pack_linears(model, kernels, SCHEMES.get(config.quantization))
            loaded = TransformersModel(model, spec, kernels)
            check_against_eager(model, loaded, kernels, config.max_model_len or max_position)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"'{name}' cannot run through the transformers backend: {error}") from error
    except Exception as error:  # anything may go wrong in model code that was not written for this
        raise UnsupportedModelError(
            f"'{name}' cannot run through the transformers backend: its code does not work with packed weights and a "
            f"paged KV cache in place of its own ({words_of(error)})"
        ) from error
    return loaded


def _max_position(text_config: Any, max_model_len: int | None) -> int:
    """The model's limit. Raises `UnsupportedModelError` for what no run of it can do."""
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - set(LAYER_WINDOWS))
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(unknown)} do not work over a paged KV cache")
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModelError(f"'{text_config.model_type}' does not say how many positions it has")
    rope_parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = (part for part in rope_parameters.values() if isinstance(part, dict))
    return min(longest_sequence(part, int(limit), None) for part in (rope_parameters, *by_layer_type))


def _widened(folder: Path, hf_config: Any, stored: StoredScheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a quantised checkpoint, widened; the config then says no more that they are quantised."""
    reason = "the model runs through transformers' own code"
    tensors = widened_tensors(QuantizedTensors(WeightReader(folder), stored), dtype, reason)
    for part in (hf_config, hf_config.get_text_config()):
        for name in QUANTIZATION_FIELDS:
            if hasattr(part, name):
                delattr(part, name)
    return tensors


def _check_no_conv1d(model: Any) -> None:
    """transformers' Conv1D has its weight the other way round, which shows in no shape if that is square."""
    from transformers.pytorch_utils import Conv1D

    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise UnsupportedModelError("quantized weights of Conv1D layers are not supported")


def _from_pretrained(
    folder: Path, hf_config: Any, trust_remote_code: bool, dtype: torch.dtype, state: dict[str, Tensor] | None
) -> Any:
    """transformers' own streaming loader, or `state` if given; a tensor too few or too many is refused."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    auto_model: Any = AutoModelForCausalLM  # transformers' own annotations do not know output_loading_info
    try:
        loader: Any = auto_model
        if state is not None:  # the automatic class wants a folder to look into
            with torch.device("meta"):
                loader = type(auto_model.from_config(hf_config, trust_remote_code=trust_remote_code))
        model, info = loader.from_pretrained(
            folder if state is None else None,
            config=hf_config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # an unknown architecture, a broken file, no support for custom attention
        reason = words_of(error)
        if ATTENTION_NAME in reason:
            reason = "its attention layers do not use transformers' attention interface"
        raise UnsupportedModelError(f"transformers cannot load '{hf_config.model_type}': {reason}") from error
    # GPTQ writers store a bias of zeros where a model has none.
    no_biases = {name for name, tensor in (state or {}).items() if name.endswith(".bias") and not tensor.any()}
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        ignored = no_biases if kind == "unexpected_keys" else ()
        names = sorted(name for name in map(str, info[kind]) if not name.endswith("rotary_emb.inv_freq"))
        names = [name for name in names if name not in ignored]
        if names:
            raise UnsupportedModelError(f"the checkpoint has {kind.replace('_', ' ')}: {', '.join(names[:5])}")
    model.requires_grad_(False)
    return model.eval()


def _pack_linears(model: Any, kernels: KernelBackend, scheme: WeightScheme | None) -> None:
    """Replace every plain linear layer, one at a time, so that only one weight exists twice.

    Routers of experts are not quantised, nor are weights that the model does not keep as `nn.Linear`.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.data
                its_scheme = None if name in _ROUTERS else head_scheme(scheme) if child is head else scheme
                packed = kernels.pack_linear(child.weight.data, bias, its_scheme)
                setattr(parent, name, PackedLinear(packed, child.out_features))


def _path_of(model: nn.Module, part: nn.Module) -> list[str]:
    """The attribute names that lead from a model to one of its modules."""
    for name, module in model.named_modules():
        if module is part and name:
            return str(name).split(".")
    raise UnsupportedModelError("its decoder is not a part of the model")


def _with_replaced(model: Any, path: list[str], replacement: nn.Module) -> Any:
    """A copy of the model that shares all weights but has another module at `path`: here its own head alone."""
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    name, *rest = path
    twin._modules[name] = _with_replaced(model._modules[name], rest, replacement) if rest else replacement
    return twin
