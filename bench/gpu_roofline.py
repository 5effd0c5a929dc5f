"""What a decode step of a `bench.gpu` job takes at least: weights, keys and values, read once as fast as the GPU reads.

Nothing else is in it: no activations, no embeddings of single tokens, no logits, no time between two kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bench.make_checkpoint import Shape
from kernels.linear.packing import step_of
from kernels.linear.schemes import WeightScheme, head_scheme

_ITEM_BYTES = 2  # of bf16, keys and values among them
_STEPS = ("", "late_")  # what the names of a job's figures of its first and of its last decodes begin with


def matrix_bytes(outputs: int, columns: int, scheme: WeightScheme | None) -> int:
    """What the weights [outputs, columns] of a linear layer of ours take, scales included."""
    if scheme is None:
        return _ITEM_BYTES * outputs * columns
    if scheme.is_float:
        return outputs * (columns + 4)  # a float32 for each output
    steps = -(-columns // step_of(scheme))
    held = steps * step_of(scheme) if scheme.bits == 4 else columns  # four bits are padded to whole steps
    return outputs * (held * scheme.bits // 8 + _ITEM_BYTES * steps)


def weight_bytes(shape: Shape, scheme: WeightScheme | None) -> int:
    """That a step reads: the table of embeddings as the vocabulary projection, which is packed by itself."""
    total = 0
    for name, size in shape.tensors():
        if len(size) == 2:
            is_head = name.endswith("embed_tokens.weight")
            total += matrix_bytes(*size, head_scheme(scheme) if is_head else scheme)
        else:
            total += _ITEM_BYTES * math.prod(size)
    return total


def step_bytes(shape: Shape, scheme: WeightScheme | None, num_tokens: float) -> float:
    """Of a decode whose rows see so many tokens together."""
    return weight_bytes(shape, scheme) + num_tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * _ITEM_BYTES


def beside(
    figures: Mapping[str, float], sequences: int, shape: Shape, scheme: WeightScheme | None, rate: float
) -> dict[str, float]:
    """What stands beside a job's `step_ms` and `late_step_ms`, where it has them: the least that such a step takes on a
    GPU that reads so many bytes a second, and which share of the step that is.
    """
    found = {}
    for step in _STEPS:
        if f"{step}step_ms" in figures:
            least = 1000 * step_bytes(shape, scheme, sequences * figures[f"{step}context"]) / rate
            found[f"{step}roofline_ms"] = least
            found[f"{step}of_roofline"] = least / figures[f"{step}step_ms"]
    return found
