"""A decoder's layers recorded as one call: what Python costs for each kernel is as long as a small kernel itself.

For small steps (decodes above all) on backends that can, and of layers that are made of kernels alone; for all the rest
the layers are called one after the other. Both run the same kernels on the same numbers, so the bits are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.backend import KernelBackend, Program
from workers.layers.norm import RmsNorm
from workers.models.base import ForwardBatch, KvCaches
from workers.models.spec import DecoderSpec

_CAPACITY = 256  # tokens; in larger steps Python's part is small
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """The buffers [capacity, hidden] that travel from layer to layer."""

    residual: Tensor
    update: Tensor  # not yet added to the residual
    x: Tensor  # input of the next part

    def next_input(self, program: Program, norm: RmsNorm | None, *, has_update: bool) -> None:
        """x = norm(residual), the update added first. Raises ValueError without a norm."""
        if norm is None:
            raise ValueError("a part without a norm before it cannot be recorded")
        if has_update:
            norm.record_add(program, self.update, self.residual, self.x)
        else:
            norm.record(program, self.residual, self.x)

    def norm_update(self, program: Program, norm: RmsNorm | None) -> None:
        """The optional norm after a part."""
        if norm is not None:
            norm.record(program, self.update, self.update)


class Recordable(Protocol):
    """A layer."""

    def record(
        self, program: Program, place: Place, kv_cache: tuple[Tensor, Tensor], *, is_first: bool, is_last: bool
    ) -> None:
        """Append its kernels; once the last layer's KV is stored, for the kept tokens alone."""
        ...


@dataclass(frozen=True, slots=True)
class LayerProgram:
    """All layers and the final norm."""

    program: Program
    place: Place

    @property
    def capacity(self) -> int:
        """Tokens of the largest step."""
        return self.program.capacity

    def __call__(self, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """`place.residual` [T, hidden] of tokens at positions [T] -> [K, hidden] of the kept ones.

        Valid until the next call.
        """
        kept = None if batch.kept is None else (batch.kept.index, batch.kept.metadata)
        self.program.run(positions, batch.slot_mapping, batch.metadata, kept)
        return self.place.x[: len(positions if kept is None else kept[0])]


def record_layers(
    kernels: KernelBackend, layers: Sequence[Recordable], norm: RmsNorm, spec: DecoderSpec, kv_caches: KvCaches
) -> LayerProgram | None:
    """None where the backend, or a part of these layers, cannot be recorded."""
    program = kernels.program(_CAPACITY, spec.dtype)
    if program is None:
        return None
    place = Place(*(program.buffer(name, spec.hidden_size) for name in ("residual", "update", "x")))
    try:
        for index, (layer, kv_cache) in enumerate(zip(layers, kv_caches, strict=True)):
            is_last = index == len(layers) - 1
            layer.record(program, place, kv_cache, is_first=index == 0, is_last=is_last)
        place.next_input(program, norm, has_update=True)
    except ValueError as reason:
        _log.info("the layers run one by one: %s", reason)
        return None
    return LayerProgram(program, place)
