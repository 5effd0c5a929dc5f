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


def sample_arguments(
    params: SamplingTensors,
    out: Tensor,
    is_bad: Tensor | None,
    vocab_size: int,
    logits: Tensor | None = None,
) -> SampleArguments:
    """The kernel's, for rows of `params`; the tensors have to live as long."""
    return SampleArguments(
        0 if logits is None else logits.data_ptr(),
        params.temperature.data_ptr(),
        params.top_p.data_ptr(),
        params.min_p.data_ptr(),
        params.top_k.data_ptr(),
        params.choice.data_ptr(),
        params.seed.data_ptr(),
        params.index.data_ptr(),
        out.data_ptr(),
        0 if is_bad is None else is_bad.data_ptr(),
        len(out),
        vocab_size,
        0 if logits is None else logits.stride(0),
    )


def sample(library: NativeLibrary, logits: Tensor, params: SamplingTensors, is_bad: Tensor | None = None) -> Tensor:
    """logits [B, V] float32 -> [B] int64 token ids; is_bad [B] bool is written: see `KernelBackend.choose`."""
    check_sampling(logits, params)
    out = torch.empty(len(logits), dtype=torch.int64)
    arguments = sample_arguments(params, out, is_bad, logits.shape[1], logits)
    library.sample(ctypes.addressof(arguments), torch.get_num_threads())
    return out
