"""The CPU's paged cache: its packed layout, and storing into it.

A block of one head is cut into panels of 16 tokens, so that keys and values pass through the inner loop of the linear
layers without being rearranged. bf16 keeps neighbours along the summed dimension in pairs:

    keys    [num_blocks, num_kv_heads, block_size / 16, padded_dim, 16]        bf16 [..., padded_dim / 2, 16, 2]
    values  [num_blocks, num_kv_heads, block_size / 16, 16, padded_dim]        bf16 [..., 8, padded_dim, 2]

padded_dim is head_dim rounded up to a multiple of 16; the padding stays zero.

A quantised cache is int8: chunks of 64 bytes, in the first one the float32 scales of a panel's tokens. How the
integers lie in the others depends on the instruction set and on the type of keys and values (native/integers.h), so
one cache takes one type:

    both    [num_blocks, num_kv_heads, block_size / 16, 1 + padded_dim / 4, 64]
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_shape
from kernels.kv_store.reference import is_quantized
from kernels.native.library import DTYPES, LANES, NativeLibrary, last_dim_contiguous, panel_shape

MAX_HEAD_DIM = 256
_CHUNK_BYTES = 64
_CHUNK_DIMS = _CHUNK_BYTES // LANES  # of 16 tokens


class KvStoreArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/kv_store.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_cache", "value_cache", "slots")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, ctypes.c_int64) for name in ("dtype", "num_tokens", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "padded_dim", "block_size", "num_slots", "quantized")),
    ]


def supports_layout(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the packed layout can hold such blocks of keys and values in `dtype`, quantised or not."""
    return (
        block_size > 0
        and block_size % LANES == 0
        and 0 < head_dim <= MAX_HEAD_DIM
        and head_dim % 2 == 0
        and dtype in DTYPES
    )


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the key and value cache of type `dtype`."""
    padded = -(-head_dim // LANES) * LANES
    outer = (num_blocks, num_kv_heads, block_size // LANES)
    if dtype is torch.int8:
        shape = (*outer, 1 + padded // _CHUNK_DIMS, _CHUNK_BYTES)
        return shape, shape
    return (*outer, *panel_shape(padded, LANES, dtype)), (*outer, *panel_shape(LANES, padded, dtype))


def is_packed(cache: Tensor) -> bool:
    """Whether a cache tensor has the packed layout; the plain layout has four dimensions."""
    return cache.dim() > 4


def cache_geometry(value_cache: Tensor) -> tuple[int, int, int, int]:
    """(num_blocks, block_size, num_kv_heads, padded_dim) of a packed value cache."""
    num_blocks, num_kv_heads, panels, rows, columns = value_cache.shape[:5]
    padded_dim = (rows - 1) * _CHUNK_DIMS if is_quantized(value_cache) else columns
    return num_blocks, panels * LANES, num_kv_heads, padded_dim


def store_arguments(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> KvStoreArguments:
    """For the kernel, but for the slots; the caller keeps the tensors."""
    num_blocks, block_size, _, padded_dim = cache_geometry(value_cache)
    return KvStoreArguments(
        *(key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), 0),
        *key.stride()[:2],
        *value.stride()[:2],
        DTYPES[key.dtype],
        *key.shape,
        padded_dim,
        block_size,
        num_blocks * block_size,
        is_quantized(value_cache),
    )


def store_kv(
    library: NativeLibrary,
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,  # [num_tokens] int64, -1 = skip
) -> None:
    """Write every token whose slot is not -1 into both packed caches, in place. Raises IndexError on a bad slot."""
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks, block_size, cache_heads, padded_dim = cache_geometry(value_cache)
    if num_kv_heads != cache_heads or not padded_dim - LANES < head_dim <= padded_dim:
        raise ValueError(f"key {list(key.shape)} does not fit a cache of {cache_heads} heads of up to {padded_dim}")
    check_shape("value", value, key.shape)
    check_shape("slot_mapping", slot_mapping, [num_tokens])
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    check_dtype("key", key, *(DTYPES if is_quantized(key_cache) else (key_cache.dtype,)))
    check_dtype("value", value, key.dtype)
    key, value, slots = last_dim_contiguous(key), last_dim_contiguous(value), slot_mapping.contiguous()
    arguments = store_arguments(key, value, key_cache, value_cache)
    arguments.slots = slots.data_ptr()
    if library.store_kv(ctypes.addressof(arguments), torch.get_num_threads()):
        raise IndexError(f"a slot lies outside the cache of {num_blocks} blocks of {block_size}")
