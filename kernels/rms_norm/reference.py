"""RMSNorm in plain torch, with the cast order of the checkpoints' own model code."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., hidden], weight [hidden] -> norm(x) * (weight_offset + weight), in x's dtype."""
    check_norm(x, weight)
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        return (normed.to(x.dtype) * weight).to(x.dtype)
    return (normed * (weight_offset + weight.float())).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x, residual [..., hidden] -> (rms_norm(x + residual), x + residual)."""
    check_norm(x, weight, residual)
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset), total
