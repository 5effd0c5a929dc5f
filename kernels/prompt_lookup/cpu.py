"""Prompt lookup by the native kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.library import NativeLibrary
from kernels.prompt_lookup import MAX_MATCH, MIN_MATCH

IntArray = npt.NDArray[np.int64]


class LookupArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/prompt_lookup.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("token_ids", "rows", "num_tokens", "most", "found")),
        *((name, ctypes.c_int64) for name in ("count", "stride", "min_match", "max_match")),
    ]


def find_drafts(
    library: NativeLibrary, token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
) -> IntArray:
    """Write drafts behind the tokens of `rows`; see `KernelBackend.find_drafts`."""
    rows, num_tokens, most = (np.ascontiguousarray(column, np.int64) for column in (rows, num_tokens, most))
    found = np.zeros(len(rows), np.int64)
    arguments = LookupArguments(
        token_ids.ctypes.data,
        rows.ctypes.data,
        num_tokens.ctypes.data,
        most.ctypes.data,
        found.ctypes.data,
        len(rows),
        token_ids.strides[0] // token_ids.itemsize,
        MIN_MATCH,
        MAX_MATCH,
    )
    library.find_drafts(ctypes.addressof(arguments), torch.get_num_threads())
    return found
