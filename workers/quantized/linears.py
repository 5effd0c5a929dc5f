"""What becomes of quantised weights: linear layers that keep their integers, else plain weights, as of all in fp8."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.backend import KernelBackend, Linear
from kernels.linear.schemes import IntegerWeight
from workers.quantized.scheme import StoredScheme
from workers.quantized.tensors import QuantizedTensors, StoredWeight

_STEP = 8  # groups of the kernel have a multiple of so many columns
_log = logging.getLogger(__name__)


class ReorderedLinear:
    """A linear layer whose columns are in the order of their groups: the input is brought into that order first."""

    def __init__(self, linear: Linear, order: Tensor) -> None:
        """order [K] int64: where each column of the layer is in x."""
        self._linear = linear
        self._order = order

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        return self._linear(x.index_select(1, self._order))

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self._linear.in_float32(x.index_select(1, self._order))


@dataclass(slots=True)
class QuantizedLinears:
    """Makes the layers of one model, and counts which were widened for what reason."""

    tensors: QuantizedTensors
    kernels: KernelBackend
    dtype: torch.dtype  # of the activations
    device: torch.device
    num_packed: int = 0
    widened: Counter[str] = field(default_factory=Counter)

    def pack(self, parts: Sequence[StoredWeight | Tensor], bias: Tensor | None) -> Linear | None:
        """One layer over the rows of all parts [n, K], bias [sum of n] or None.

        None where it has to be widened, which is then counted.
        """
        made = self._pack([part for part in parts if isinstance(part, StoredWeight)], bias, len(parts))
        if isinstance(made, str):
            self.count_widened(made)
            return None
        self.num_packed += 1
        return made

    def count_widened(self, reason: str) -> None:
        """One more layer."""
        self.widened[reason] += 1

    def log_outcome(self) -> None:
        """One line for the whole model."""
        _log_outcome(self.tensors.scheme, self.dtype, self.num_packed, self.widened)

    def _pack(self, parts: list[StoredWeight], bias: Tensor | None, wanted: int) -> Linear | str:
        """The layer, or the reason why there is none."""
        if self.tensors.scheme.is_float:
            return "no kernel takes fp8 numbers with the scales of a checkpoint"
        if len(parts) < wanted:
            return "only a part of the layer is quantized"
        groups = parts[0].groups
        if any(not torch.equal(part.groups, groups) for part in parts):
            return "the parts of the layer have their columns in different orders"
        scales = _halves(torch.cat([part.scales for part in parts]))
        if scales is None:
            return "scales in float32"
        integers = torch.cat([part.values for part in parts])
        lowest, highest = integers.aminmax()
        if lowest < -128 or highest > 127:
            return "integers less their zero points take more than 8 bits"
        order = None
        group = _group_size(groups)
        if group is None:  # columns in the order of their groups may do
            order = torch.argsort(groups, stable=True)
            groups = groups[order]
            group = _group_size(groups)
        if group is None:
            return f"groups that are cut into runs of less than {_STEP} columns"
        if order is not None:
            integers = integers[:, order]
        integers, scales = integers.to(self.device, torch.int8), scales[:, groups[::group]].to(self.device)
        linear = self.kernels.pack_integers(IntegerWeight(integers, scales, group), bias, self.dtype)
        if linear is None:
            return f"kernel backend '{self.kernels.name}' has no kernel for such integers"
        return linear if order is None else ReorderedLinear(linear, order.to(self.device))


def _halves(scales: Tensor) -> Tensor | None:
    """The same numbers in bf16 or fp16, where one of them holds all."""
    for dtype in (torch.bfloat16, torch.float16):
        if scales.dtype == dtype or torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    return None


def _group_size(groups: Tensor) -> int | None:
    """groups [K] -> the most columns in the kernel's groups so that none of them straddles two; None if they all do."""
    k = len(groups)
    if (groups == groups[0]).all():
        return -(-k // _STEP) * _STEP
    first = int((groups != groups[0]).nonzero()[0])
    for size in range(first // _STEP * _STEP, 0, -_STEP):
        if torch.equal(groups[::size].repeat_interleave(size)[:k], groups):
            return size
    return None


def widened_tensors(tensors: QuantizedTensors, dtype: torch.dtype, reason: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint as if nothing were quantised: weights [N, K] in dtype, the others as they are."""
    state: dict[str, Tensor] = {}
    for module in tensors.modules():
        if tensors.holds(module):
            state[f"{module}.weight"] = tensors.read(module, tensors.shape(module)).widen(dtype)
    _log_outcome(tensors.scheme, dtype, 0, Counter({reason: len(state)}))
    for name in tensors.weights.unread():
        if not name.endswith(tensors.scheme.ignored_suffixes):
            state[name] = tensors.weights.read(name, tensors.weights.shape(name)).clone()
    return state


def _log_outcome(scheme: StoredScheme, dtype: torch.dtype, num_packed: int, widened: Counter[str]) -> None:
    done = [f"{num_packed} linear layers stay packed"]
    done += [f"{count} widened to {dtype} ({reason})" for reason, count in sorted(widened.items())]
    if scheme.skips_activations:
        done.append("activations stay as they are, although the checkpoint wants them quantized too")
    level = logging.WARNING if widened or scheme.skips_activations else logging.INFO
    _log.log(level, "%s weights: %s", scheme.name, "; ".join(done))
