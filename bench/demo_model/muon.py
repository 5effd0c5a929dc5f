"""Muon: momentum whose matrix-shaped updates are orthogonalised (K. Jordan et al., 2024).

Matrices of one shape are handled together as one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The published quintic: it drives all singular values to about 1 in five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, computed in `dtype`. `matrices`: [batch, rows, columns] fp32."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result.float()


class Muon:
    """Nesterov momentum with orthogonalised updates for a list of matrices."""

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        dtype: torch.dtype,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        """Group the matrices by shape; updates are orthogonalised in `dtype`, `weight_decay` is decoupled."""
        shapes: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
        self._groups = list(shapes.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self._groups]
        self._dtype, self._beta, self._weight_decay = dtype, momentum, weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients; an entry moves by about `learning_rate`, whatever the shape."""
        for group, momentum in zip(self._groups, self.momenta, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - self._beta)
            update = orthogonalise(gradients.lerp(momentum, self._beta), self._dtype)
            scale = learning_rate * float(max(group[0].shape)) ** 0.5
            for matrix, change in zip(group, update.unbind(), strict=True):
                matrix.mul_(1 - learning_rate * self._weight_decay).sub_(change, alpha=scale)
