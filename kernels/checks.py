"""Argument checks of the kernel wrappers. They look at shapes and strides alone and never wait for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import ACTIVATIONS, AttentionMetadata, SamplingTensors
from kernels.weights import Deferred

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SAMPLING_DTYPES = (
    *((name, torch.float32) for name in ("temperature", "top_p", "min_p")),
    *((name, torch.int32) for name in ("top_k", "choice")),
    *((name, torch.int64) for name in ("seed", "index")),
)


def check_shape(name: str, tensor: Tensor | Deferred, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` has `shape`, where None stands for any length."""
    if len(tensor.shape) != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor | Deferred, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless the tensor has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_metadata(metadata: AttentionMetadata, num_tokens: int) -> None:
    """Raise ValueError unless shapes and counts agree with each other and with `num_tokens` query rows."""
    (num_seqs,) = metadata.seq_lens.shape
    check_shape("query_start_loc", metadata.query_start_loc, [num_seqs + 1])
    check_shape("block_table", metadata.block_table, [num_seqs, None])
    for name in ("query_start_loc", "seq_lens", "block_table"):
        check_dtype(name, getattr(metadata, name), torch.int32)
        check_last_dim_contiguous(name, getattr(metadata, name))
    if not 0 <= metadata.num_decodes <= min(num_seqs, num_tokens):
        raise ValueError(f"num_decodes is {metadata.num_decodes} with {num_seqs} sequences and {num_tokens} tokens")


def check_rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> int:
    """Raise ValueError unless the shapes fit; returns rotary_dim // 2."""
    check_shape("query", query, [None, None, None])
    num_tokens, _, head_dim = query.shape
    check_shape("key", key, [num_tokens, None, head_dim])
    check_shape("positions", positions, [num_tokens])
    check_shape("cos_sin", cos_sin, [None, 2, None])
    check_dtype("key", key, query.dtype)
    check_dtype("positions", positions, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32)
    for name, tensor in (("query", query), ("key", key)):
        check_last_dim_contiguous(name, tensor)
    half = cos_sin.shape[2]
    if 2 * half > head_dim:
        raise ValueError(f"cos_sin has rotary_dim {2 * half}, larger than head_dim {head_dim}")
    return half


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Raise ValueError unless weight is [hidden] for x [..., hidden] and residual, where given, is like x."""
    if x.ndim < 1:
        raise ValueError("x must have at least one dimension")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_shape("weight", weight, [x.shape[-1]])
    check_last_dim_contiguous("x", x)
    if residual is not None:
        check_shape("residual", residual, list(x.shape))
        check_dtype("residual", residual, x.dtype)
        check_last_dim_contiguous("residual", residual)


def check_act_mul(gate_up: Tensor, activation: str) -> int:
    """Raise ValueError unless gate_up is [T, 2 * I] and the activation is known; returns I."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{activation}', expected one of {', '.join(ACTIVATIONS)}")
    check_shape("gate_up", gate_up, [None, None])
    check_last_dim_contiguous("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even last dimension, got {gate_up.shape[1]}")
    return gate_up.shape[1] // 2


def check_linear(weight: Tensor | Deferred, bias: Tensor | None) -> None:
    """Raise ValueError unless weight is [N, K] and bias, where given, is [N]."""
    check_shape("weight", weight, [None, None])
    if bias is not None:
        check_shape("bias", bias, [weight.shape[0]])


def check_sampling(logits: Tensor, params: SamplingTensors) -> None:
    """Raise ValueError unless logits is [B, V] float32 with V > 0 and every parameter is [B] of its dtype."""
    check_shape("logits", logits, [None, None])
    check_dtype("logits", logits, torch.float32)
    check_last_dim_contiguous("logits", logits)
    if logits.shape[1] == 0:
        raise ValueError("logits must have at least one column")
    check_sampling_tensors(params, logits.shape[0])


def check_sampling_tensors(params: SamplingTensors, rows: int) -> None:
    """Raise ValueError unless every parameter is [rows] of its dtype."""
    for name, dtype in _SAMPLING_DTYPES:
        tensor = getattr(params, name)
        if tensor.dtype is dtype and tensor.shape == (rows,) and tensor.is_contiguous():
            continue
        check_shape(name, tensor, [rows])
        check_dtype(name, tensor, dtype)
        check_last_dim_contiguous(name, tensor)
