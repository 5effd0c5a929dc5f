"""Mixture of experts: each rank holds a slice of every expert's intermediate features."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import KernelBackend, Linear
from workers.layers.build import LayerBuilder, RowSlice
from workers.models.spec import DecoderSpec, MoeSpec


class Expert:
    """One gated MLP; its result is this rank's part of a sum over the ranks."""

    def __init__(self, build: LayerBuilder, moe: MoeSpec, name: str, hidden_size: int) -> None:
        size = moe.intermediate_size
        rows = build.tp.shard(size, "intermediate features of an expert")
        slices = [RowSlice(f"{name}.{part}", size, rows.start, rows.stop) for part in (moe.gate, moe.up)]
        self._gate_up: Linear = build.merged_linear(slices, hidden_size, bias=False)
        self._down: Linear = build.column_slice_linear(f"{name}.{moe.down}", (hidden_size, size), rows)
        self._kernels: KernelBackend = build.kernels
        self._activation = moe.activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens of this expert, hidden] -> the same shape."""
        return self._down(self._kernels.gate_up(self._gate_up, x, self._activation))


class MixtureOfExperts:
    """Sends each token through its top_k experts and adds the weighted results.

    The results of a token are added in ascending order of the experts, whatever else is in the batch, and every linear
    layer is row-invariant, so that a token's bits do not depend on its neighbours.
    """

    def __init__(self, build: LayerBuilder, spec: DecoderSpec, moe: MoeSpec, layer: int) -> None:
        name = f"{spec.prefix}layers.{layer}"
        self._moe = moe
        self._tp = build.tp
        router = RowSlice(f"{name}.{moe.router}", moe.num_experts, 0, moe.num_experts)
        self._router = build.merged_linear([router], spec.hidden_size, bias=False, is_router=True)
        names = [f"{name}.{moe.expert.format(i)}" for i in range(moe.num_experts)]
        self._experts = [Expert(build, moe, expert_name, spec.hidden_size) for expert_name in names]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, chosen = self._route(x)
        total = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():  # ascending
            tokens, ranks = torch.where(chosen == expert)
            result = self._experts[expert](x[tokens]) * weights[tokens, ranks].unsqueeze(1)
            total[tokens] += result.to(total.dtype)
        return self._tp.all_reduce(total)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [T, top_k] and numbers [T, top_k] of each token's experts."""
        probabilities = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self._moe.top_k, dim=-1)
        if self._moe.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights.to(x.dtype) if self._moe.round_weights else weights), chosen
