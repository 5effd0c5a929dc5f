"""Token embedding and vocabulary projection, both split over the ranks by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import KernelBackend, Linear, MakeSampling
from kernels.weights import Deferred
from workers.layers.build import LayerBuilder
from workers.tensor_parallel import TensorParallel


def vocab_rows(build: LayerBuilder, module: str, vocab_size: int, hidden_size: int) -> Deferred:
    """This rank's rows [rows_per_rank, hidden] of a vocabulary matrix; the last rank's are padded with zeros."""
    rows = -(-vocab_size // build.tp.world_size)
    start = min(build.tp.rank * rows, vocab_size)
    stop = min(start + rows, vocab_size)
    return build.rows(module, (vocab_size, hidden_size), slice(start, stop), rows)


class VocabEmbedding:
    """Looks up the rows that this rank holds; the other ranks' are zero, and the sum over the ranks is exact."""

    def __init__(self, weight: Tensor, tp: TensorParallel, multiplier: float) -> None:
        self._weight = weight  # [rows_per_rank, hidden]
        self._tp = tp
        self._multiplier = multiplier

    def __call__(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, hidden]."""
        if self._tp.world_size == 1:
            hidden = F.embedding(input_ids, self._weight)
        else:
            rows = self._weight.shape[0]
            local = input_ids - self._tp.rank * rows
            held = (local >= 0) & (local < rows)
            hidden = F.embedding(torch.where(held, local, 0), self._weight) * held.unsqueeze(1)
            hidden = self._tp.all_reduce(hidden)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier

    def write(self, input_ids: Tensor, out: Tensor) -> None:
        """The same into out [T, hidden]."""
        if self._tp.world_size == 1 and self._multiplier == 1.0:
            torch.index_select(self._weight, 0, input_ids, out=out)
        else:
            out.copy_(self(input_ids))


class VocabProjection:
    """Hidden states to logits over the whole vocabulary."""

    def __init__(self, kernels: KernelBackend, linear: Linear, tp: TensorParallel, vocab_size: int) -> None:
        self._kernels = kernels
        self._linear = linear  # [hidden] -> [rows_per_rank]
        self._tp = tp
        self._vocab_size = vocab_size

    def pick(self, hidden: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """See `KernelBackend`; None unless its `pack_head` has made the layer."""
        return self._kernels.pick(self._linear, hidden, params)

    def in_float32(self, hidden: Tensor) -> Tensor:
        """The same numbers, contiguous, in float32."""
        if self._tp.world_size > 1:  # what ranks send one another stays small
            return self(hidden).float().contiguous()
        return self._linear.in_float32(hidden)[:, : self._vocab_size].contiguous()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] in the model's dtype, on every rank."""
        return self._tp.gather_columns(self._linear(hidden))[:, : self._vocab_size]
