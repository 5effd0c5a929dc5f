"""The kernel backend in plain torch: the definition of every kernel on any device, slow, the oracle of the tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.act_mul.reference import act_mul
from kernels.attention_input.reference import attention_input
from kernels.backend import (
    AttentionInput,
    AttentionMetadata,
    AttentionParams,
    DecodeInputs,
    IntArray,
    Linear,
    MakeSampling,
    PersistentRows,
    SamplingTensors,
)
from kernels.checks import check_linear, check_shape
from kernels.decode_inputs.reference import append_tokens, prepare_decodes
from kernels.kv_store.reference import row_width, store_kv, stored_dtype
from kernels.linear.reference import DequantizedLinear, dequantize, quantize, widened
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.memory import lazy_zeros
from kernels.paged_attention.reference import paged_attention
from kernels.prompt_lookup.reference import find_drafts
from kernels.rms_norm.reference import add_rms_norm, rms_norm
from kernels.rotary.reference import rotary
from kernels.sampling.reference import sample, without_bad_rows
from kernels.weights import Deferred, made


class ReferenceLinear:
    """A linear layer that multiplies one row at a time, so that a row's bits cannot depend on the batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        check_linear(weight, bias)
        self._weight = weight  # [N, K]
        self._bias = bias  # [N] or None

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        check_shape("x", x, [None, self._weight.shape[1]])
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        for row in range(x.shape[0]):
            out[row] = F.linear(x[row : row + 1], self._weight, self._bias)[0]
        return out

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()


class ReferenceBackend:
    """See `kernels.backend.KernelBackend` for the contract of every method."""

    name = "reference"
    isa: str | None = None
    weight_memory = None

    def is_exact(self, block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Never: torch's fp32 silu rounds the last few elements of a tensor differently."""
        return False

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Two zero-filled tensors [num_blocks, block_size, num_kv_heads, width]; see `kernels.kv_store.reference`."""
        stored = stored_dtype(dtype, cache_dtype)
        shape = (num_blocks, block_size, num_kv_heads, row_width(head_dim, stored))
        if device.type == "cpu":
            return lazy_zeros(shape, stored), lazy_zeros(shape, stored)
        return torch.zeros(shape, dtype=stored, device=device), torch.zeros(shape, dtype=stored, device=device)

    def kv_cache_bytes(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> int:
        """Bytes of both cache tensors."""
        stored = stored_dtype(dtype, cache_dtype)
        return 2 * num_blocks * block_size * num_kv_heads * row_width(head_dim, stored) * stored.itemsize

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write into both caches in place."""
        store_kv(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention [T, H, D]; exact per row."""
        return paged_attention(query, key_cache, value_cache, metadata, params, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
        """RMSNorm of x [..., hidden]."""
        return rms_norm(x, weight, eps, weight_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of the sum, the sum)."""
        return add_rms_norm(x, residual, weight, eps, weight_offset)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate query and key in place."""
        rotary(query, key, positions, cos_sin)

    def attention_input(self, heads: Tensor, given: AttentionInput) -> Tensor:
        """The kernels one after another."""
        return attention_input(self, heads, given)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        return act_mul(gate_up, activation)

    def gate_up(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """One after the other."""
        return self.act_mul(linear(x), activation)

    def pack_linear(
        self, weight: Tensor | Deferred, bias: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> Linear:
        """Keeps the weight as it is, or what quantising makes of it in fp32."""
        if scheme is not None:
            return DequantizedLinear(ReferenceLinear, dequantize(*quantize(weight, scheme), scheme), bias, scheme)
        return ReferenceLinear(made(weight), bias)

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        """Like any other."""
        return self.pack_linear(weight, None, scheme)

    def pick(self, head: Linear, x: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """Never: there is no such kernel."""
        return None

    def pack_integers(self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Keeps the weights in fp32."""
        return DequantizedLinear(ReferenceLinear, widened(weight), bias)

    def program(self, capacity: int, dtype: torch.dtype) -> None:
        """There is none."""

    def find_drafts(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
    ) -> IntArray:
        """Prompt lookup."""
        return find_drafts(token_ids, rows, num_tokens, most)

    def prepare_decodes(self, step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
        """Inputs of a step that decodes."""
        prepare_decodes(step, rows, block_size, out)

    def append_tokens(self, step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
        """Tokens into their rows."""
        append_tokens(step, tokens, token_ids)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """One token id per row."""
        return sample(logits, params)

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Token ids, and which rows are bad."""
        return without_bad_rows(logits, self.sample(logits, params))
