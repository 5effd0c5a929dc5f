"""KV store in plain torch. Cache layout: [num_blocks, block_size, num_kv_heads, head_dim].

A quantised cache is int8 and has four more bytes behind every head's integers: their scale, a float32. One of e4m3
numbers has no scale: keys and values are rounded to the nearest number within 448, what is not finite becomes NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.checks import check_shape

MAX_INTEGER = 127
MAX_FLOAT8 = 448.0
FLOAT8 = torch.float8_e4m3fn
_SCALE_BYTES = 4


def stored_dtype(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> torch.dtype:
    """The type of a cache's tensors for keys and values in `dtype`; ValueError where there is no such cache."""
    if cache_dtype not in (None, dtype, torch.int8, FLOAT8):
        raise ValueError(f"there is no KV cache of {cache_dtype} for keys and values in {dtype}")
    return cache_dtype or dtype


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache tensor, in this layout or the packed one, holds integers and scales."""
    return cache.dtype is torch.int8


def is_float8(cache: Tensor) -> bool:
    """Whether a cache tensor, in whatever layout, holds e4m3 numbers."""
    return cache.dtype is FLOAT8


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache of type `dtype`."""
    return head_dim + _SCALE_BYTES if dtype is torch.int8 else head_dim


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> integers [..., head_dim] int8, scales [..., 1] float32: what every backend does, to the bit.

    The scale is the 127th part of the largest magnitude; an integer is the multiple of it nearest to its element, ties
    to even. Zeros have scale 0. A head with NaN or infinity in it has scale NaN and integers 0, so that whatever reads
    it becomes NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scales = (largest / MAX_INTEGER).where(largest.isfinite(), math.nan)
    usable = scales > 0
    integers = (wide / scales.where(usable, 1.0)).round().clamp(-MAX_INTEGER, MAX_INTEGER)
    return integers.where(usable, 0.0).to(torch.int8), scales


def dequantize(rows: Tensor) -> Tensor:
    """Rows [..., head_dim + 4] of a quantised cache -> what they stand for [..., head_dim] float64, exactly."""
    scales = rows[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-_SCALE_BYTES].double() * scales.double()


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, row_width]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, row_width]
    slot_mapping: Tensor,  # [num_tokens] int64, -1 = skip
) -> None:
    """Write every token whose slot is not -1 into both caches, in place."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_shape("value", value, [num_tokens, num_kv_heads, head_dim])
    check_shape("key_cache", key_cache, [None, None, num_kv_heads, row_width(head_dim, key_cache.dtype)])
    check_shape("value_cache", value_cache, list(key_cache.shape))
    check_shape("slot_mapping", slot_mapping, [num_tokens])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for x, cache in ((key[kept], key_cache), (value[kept], value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = _rows(x, cache)


def to_float8(x: Tensor) -> Tensor:
    """To the nearest e4m3 number; see above."""
    wide = x.float()
    return wide.clamp(-MAX_FLOAT8, MAX_FLOAT8).where(wide.isfinite(), math.nan).to(FLOAT8)


def _rows(x: Tensor, cache: Tensor) -> Tensor:
    """x [..., head_dim] -> rows [..., row_width] of the cache."""
    if is_float8(cache):
        return to_float8(x)
    if not is_quantized(cache):
        return x.to(cache.dtype)
    integers, scales = quantize(x)
    return torch.cat((integers, scales.contiguous().view(torch.int8)), -1)
