"""Linear layer in plain torch, for processors or element types without a native kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_linear, check_shape


class TorchLinear:
    """x [M, K] -> [M, N] by torch. Correct, but a row's bits may depend on M."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_linear(weight, bias)
        self._weight = weight  # [N, K]
        self._bias = bias  # [N] or None
        self.out_features, self.in_features = weight.shape
        self.weight_nbytes = weight.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] -> [M, N] in out_dtype, float32 or by default x's dtype."""
        check_shape("x", x, [None, self.in_features])
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, self._weight, self._bias)
        bias = None if self._bias is None else self._bias.to(out_dtype)
        return F.linear(x.to(out_dtype), self._weight.to(out_dtype), bias)
