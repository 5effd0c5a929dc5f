"""What every layer needs while it is built: where its weights come from and where they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import KernelBackend, Linear, Program
from kernels.linear.reference import find_peaks
from kernels.linear.schemes import WeightScheme
from kernels.weights import Deferred
from workers.quantized.linears import QuantizedLinears
from workers.quantized.tensors import StoredWeight
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
    quantized: QuantizedLinears | None = None  # of a checkpoint whose weights are integers or fp8 already

    def tensor(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a slice of it, in the model's dtype on its device; a copy, never a view of the mapped file."""
        stored = self.weights.read(name, shape, index)
        return torch.empty(stored.shape, dtype=self.dtype, device=self.device).copy_(stored)

    def vector(self, name: str, size: int) -> Tensor:
        """[size], whole on every rank."""
        return self.tensor(name, (size,))

    def merged_linear(self, slices: list[RowSlice], in_features: int, bias: bool, is_router: bool = False) -> Linear:
        """One linear layer [in_features] -> [sum of the slices' rows], in the order of the slices.

        A router is never quantised here: it is small, and its errors send tokens to other experts.
        """
        weights: list[StoredWeight | Tensor] = []
        biases: list[Tensor] = []
        for part in slices:
            index = (slice(part.start, part.stop),)
            weights.append(self._weight(part.module, (part.rows, in_features), index, bias))
            if bias:
                biases.append(self.weights.read(f"{part.module}.bias", (part.rows,), index))
        bias_vector = self._joined(biases) if bias else None
        return self._linear(weights, bias_vector, None if is_router else self.scheme)

    def column_slice_linear(self, module: str, shape: tuple[int, int], columns: slice, bias: bool = False) -> Linear:
        """A linear layer over some columns of a module's weight [N, K] = shape.

        Weights that are quantised here become what they become where the layer has all columns. So whole groups are
        held, and what is there of other ranks' columns is multiplied by zeros.
        """
        held = columns if self.scheme is None else self.scheme.whole_groups(columns, shape[1])
        weight = self._weight(module, shape, (slice(None), held), bias)
        bias_vector = self.vector(f"{module}.bias", shape[0]) if bias else None
        if self.tp.rank > 0:  # the sum over the ranks must hold the bias once
            bias_vector = None
        are_all = held == slice(0, shape[1])
        linear = self._linear(
            [weight], bias_vector, self.scheme, None if are_all else partial(self._peaks, module, shape)
        )
        if held == columns:
            return linear
        return PaddedLinear(linear, (columns.start - held.start, held.stop - columns.stop))

    def row_parallel_linear(self, module: str, in_features: int, out_features: int, bias: bool) -> RowParallelLinear:
        """A linear layer whose input columns are split over the ranks."""
        columns = self.tp.shard(in_features, f"input features of {module}")
        return RowParallelLinear(self.column_slice_linear(module, (out_features, in_features), columns, bias), self.tp)

    def holds(self, module: str) -> bool:
        """Whether the checkpoint has a weight of this name, in whatever form."""
        is_quantized = self.quantized is not None and self.quantized.tensors.holds(module)
        return is_quantized or f"{module}.weight" in self.weights

    def rows(self, module: str, shape: tuple[int, int], rows: slice, padded: int) -> Deferred:
        """Rows of a module's weight [N, K] = shape, widened where the checkpoint has it quantised.

        They are followed by zeros, `padded` rows in all.
        """
        weight = self._weight(module, shape, (rows,), has_bias=False)
        if isinstance(weight, StoredWeight) and self.quantized is not None:
            self.quantized.count_widened("a matrix of the vocabulary")

        def make() -> Tensor:
            made = torch.zeros(padded, shape[1], dtype=self.dtype, device=self.device)
            made[: rows.stop - rows.start].copy_(weight if isinstance(weight, Tensor) else weight.widen(self.dtype))
            return made

        return Deferred((padded, shape[1]), self.dtype, make)

    def table(self, rows: Deferred) -> Tensor:
        """What is looked up by rows, beside the packed weights where they have memory of their own."""
        memory = self.kernels.weight_memory
        if memory is None or self.device.type != "cpu":
            return rows.make()
        return memory.filled(rows.shape, rows.dtype, lambda out: out.copy_(rows.make()))

    def _weight(
        self, module: str, shape: tuple[int, int], index: tuple[slice, ...], has_bias: bool
    ) -> StoredWeight | Tensor:
        """The slice `index` of a module's weight, in the form that the checkpoint has it in."""
        if self.quantized is None or not self.quantized.tensors.holds(module):
            return self.weights.read(f"{module}.weight", shape, index)
        if not has_bias:
            self.quantized.tensors.check_no_bias(module, shape[0])
        return self.quantized.tensors.read(module, shape, index)

    def _peaks(self, module: str, shape: tuple[int, int]) -> Tensor:
        """[N] float32 of a module's whole weight [N, K] = shape, which stays where it is mapped."""
        return find_peaks(self.weights.read(f"{module}.weight", shape), self.dtype).to(self.device)

    def _linear(
        self,
        parts: list[StoredWeight | Tensor],
        bias: Tensor | None,
        scheme: WeightScheme | None,
        make_peaks: Callable[[], Tensor] | None = None,
    ) -> Linear:
        """One layer over the rows of all parts; make_peaks: as in `Deferred`."""
        if self.quantized is not None and any(isinstance(part, StoredWeight) for part in parts):
            packed = self.quantized.pack(parts, bias)
            if packed is not None:
                return packed
        rows = sum(_shape_of(part)[0] for part in parts)
        joined = Deferred((rows, *_shape_of(parts[0])[1:]), self.dtype, lambda: self._joined(parts), make_peaks)
        return self.kernels.pack_linear(joined, bias, scheme)

    def _joined(self, parts: Sequence[StoredWeight | Tensor]) -> Tensor:
        """Along the first dimension, in the model's dtype on its device: a copy."""
        rows = sum(_shape_of(part)[0] for part in parts)
        joined = torch.empty(rows, *_shape_of(parts[0])[1:], dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            stop = row + _shape_of(part)[0]
            joined[row:stop].copy_(part if isinstance(part, Tensor) else part.widen(self.dtype))
            row = stop
        return joined


def _shape_of(part: StoredWeight | Tensor) -> torch.Size:
    return part.shape if isinstance(part, Tensor) else part.values.shape


class PaddedLinear:
    """A linear layer that has more columns than its input: what is there of the others is zero."""

    def __init__(self, linear: Linear, padding: tuple[int, int]) -> None:
        """padding: how many columns lie before those of the input, and behind them."""
        self._linear = linear
        self._padding = padding

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        return self._linear(F.pad(x, self._padding))

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self._linear.in_float32(F.pad(x, self._padding))


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
