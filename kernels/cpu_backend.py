"""The kernel backend for CPUs: native code where it can be built, plain torch where it cannot."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.act_mul import cpu as act_mul_cpu
from kernels.act_mul import reference as act_mul_reference
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
from kernels.decode_inputs.reference import append_tokens, prepare_decodes
from kernels.kv_store import cpu as kv_cpu
from kernels.kv_store import reference as kv_reference
from kernels.linear.cpu import PackedLinear
from kernels.linear.quantized import QuantizedLinear
from kernels.linear.reference import DequantizedLinear, TorchLinear, dequantize, quantize, widened
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.linear.screened import ScreenedLinear, can_screen
from kernels.memory import lazy_zeros
from kernels.native.build import NativeBuildError
from kernels.native.library import DTYPES, NativeLibrary, load_library
from kernels.native.program import NativeProgram
from kernels.paged_attention import cpu as attention_cpu
from kernels.paged_attention import reference as attention_reference
from kernels.prompt_lookup import cpu as lookup_cpu
from kernels.prompt_lookup import reference as lookup_reference
from kernels.rms_norm import cpu as norm_cpu
from kernels.rms_norm import reference as norm_reference
from kernels.rotary import cpu as rotary_cpu
from kernels.rotary import reference as rotary_reference
from kernels.sampling import cpu as sampling_cpu
from kernels.sampling import reference as sampling_reference
from kernels.weights import Deferred, WeightMemory, made

_log = logging.getLogger(__name__)


class CpuBackend:
    """See `kernels.backend.KernelBackend` for the contract of every method.

    The native kernels give every row bits that depend on that row alone, on every instruction set. Without them (no
    compiler, say) the same methods run in torch, slower and without that promise for linear layers.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None, library: NativeLibrary | None = None) -> None:
        """isa: one of `kernels.native.build.ISA_FLAGS`; None takes $NOVAINFER_CPU_ISA, or the best one here.

        library: kernels that are loaded already, in place of those.
        """
        self._warned_layout = False
        self._library = library
        try:
            self._library = library or load_library(isa)
        except NativeBuildError as error:
            _log.warning("native CPU kernels are not available, falling back to slower torch code: %s", error)

    @property
    def isa(self) -> str | None:
        """The instruction set in use; None where the native kernels are not available."""
        return None if self._library is None else self._library.isa

    @property
    def weight_memory(self) -> WeightMemory | None:
        """The native kernels' own."""
        return None if self._library is None else self._library.weight_memory

    def is_exact(self, block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Where everything runs in native code: torch's linears and its fp32 silu depend on a row's neighbours."""
        return self._library is not None and kv_cpu.supports_layout(block_size, head_dim, dtype)

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
        """Zero-filled caches: packed (see `kernels.kv_store.cpu`) where possible, else as in the reference backend."""
        stored = _stored_dtype(dtype, cache_dtype)
        key_shape, value_shape = self._cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype, stored)
        return lazy_zeros(key_shape, stored), lazy_zeros(value_shape, stored)

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
        stored = _stored_dtype(dtype, cache_dtype)
        shapes = self._cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype, stored)
        return sum(torch.Size(shape).numel() for shape in shapes) * stored.itemsize

    def _cache_shapes(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        stored: torch.dtype,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._library is not None and kv_cpu.supports_layout(block_size, head_dim, dtype):
            return kv_cpu.cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, stored)
        if self._library is not None and not self._warned_layout:
            self._warned_layout = True
            _log.warning(
                "block_size %d, head_dim %d in %s has no native attention kernel (block_size must be a multiple of 16, "
                "head_dim even and at most %d): attention runs in slower torch code",
                *(block_size, head_dim, dtype, kv_cpu.MAX_HEAD_DIM),
            )
        shape = (num_blocks, block_size, num_kv_heads, kv_reference.row_width(head_dim, stored))
        return shape, shape

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write into both caches in place."""
        if self._library is None or not kv_cpu.is_packed(key_cache):
            kv_reference.store_kv(key, value, key_cache, value_cache, slot_mapping)
        else:
            kv_cpu.store_kv(self._library, key, value, key_cache, value_cache, slot_mapping)

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
        if self._library is None or not kv_cpu.is_packed(key_cache):
            return attention_reference.paged_attention(query, key_cache, value_cache, metadata, params, out)
        return attention_cpu.paged_attention(self._library, query, key_cache, value_cache, metadata, params, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
        """RMSNorm of x [..., hidden]."""
        if self._library is None or weight.dtype != x.dtype:
            return norm_reference.rms_norm(x, weight, eps, weight_offset)
        return norm_cpu.rms_norm(self._library, x, weight, eps, weight_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of the sum, the sum)."""
        if self._library is None or weight.dtype != x.dtype:
            return norm_reference.add_rms_norm(x, residual, weight, eps, weight_offset)
        return norm_cpu.add_rms_norm(self._library, x, residual, weight, eps, weight_offset)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate query and key in place."""
        if self._library is None or query.dtype not in DTYPES:
            rotary_reference.rotary(query, key, positions, cos_sin)
        else:
            rotary_cpu.rotary(self._library, query, key, positions, cos_sin)

    def attention_input(self, heads: Tensor, given: AttentionInput) -> Tensor:
        """The kernels one after another."""
        return attention_input(self, heads, given)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        if self._library is None or gate_up.dtype not in DTYPES:
            return act_mul_reference.act_mul(gate_up, activation)
        return act_mul_cpu.act_mul(self._library, gate_up, activation)

    def gate_up(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """One after the other."""
        return self.act_mul(linear(x), activation)

    def pack_linear(
        self, weight: Tensor | Deferred, bias: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> PackedLinear | QuantizedLinear | TorchLinear | DequantizedLinear:
        """Packs the weight; the originals may be released. There are no fp8 weights."""
        if scheme is not None and scheme.is_float:
            raise ValueError(f"kernel backend 'cpu' has no {scheme.name} weights")
        if self._library is None or weight.dtype not in DTYPES:
            if scheme is None:
                return TorchLinear(made(weight), bias)
            return DequantizedLinear(TorchLinear, dequantize(*quantize(weight, scheme), scheme), bias, scheme)
        if scheme is None:
            return PackedLinear(self._library, weight, bias)
        return QuantizedLinear.quantizing(self._library, weight, bias, scheme)

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        """With rougher weights beside its own, if it is large."""
        library = self._library
        if library is not None and weight.dtype in DTYPES and can_screen(library, weight, scheme):
            return ScreenedLinear(library, weight, scheme)
        return self.pack_linear(weight, None, scheme)

    def pick(self, head: Linear, x: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """From few logits, mostly."""
        return head.pick(x, params()) if isinstance(head, ScreenedLinear) else None

    def pack_integers(
        self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear | DequantizedLinear:
        """Packs integers and scales; the originals may be released."""
        if self._library is None or dtype not in DTYPES:
            return DequantizedLinear(TorchLinear, widened(weight), bias)
        return QuantizedLinear.of_integers(self._library, weight, bias, dtype)

    def program(self, capacity: int, dtype: torch.dtype) -> NativeProgram | None:
        """One native call instead of a dozen a layer, each from Python."""
        return None if self._library is None or dtype not in DTYPES else NativeProgram(self._library, capacity, dtype)

    def find_drafts(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
    ) -> IntArray:
        """Prompt lookup."""
        if self._library is None:
            return lookup_reference.find_drafts(token_ids, rows, num_tokens, most)
        return lookup_cpu.find_drafts(self._library, token_ids, rows, num_tokens, most)

    def prepare_decodes(self, step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
        """Inputs of a step that decodes."""
        prepare_decodes(step, rows, block_size, out)

    def append_tokens(self, step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
        """Tokens into their rows."""
        append_tokens(step, tokens, token_ids)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """One token id per row."""
        if self._library is None:
            return sampling_reference.sample(logits, params)
        return sampling_cpu.sample(self._library, logits, params)

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Token ids, and which rows are bad."""
        if self._library is None:
            return sampling_reference.without_bad_rows(logits, sampling_reference.sample(logits, params))
        is_bad = torch.empty(len(logits), dtype=torch.bool)
        return sampling_cpu.sample(self._library, logits, params, is_bad), is_bad


def _stored_dtype(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> torch.dtype:
    if cache_dtype is kv_reference.FLOAT8:
        raise ValueError("kernel backend 'cpu' has no KV cache of e4m3 numbers")
    return kv_reference.stored_dtype(dtype, cache_dtype)
