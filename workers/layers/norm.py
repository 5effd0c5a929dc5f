"""RMSNorm with its weight, and the norm of queries and keys over all heads at once."""

from __future__ import annotations

from torch import Tensor

from kernels.backend import KernelBackend, Program
from workers.tensor_parallel import TensorParallel


class RmsNorm:
    """norm(x) * (weight_offset + weight)."""

    def __init__(self, kernels: KernelBackend, weight: Tensor, eps: float, weight_offset: float) -> None:
        self._kernels = kernels
        self.weight = weight  # [size]
        self._eps = eps
        self._weight_offset = weight_offset

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return self._kernels.rms_norm(x, self.weight, self._eps, self._weight_offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps, self._weight_offset)

    def record(self, program: Program, x: Tensor, out: Tensor) -> None:
        """The call, for `program`."""
        program.rms_norm(x, self.weight, out, self._eps, self._weight_offset)

    def record_add(self, program: Program, x: Tensor, residual: Tensor, out: Tensor) -> None:
        """`add`, with the sum in the place of the residual."""
        program.add_rms_norm(x, residual, self.weight, out, self._eps, self._weight_offset)


class AllHeadsNorm:
    """RMSNorm over all heads of all ranks (OLMo-2): the heads are gathered, normalised whole, and this rank's kept."""

    def __init__(self, norm: RmsNorm, tp: TensorParallel, replicas: int) -> None:
        self._norm = norm
        self._tp = tp
        self._replicas = replicas  # ranks in a row that hold the same heads

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [T, local_heads, head_dim] -> the same shape."""
        num_tokens, local_heads, head_dim = heads.shape
        gathered = self._tp.gather_columns(heads.flatten(1)).view(num_tokens, self._tp.world_size, -1)
        normed = self._norm(gathered[:, :: self._replicas].flatten(1))
        start = self._tp.rank // self._replicas * local_heads
        return normed.view(num_tokens, -1, head_dim)[:, start : start + local_heads]
