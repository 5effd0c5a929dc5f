"""The gated MLP, split over the ranks by its intermediate features."""

from __future__ import annotations

from torch import Tensor

from kernels.backend import Program
from workers.layers.build import LayerBuilder, RowSlice
from workers.models.spec import DecoderSpec, MlpSpec


class Mlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, build: LayerBuilder, spec: DecoderSpec, mlp: MlpSpec, layer: int) -> None:
        name = f"{spec.prefix}layers.{layer}.mlp"
        size = mlp.intermediate_size
        rows = build.tp.shard(size, "intermediate features")
        if spec.packed_projections:
            slices = [
                RowSlice(f"{name}.gate_up_proj", 2 * size, rows.start, rows.stop),
                RowSlice(f"{name}.gate_up_proj", 2 * size, size + rows.start, size + rows.stop),
            ]
        else:
            slices = [RowSlice(f"{name}.{part}_proj", size, rows.start, rows.stop) for part in ("gate", "up")]
        self._gate_up = build.merged_linear(slices, spec.hidden_size, spec.mlp_bias)
        self._down = build.row_parallel_linear(f"{name}.down_proj", size, spec.hidden_size, spec.mlp_bias)
        self._kernels = build.kernels
        self._activation = mlp.activation
        self._width = rows.stop - rows.start  # features of this rank

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down(self._kernels.gate_up(self._gate_up, x, self._activation))

    def record(self, program: Program, x: Tensor, out: Tensor) -> None:
        """The call, for `program`."""
        gate_up, act = program.buffer("gate_up", 2 * self._width), program.buffer("act", self._width)
        program.linear(self._gate_up, x, gate_up)
        program.act_mul(gate_up, self._activation, act)
        self._down.record(program, act, out)
