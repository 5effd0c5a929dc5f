# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Gated activation in Triton, in fp32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import ACTIVATIONS

_BLOCK = 1024


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without overflow at either end."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def gated(
    gate,  # float32
    up,  # float32
    ACTIVATION: tl.constexpr,  # index into kernels.backend.ACTIVATIONS
):
    """act(gate) * up."""
    if ACTIVATION == 0:  # silu
        activated = gate * _sigmoid(gate)
    elif ACTIVATION == 1:  # gelu_tanh: (1 + tanh(z)) / 2 = sigmoid(2z)
        activated = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:  # gelu
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return activated * up


@triton.jit
def _act_mul_kernel(
    gate_up,  # [num_tokens, 2 * intermediate]
    out,  # [num_tokens, intermediate], contiguous
    row_stride,
    intermediate,
    ACTIVATION: tl.constexpr,  # index into kernels.backend.ACTIVATIONS
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    gate_at = gate_up + row * row_stride + columns
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + intermediate, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * intermediate + columns, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=mask)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * I], gate first -> act(gate) * up [T, I]."""
    num_tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    _act_mul_kernel[(num_tokens, triton.cdiv(intermediate, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        intermediate,
        ACTIVATION=ACTIVATIONS.index(activation),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
