"""Inverse frequencies of the rotary embedding and its length extensions, in float32 as the checkpoints were trained.

Sources: RoPE (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071), LongRoPE (2402.13753) and the
frequency bands of Llama 3.1's release.

Two extensions are not functions of a token's position in transformers, and are made so here. "dynamic" rescales with
the longest sequence seen so far: we serve it up to max_position_embeddings, where it is plain RoPE. "longrope" switches
every position of a sequence that outgrows the pretrained length: we choose once, by the length we are asked to serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from novainfer.errors import UnsupportedModelError
from workers.models.spec import RotarySpec

UNSCALED = ("default", "dynamic")


def rotary_spec(
    parameters: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    serve_length: int | None,
    round_to_dtype: bool = True,
) -> RotarySpec:
    """The embedding that transformers' `rope_parameters` of one layer type describe.

    max_position: the config's max_position_embeddings. serve_length: longest sequence asked for, in tokens.
    """
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    periods = float(parameters["rope_theta"]) ** exponents
    attention_factor = 1.0
    if kind in UNSCALED:
        frequencies = 1.0 / periods
    elif kind == "linear":
        frequencies = 1.0 / periods / float(parameters["factor"])
    elif kind == "llama3":
        frequencies = _llama3(1.0 / periods, parameters)
    elif kind == "yarn":
        frequencies = _yarn(periods, rotary_dim, parameters, max_position)
        attention_factor = _yarn_attention_factor(parameters, max_position)
    elif kind == "longrope":
        long = serve_length is not None and serve_length > int(parameters["original_max_position_embeddings"])
        factors = torch.tensor(parameters["long_factor" if long else "short_factor"], dtype=torch.float32)
        if factors.shape != periods.shape:
            raise UnsupportedModelError(f"longrope has {len(factors)} factors for {len(periods)} frequencies")
        frequencies = 1.0 / (factors * periods)
        attention_factor = _longrope_attention_factor(parameters, max_position)
    else:
        raise UnsupportedModelError(f"rotary embedding type '{kind}' is not supported")
    return RotarySpec(
        inverse_frequencies=tuple(frequencies.tolist()),
        attention_factor=attention_factor,
        round_to_dtype=round_to_dtype,
    )


def longest_sequence(parameters: Mapping[str, Any], max_position: int, serve_length: int | None) -> int:
    """The model's own limit in tokens.

    longrope keeps to the pretrained length unless a longer one is asked for. yarn says how much longer than pretrained
    it makes the model, which a config's max_position_embeddings may not: it is switched on by a few lines there. So is
    linear, but others have counted its factor already: it is so long if that is asked for.
    """
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "longrope":
        original = int(parameters["original_max_position_embeddings"])
        if serve_length is None or serve_length <= original:
            return original
    elif kind == "yarn" and parameters.get("factor"):
        return max(max_position, int(parameters["original_max_position_embeddings"] * float(parameters["factor"])))
    elif kind == "linear" and serve_length is not None and serve_length > max_position:
        return max(max_position, int(max_position * float(parameters["factor"])))
    return max_position


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between interpolated."""
    factor, original = float(parameters["factor"]), int(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    slowed = torch.where(waves > original / low, frequencies / factor, frequencies)
    smooth = (original / waves - low) / (high - low)
    between = (waves >= original / high) & (waves <= original / low)
    return torch.where(between, (1 - smooth) * slowed / factor + smooth * slowed, slowed)


def _yarn(periods: Tensor, rotary_dim: int, parameters: Mapping[str, Any], max_position: int) -> Tensor:
    """A ramp over the dimensions from extrapolation (fast rotations) to interpolation (slow ones)."""
    original, theta = int(parameters["original_max_position_embeddings"]), float(parameters["rope_theta"])

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(parameters.get("beta_fast") or 32)), dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - interpolated
    factor = _yarn_factor(parameters, max_position)
    return 1.0 / (factor * periods) * (1 - extrapolated) + 1.0 / periods * extrapolated


def _yarn_factor(parameters: Mapping[str, Any], max_position: int) -> float:
    return float(parameters.get("factor") or max_position / int(parameters["original_max_position_embeddings"]))


def _yarn_attention_factor(parameters: Mapping[str, Any], max_position: int) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _yarn_factor(parameters, max_position)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _longrope_attention_factor(parameters: Mapping[str, Any], max_position: int) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    original = int(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or max_position / original)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
