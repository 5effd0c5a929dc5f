"""The layers of a model as one native call: see program.h. Knows buffers and kernels; must not know models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.act_mul.cpu import act_mul_arguments
from kernels.backend import AttentionMetadata, AttentionParams, Linear
from kernels.checks import check_act_mul, check_rotary
from kernels.kv_store.cpu import is_packed, store_arguments
from kernels.linear.cpu import PackedLinear
from kernels.linear.quantized import QuantizedLinear
from kernels.native.library import DTYPES, NativeLibrary
from kernels.paged_attention.cpu import attention_arguments, is_usual
from kernels.rms_norm.cpu import norm_arguments
from kernels.rotary.cpu import rotary_arguments

_NORM, _LINEAR, _QUANTIZED, _ROTARY, _STORE_KV, _ATTENTION, _ACT_MUL = range(7)


class StepInputs(ctypes.Structure):
    """Mirrors the struct of the same name in program.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "query_start_loc", "seq_lens", "block_table")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "table_stride", "table_width")),
        ("num_done", ctypes.c_void_p),
    ]


class Operation(ctypes.Structure):
    """Mirrors the struct of the same name in program.h."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("arguments", "x", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "rows", "token_stride")),
    ]


@dataclass(slots=True)
class NativeProgram:
    """Records kernels over buffers of `capacity` tokens, then runs them all for a step of at most so many.

    See `kernels.backend.Program`.
    """

    library: NativeLibrary
    capacity: int
    dtype: torch.dtype
    _operations: list[Operation] = field(default_factory=list)
    _buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # whatever the operations point to
    _packed: ctypes.Array[Operation] | None = None
    _cut: int = 0  # operations of part 0
    _num_done: ctypes.c_int64 = field(default_factory=ctypes.c_int64)

    @property
    def num_done(self) -> int:
        """Operations that have ended, in all runs together; it counts up while one runs."""
        return self._num_done.value

    def buffer(self, name: str, width: int) -> Tensor:
        """[capacity, width], uninitialised; one for each name and width."""
        if (name, width) not in self._buffers:
            with torch.inference_mode(False):  # to be written to by whoever calls
                self._buffers[name, width] = torch.empty(self.capacity, width, dtype=self.dtype)
        return self._buffers[name, width]

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float) -> None:
        """out = rms_norm(x); both [capacity, width], or in place [capacity, heads, width] views of a buffer."""
        if x.dim() == 2:
            self._add(_NORM, norm_arguments(x, weight, out, eps, weight_offset), weight)
            return
        if x.data_ptr() != out.data_ptr() or x.stride(1) != x.shape[2]:
            raise ValueError("the heads of a token are normalised in place, and lie next to each other")
        arguments = norm_arguments(x[0], weight, out[0], eps, weight_offset)
        self._add(_NORM, arguments, weight, rows=x.shape[1], token_stride=x.stride(0))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float
    ) -> None:
        """residual += x; out = rms_norm(residual)."""
        self._add(_NORM, norm_arguments(x, weight, out, eps, weight_offset, residual, residual), weight)

    def linear(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """out [capacity, n] = linear(x [capacity, k])."""
        if not isinstance(linear, PackedLinear | QuantizedLinear):
            raise ValueError(f"a {type(linear).__name__} cannot be recorded")
        if (x.shape[1], out.shape[1], x.dtype) != (linear.in_features, linear.out_features, linear.dtype):
            raise ValueError("the buffers do not fit the linear layer")
        kind = _LINEAR if isinstance(linear, PackedLinear) else _QUANTIZED
        self._add(kind, linear.arguments, linear, x=x.data_ptr(), y=out.data_ptr(), x_stride=x.stride(0))

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
        """Rotate [capacity, heads, dim] views in place."""
        check_rotary(query, key, torch.empty(self.capacity, dtype=torch.int64), cos_sin)
        self._add(_ROTARY, rotary_arguments(query, key, cos_sin), cos_sin)

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Write [capacity, kv heads, dim] views into the packed caches. What then stands in `key` is undefined."""
        if not is_packed(key_cache):
            raise ValueError("the KV cache is not packed")
        self._add(_STORE_KV, store_arguments(key, value, key_cache, value_cache), (key_cache, value_cache))

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams, out: Tensor
    ) -> None:
        """out = attention of query; both [capacity, heads, dim]."""
        arguments = attention_arguments(query, out, key_cache, value_cache, params)
        self._add(_ATTENTION, arguments, (key_cache, value_cache))

    def act_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """out [capacity, n] = act(gate) * up of gate_up [capacity, 2 n]."""
        check_act_mul(gate_up, activation)
        self._add(_ACT_MUL, act_mul_arguments(gate_up, out, activation))

    def cut(self) -> None:
        """Part 1 begins."""
        self._cut = len(self._operations)

    def run(
        self, positions: Tensor, slot_mapping: Tensor, metadata: AttentionMetadata, part: int | None = None
    ) -> None:
        """All of it, or a part, for a step's tokens: positions, slot_mapping [num_tokens] int64. Raises IndexError."""
        if self._packed is None:
            self._packed = (Operation * len(self._operations))(*self._operations)
        table, num_tokens = metadata.block_table, len(positions)
        if not is_usual(metadata) or positions.dtype is not torch.int64 or slot_mapping.dtype is not torch.int64:
            raise ValueError("positions and slots are int64, the metadata contiguous int32")
        if num_tokens > self.capacity or len(slot_mapping) != num_tokens:
            raise ValueError(f"{num_tokens} tokens and {len(slot_mapping)} slots do not fit {self.capacity}")
        inputs = StepInputs(
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            table.data_ptr(),
            *(num_tokens, len(metadata.seq_lens), table.stride(0), table.shape[1]),
            ctypes.addressof(self._num_done),
        )
        first = self._cut if part == 1 else 0
        count = (self._cut if part == 0 else len(self._operations)) - first
        operations = ctypes.addressof(self._packed) + first * ctypes.sizeof(Operation)
        done = self.library.run_program(
            operations, count, ctypes.addressof(inputs), DTYPES[self.dtype], torch.get_num_threads()
        )
        if done != count:
            raise IndexError(f"operation {first + done}: a position, slot or block lies outside its table")

    def _add(self, kind: int, arguments: ctypes.Structure, kept: object = None, **fields: int) -> None:
        self._kept += [arguments, kept]
        self._operations.append(Operation(kind=kind, arguments=ctypes.addressof(arguments), **fields))
