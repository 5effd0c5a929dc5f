"""Sampling by the native kernel: no sort of the vocabulary, and noise only for ids that could still win."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.checks import check_sampling
from kernels.native.library import NativeLibrary


class SampleArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/sampling.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_p", "min_p", "top_k", "choice")),
        *((name, ctypes.c_void_p) for name in ("seed", "index", "out", "is_bad")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab_size", "stride")),
    ]


def sample(library: NativeLibrary, logits: Tensor, params: SamplingTensors, is_bad: Tensor | None = None) -> Tensor:
    """logits [B, V] float32 -> [B] int64 token ids; is_bad [B] bool is written: see `KernelBackend.choose`."""
    check_sampling(logits, params)
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    arguments = SampleArguments(
        logits.data_ptr(),
        params.temperature.data_ptr(),
        params.top_p.data_ptr(),
        params.min_p.data_ptr(),
        params.top_k.data_ptr(),
        params.choice.data_ptr(),
        params.seed.data_ptr(),
        params.index.data_ptr(),
        out.data_ptr(),
        0 if is_bad is None else is_bad.data_ptr(),
        rows,
        vocab_size,
        logits.stride(0),
    )
    library.sample(ctypes.addressof(arguments), torch.get_num_threads())
    return out
