"""From a `ModelConfig` to a model that runs, or to the reason why it cannot."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.backend import KernelBackend
from kernels.linear.schemes import SCHEMES
from novainfer.config import ModelConfig
from novainfer.errors import ConfigError, UnsupportedModelError, words_of
from novainfer.mode import NOT_QUANTIZED
from workers.checkpoint import find_checkpoint, read_json
from workers.kept_config import KeptConfig, keep, kept_path, read_kept
from workers.layers.build import LayerBuilder
from workers.models.base import CausalLM
from workers.models.decoder import Decoder
from workers.models.families import FAMILIES, decoder_spec, with_stored_names
from workers.models.spec import DecoderSpec, ModelSpec
from workers.quantized.linears import QuantizedLinears
from workers.quantized.scheme import StoredScheme, read_scheme, unsupported
from workers.quantized.tensors import QuantizedTensors
from workers.tensor_parallel import TensorParallel
from workers.weights import Progress, WeightReader, stored_type

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # older checkpoints store this constant
_METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # beside config.json, of older writers


def load_model(
    config: ModelConfig,
    *,
    tp: TensorParallel,
    kernels: KernelBackend,
    device: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """Load this rank's part of the model. progress(done, total) counts tensors.

    Raises `UnsupportedModelError` with the reason if the checkpoint cannot be served this way.
    """
    folder = find_checkpoint(config.model, config.revision)
    path = kept_path(folder, config)
    kept: Any = read_kept(path)
    hf_config = kept or load_hf_config(folder, config.trust_remote_code)
    stored = _stored_scheme(config, hf_config, folder)
    dtype = _dtype(config, hf_config, folder)
    native = hf_config.model_type in FAMILIES
    if config.model_backend == "native" and not native:
        raise UnsupportedModelError(
            f"there is no native decoder for '{hf_config.model_type}', only for {', '.join(sorted(FAMILIES))}"
        )
    if native and config.model_backend != "transformers":
        weights = WeightReader(folder, progress)
        quantized = None
        if stored is not None:
            quantized = QuantizedLinears(QuantizedTensors(weights, stored), kernels, dtype, device)
        scheme = SCHEMES.get(config.quantization)
        build = LayerBuilder(weights, tp, kernels, dtype, device, scheme, quantized)
        spec = decoder_spec(hf_config, dtype, config.max_model_len)
        if path is not None and kept is None and path == kept_path(folder, config):  # else it was changed meanwhile
            _keep_config(path, config, hf_config, spec, folder)
        return _load_decoder(build, with_stored_names(spec, weights.names()), config.max_model_len)
    if tp.world_size > 1:
        raise UnsupportedModelError(
            f"'{hf_config.model_type}' runs through transformers' own code, which is not split over ranks here: "
            f"use tensor_parallel_size 1"
        )
    from workers.models.transformers_backend import load_transformers_model

    model = load_transformers_model(folder, hf_config, config, dtype, kernels, device, stored)
    check_length(config.max_model_len, model.spec)
    return model


def load_hf_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The checkpoint's config as transformers understands it (`PreTrainedConfig`)."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    found = read_json(folder, "config.json")
    kind = found.get("model_type")
    if "auto_map" in found and kind not in CONFIG_MAPPING and not trust_remote_code:
        raise UnsupportedModelError(
            f"'{folder}' brings Python code of its own for the model type '{kind}', which runs only with "
            "--trust-remote-code: read it first"
        )
    if kind is not None and kind not in CONFIG_MAPPING and "auto_map" not in found:
        words = f"neither NovaInfer nor transformers {__version__} knows the model type '{kind}' of '{folder}'"
        raise UnsupportedModelError(words)
    try:
        if kind == "phi3" and _has_first_longrope(found):
            hf_config = CONFIG_MAPPING[kind].from_dict(found | {"rope_scaling": _renamed(found["rope_scaling"])})
        else:
            hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _settle_rope(hf_config)
    except Exception as error:  # transformers raises many kinds, all of them about the file's content
        words = f"transformers cannot read the config in '{folder}': {words_of(error)}"
        raise UnsupportedModelError(words) from error
    return hf_config


def _has_first_longrope(found: Mapping[str, Any]) -> bool:
    """longrope under its first name, which transformers renames when it has checked already what it needs."""
    scaling = found.get("rope_scaling")
    return isinstance(scaling, dict) and "su" in (scaling.get("type"), scaling.get("rope_type"))


def _renamed(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scaling.items() if name != "type"} | {"rope_type": "longrope"}


def _settle_rope(hf_config: Any) -> None:
    """Rotary parameters as they are when transformers builds a model.

    It completes them when it reads a config, but before it takes over values that the family has no field for; and
    again for each rotary embedding. Only then does an original_max_position_embeddings beside them count.
    """
    text_config = hf_config.get_text_config()
    if getattr(text_config, "rope_parameters", None):
        text_config.standardize_rope_params()


def _keep_config(path: Path, config: ModelConfig, hf_config: Any, spec: DecoderSpec, folder: Path) -> None:
    """For the next start, if what is kept says the same, whatever type that one asks for."""
    try:
        values = json.loads(json.dumps(hf_config.to_dict()))
        aliases = hf_config.attribute_map.items()  # other names of some values
        kept = KeptConfig(values | {alias: values[name] for alias, name in aliases if name in values})
        own_type = replace(config, dtype="auto")
        is_same = (
            decoder_spec(kept, spec.dtype, config.max_model_len) == spec
            and _dtype(own_type, kept, folder) == _dtype(own_type, hf_config, folder)
            and read_scheme(kept) == read_scheme(hf_config)
        )
    except Exception as error:  # of code that is not ours, on a config that it has just read
        _log.debug("the config is not kept: %s", words_of(error))
        return
    if is_same:
        keep(path, vars(kept))


def _stored_scheme(config: ModelConfig, hf_config: Any, folder: Path) -> StoredScheme | None:
    """How the checkpoint stores quantised weights, if so. Raises `ConfigError` if they are to be quantised again."""
    stored = read_scheme(hf_config)
    if stored is None:
        _check_said(folder)
    if stored is not None and config.quantization != NOT_QUANTIZED:
        raise ConfigError(
            f"--quantization {config.quantization} rounds full weights; those of this checkpoint are quantized already "
            f"({stored.name}) and served as they are: leave it out"
        )
    return stored


def _check_said(folder: Path) -> None:
    """Raises `UnsupportedModelError` if the weights are quantised, which config.json should say, and does not."""
    for name, method in _METHOD_FILES.items():
        if (folder / name).is_file() and any(found.endswith(".qweight") for found in WeightReader(folder).names()):
            raise unsupported(
                f"its config.json does not say how its weights are, '{name}' beside it may: write what is in that file "
                f'into config.json as "quantization_config", with "quant_method": "{method}"'
            )


def _load_decoder(build: LayerBuilder, spec: DecoderSpec, max_model_len: int | None) -> Decoder:
    check_length(max_model_len, spec)
    if build.quantized is None:
        model = Decoder(build, spec, max_model_len or spec.max_position)
        build.weights.finish(spec.ignored_prefixes, IGNORED_SUFFIXES)
        return model
    stored = build.quantized.tensors.scheme
    model = Decoder(build, replace(spec, stored_quantization=stored.name), max_model_len or spec.max_position)
    build.weights.finish(spec.ignored_prefixes, IGNORED_SUFFIXES + stored.ignored_suffixes)
    if build.tp.rank == 0:
        build.quantized.log_outcome()
    return model


def check_length(max_model_len: int | None, spec: ModelSpec) -> None:
    """Raises `UnsupportedModelError` if longer sequences are asked for than the model can take."""
    if max_model_len is not None and max_model_len > spec.max_position:
        raise UnsupportedModelError(
            f"max_model_len {max_model_len} is above the model's own limit of {spec.max_position} tokens"
        )


def _dtype(config: ModelConfig, hf_config: Any, folder: Path) -> torch.dtype:
    """The asked-for dtype, else the checkpoint's: what its config says, or else what its weights are."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(), "dtype", None)
    name = str(stored or stored_type(folder)).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"the checkpoint's type {name} is not supported, only {', '.join(DTYPES)}")
    return DTYPES[name]
