"""What every layer needs while it is built: where its weights come from and where they go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import KernelBackend, Linear, Program
from kernels.linear.schemes import WeightScheme
from workers.tensor_parallel import TensorParallel
from workers.weights import WeightReader


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Output rows start..stop of a linear layer that the checkpoint stores with `rows` rows."""

    module: str  # name without ".weight"
    rows: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Reads this rank's part of the weights straight into its final form. Used at load time only."""

    weights: WeightReader
    tp: TensorParallel
    kernels: KernelBackend
    dtype: torch.dtype
    device: torch.device
    scheme: WeightScheme | None = None  # of the layers' linears; None leaves them as they are

    def tensor(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a slice of it, in the model's dtype on its device; a copy, never a view of the mapped file."""
        stored = self.weights.read(name, shape, index)
        return torch.empty(stored.shape, dtype=self.dtype, device=self.device).copy_(stored)

    def vector(self, name: str, size: int) -> Tensor:
        """[size], whole on every rank."""
        return self.tensor(name, (size,))

    def merged_linear(self, slices: list[RowSlice], in_features: int, bias: bool, is_router: bool = False) -> Linear:
        """One linear layer [in_features] -> [sum of the slices' rows], in the order of the slices.

        A router is never quantised: it is small, and its errors send tokens to other experts.
        """
        out_features = sum(part.stop - part.start for part in slices)
        weight = torch.empty(out_features, in_features, dtype=self.dtype, device=self.device)
        bias_vector = torch.empty(out_features, dtype=self.dtype, device=self.device) if bias else None
        row = 0
        for part in slices:
            rows = slice(part.start, part.stop)
            target = slice(row, row + part.stop - part.start)
            weight[target].copy_(self.weights.read(f"{part.module}.weight", (part.rows, in_features), (rows,)))
            if bias_vector is not None:
                bias_vector[target].copy_(self.weights.read(f"{part.module}.bias", (part.rows,), (rows,)))
            row = target.stop
        return self.kernels.pack_linear(weight, bias_vector, None if is_router else self.scheme)

    def row_parallel_linear(self, module: str, in_features: int, out_features: int, bias: bool) -> RowParallelLinear:
        """A linear layer whose input columns are split over the ranks.

        Groups of quantised weights begin at a rank's first column, so none straddles two ranks.
        """
        columns = self.tp.shard(in_features, f"input features of {module}")
        weight = self.tensor(f"{module}.weight", (out_features, in_features), (slice(None), columns))
        bias_vector = self.vector(f"{module}.bias", out_features) if bias else None
        if self.tp.rank > 0:  # the sum over the ranks must hold the bias once
            bias_vector = None
        return RowParallelLinear(self.kernels.pack_linear(weight, bias_vector, self.scheme), self.tp)


class RowParallelLinear:
    """Each rank multiplies its columns of the input; the results are summed over the ranks."""

    def __init__(self, linear: Linear, tp: TensorParallel) -> None:
        self._linear = linear
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features / ranks] -> [T, out_features], the same on every rank."""
        return self._tp.all_reduce(self._linear(x))

    def record(self, program: Program, x: Tensor, out: Tensor) -> None:
        """The call, for `program`. Raises ValueError where ranks have to add up."""
        if self._tp.world_size > 1:
            raise ValueError("a sum over ranks cannot be recorded")
        program.linear(self._linear, x, out)
