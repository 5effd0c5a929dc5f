"""Rotary embedding by the native kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_rotary
from kernels.native.library import DTYPES, NativeLibrary


class RotaryArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/rowwise.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "positions", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride", "dtype", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "max_position", "half")),
    ]


def rotary_arguments(query: Tensor, key: Tensor, cos_sin: Tensor) -> RotaryArguments:
    """For the kernel, but for the positions; the caller keeps the tensors."""
    return RotaryArguments(
        *(query.data_ptr(), key.data_ptr(), 0, cos_sin.data_ptr()),
        *query.stride()[:2],
        *key.stride()[:2],
        DTYPES[query.dtype],
        query.shape[0],
        query.shape[1],
        key.shape[1],
        cos_sin.shape[0],
        cos_sin.shape[2],
    )


def rotary(
    library: NativeLibrary,
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor,  # [max_position, 2, rotary_dim // 2] float32
) -> None:
    """Rotate the first rotary_dim elements of every head, in place. Raises IndexError on a position without a row."""
    check_rotary(query, key, positions, cos_sin)
    check_dtype("query", query, *DTYPES)
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    arguments = rotary_arguments(query, key, cos_sin)
    arguments.positions = positions.data_ptr()
    if library.rotary(ctypes.addressof(arguments), torch.get_num_threads()):
        raise IndexError(f"a position lies outside the {cos_sin.shape[0]} rows of cos_sin")
