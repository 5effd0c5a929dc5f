"""The layers of a model as one native call: see program.h. Knows buffers and kernels; must not know models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.act_mul.cpu import act_mul_arguments
from kernels.backend import AttentionMetadata, AttentionParams, Kept, Linear
from kernels.checks import check_act_mul, check_rotary
from kernels.kv_store.cpu import is_packed, store_arguments
from kernels.linear.cpu import PackedLinear
from kernels.linear.quantized import QuantizedLinear
from kernels.native.library import DTYPES, NativeLibrary
from kernels.paged_attention.cpu import attention_arguments, is_usual
from kernels.rms_norm.cpu import norm_arguments
from kernels.rotary.cpu import rotary_arguments

_NORM, _LINEAR, _QUANTIZED, _ROTARY, _STORE_KV, _ATTENTION, _ACT_MUL, _KEEP = range(8)


class StepInputs(ctypes.Structure):
    """Mirrors the struct of the same name in program.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "query_start_loc", "seq_lens", "block_table")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "table_stride", "table_width")),
        *((name, ctypes.c_void_p) for name in ("num_done", "kept", "kept_index")),
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
    _held: list[Any] = field(default_factory=list)  # whatever the operations point to
    _packed: ctypes.Array[Operation] | None = None
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
        self._refuse_behind_keep()
        check_rotary(query, key, torch.empty(self.capacity, dtype=torch.int64), cos_sin)
        self._add(_ROTARY, rotary_arguments(query, key, cos_sin), cos_sin)

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Write [capacity, kv heads, dim] views into the packed caches. What then stands in `key` is undefined."""
        self._refuse_behind_keep()
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

    def keep(self, *buffers: Tensor) -> None:
        """See `Program`. These are all that is read behind it and written before."""
        for rows in buffers:
            if len(rows) != self.capacity or rows.dtype != self.dtype or not rows[0].is_contiguous():
                raise ValueError("kept rows are contiguous, of the program's dtype, and as many as it has room for")
            width, stride = rows[0].numel(), rows.stride(0)
            self._operations.append(Operation(kind=_KEEP, x=rows.data_ptr(), rows=width, token_stride=stride))
            self._held.append(rows)

    def run(
        self, positions: Tensor, slot_mapping: Tensor, metadata: AttentionMetadata, kept: Kept | None = None
    ) -> None:
        """For a step's tokens: positions, slot_mapping [num_tokens] int64. Raises IndexError."""
        if self._packed is None:
            self._packed = (Operation * len(self._operations))(*self._operations)
        num_tokens = len(positions)
        if positions.dtype is not torch.int64 or slot_mapping.dtype is not torch.int64:
            raise ValueError("positions and slots are int64")
        if num_tokens > self.capacity or len(slot_mapping) != num_tokens:
            raise ValueError(f"{num_tokens} tokens and {len(slot_mapping)} slots do not fit {self.capacity}")
        inputs = self._inputs(num_tokens, metadata)
        inputs.positions, inputs.slots = positions.data_ptr(), slot_mapping.data_ptr()
        if kept is not None:
            index, rest = kept[0], self._inputs(len(kept[0]), kept[1])
            if index.dtype is not torch.int64 or index.dim() != 1 or not index.is_contiguous():
                raise ValueError("which tokens are kept is [K] int64")
            inputs.kept, inputs.kept_index = ctypes.addressof(rest), index.data_ptr()
        count = len(self._operations)
        done = self.library.run_program(
            ctypes.addressof(self._packed), count, ctypes.addressof(inputs), DTYPES[self.dtype], torch.get_num_threads()
        )
        if done != count:
            raise IndexError(f"operation {done}: a position, slot or block lies outside its table")

    def _inputs(self, num_tokens: int, metadata: AttentionMetadata) -> StepInputs:
        table = metadata.block_table
        if not is_usual(metadata):
            raise ValueError("the metadata is contiguous int32")
        return StepInputs(
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_table=table.data_ptr(),
            num_tokens=num_tokens,
            num_seqs=len(metadata.seq_lens),
            table_stride=table.stride(0),
            table_width=table.shape[1],
            num_done=ctypes.addressof(self._num_done),
        )

    def _refuse_behind_keep(self) -> None:
        if any(operation.kind == _KEEP for operation in self._operations):
            raise ValueError("kept tokens have no positions or slots")

    def _add(self, kind: int, arguments: ctypes.Structure, held: object = None, **fields: int) -> None:
        self._held += [arguments, held]
        self._operations.append(Operation(kind=kind, arguments=ctypes.addressof(arguments), **fields))
