"""The kernel backend in Triton, for NVIDIA GPUs; with TRITON_INTERPRET=1 it runs, slowly, on CPU tensors.

Cache layout: [num_blocks, num_kv_heads, block_size, head_dim], so that the keys of one head in one block are
contiguous. Every method checks its arguments by shape and stride alone and launches without waiting for the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import checks
from kernels.act_mul.triton import act_mul
from kernels.attention_input.triton import attention_input
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
from kernels.decode_inputs.triton import append_tokens, prepare_decodes
from kernels.kv_store.reference import FLOAT8
from kernels.kv_store.triton import store_kv
from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.linear.triton import TritonLinear
from kernels.paged_attention.triton_decode import decode_attention
from kernels.paged_attention.triton_prefill import prefill_attention
from kernels.prompt_lookup.reference import find_drafts
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.rotary.triton import rotary
from kernels.sampling.triton import choose, sample
from kernels.triton_launch import INTERPRETED, next_power_of_2
from kernels.weights import Deferred, made


class TorchLinear:
    """A linear layer through the vendor's GEMM library, which may choose another order of sums for another M."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        checks.check_linear(weight, bias)
        self._weight = weight  # [N, K]
        self._bias = bias  # [N] or None

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        checks.check_shape("x", x, [None, self._weight.shape[1]])
        return F.linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        return self(x).float()


class TritonBackend:
    """See `kernels.backend.KernelBackend` for the contract of every method."""

    name = "triton"
    isa: str | None = None
    weight_memory = None

    def __init__(self, device: torch.device, exact: bool = True) -> None:
        """`exact`: a row's bits depend on that row alone. Prefill then has the decode kernel's bits, and linear layers
        are ours in place of the vendor's, both at some cost in speed.

        Raises ValueError on a device that Triton cannot run on.
        """
        if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
            raise ValueError(
                f"kernel backend 'triton' cannot run on device '{device}' (set TRITON_INTERPRET=1 for CPU)"
            )
        self._exact = exact
        self._device = device

    def is_exact(self, block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
        """If that was asked for, on Hopper: which instruction multiplies for which number of rows is known of no other
        device. Nor where numpy multiplies in the compiler's place: it goes by the number of rows.
        """
        is_hopper = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) == (9, 0)
        return self._exact and is_hopper

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
        """Two zero-filled tensors [num_blocks, num_kv_heads, block_size, head_dim]; block_size a power of two >= 16."""
        if cache_dtype not in (None, dtype, FLOAT8):
            raise ValueError(f"kernel backend 'triton' has no KV cache of {cache_dtype} for keys and values in {dtype}")
        if block_size < 16 or next_power_of_2(block_size) != block_size:
            raise ValueError(f"block_size must be a power of two and at least 16, got {block_size}")
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        stored = cache_dtype or dtype
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
        return 2 * num_blocks * block_size * num_kv_heads * head_dim * (cache_dtype or dtype).itemsize

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write into both caches in place."""
        checks.check_shape("key", key, [None, None, None])
        checks.check_shape("value", value, list(key.shape))
        _check_caches(key, key_cache, value_cache)
        checks.check_shape("slot_mapping", slot_mapping, [key.shape[0]])
        checks.check_dtype("slot_mapping", slot_mapping, torch.int64)
        for name, tensor in (("key", key), ("value", value), ("slot_mapping", slot_mapping)):
            checks.check_last_dim_contiguous(name, tensor)
        checks.check_shape("key_cache", key_cache, [None, key.shape[1], None, key.shape[2]])
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
        """Causal attention [T, H, D]: the decode kernel for the first num_decodes sequences, the prefill kernel for the
        rest.

        Query rows beyond query_start_loc[-1] are left as they were; zeros with has_empty_decodes and without `out`.
        """
        checks.check_shape("query", query, [None, None, None])
        checks.check_dtype("query", query, *checks.ACTIVATION_DTYPES)
        checks.check_last_dim_contiguous("query", query)
        _check_caches(query, key_cache, value_cache)
        checks.check_metadata(metadata, query.shape[0])
        if query.shape[1] % key_cache.shape[1]:
            raise ValueError(f"{query.shape[1]} query heads do not divide into {key_cache.shape[1]} key/value heads")
        if params.sinks is not None:
            checks.check_shape("sinks", params.sinks, [query.shape[1]])
            checks.check_dtype("sinks", params.sinks, torch.float32)
            checks.check_last_dim_contiguous("sinks", params.sinks)
        if out is None:
            # Rows of nobody stand among the others then, and what lies there may be of any size.
            new = torch.zeros if metadata.has_empty_decodes else torch.empty
            out = new(query.shape, dtype=query.dtype, device=query.device)
        checks.check_shape("out", out, list(query.shape))
        checks.check_last_dim_contiguous("out", out)
        if metadata.num_decodes:
            decode_attention(query, key_cache, value_cache, metadata, params, out)
        first_row = 0 if metadata.has_empty_decodes else metadata.num_decodes
        if metadata.num_decodes < metadata.seq_lens.shape[0] and first_row < query.shape[0]:
            prefill_attention(query, (key_cache, value_cache), metadata, params, out, self._exact)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
        """RMSNorm of x [..., hidden]."""
        checks.check_norm(x, weight)
        return rms_norm(x, weight, eps, weight_offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm of the sum, the sum)."""
        checks.check_norm(x, weight, residual)
        return add_rms_norm(x, residual, weight, eps, weight_offset)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate query and key in place."""
        checks.check_rotary(query, key, positions, cos_sin)
        if not (cos_sin.is_contiguous() and positions.is_contiguous()):
            raise ValueError("cos_sin and positions must be contiguous")
        rotary(query, key, positions, cos_sin)

    def attention_input(self, heads: Tensor, given: AttentionInput) -> Tensor:
        """One launch; queries stay where they are."""
        checks.check_shape("heads", heads, [None, None, None])
        checks.check_dtype("heads", heads, *checks.ACTIVATION_DTYPES)
        checks.check_last_dim_contiguous("heads", heads)
        num_tokens, all_heads, head_dim = heads.shape
        if all_heads <= given.num_heads or (all_heads - given.num_heads) % 2:
            raise ValueError(f"{all_heads} heads are not {given.num_heads} of queries and as many keys as values")
        _check_caches(heads, given.key_cache, given.value_cache)
        kv_heads = (all_heads - given.num_heads) // 2
        if given.num_heads % kv_heads:
            raise ValueError(f"{given.num_heads} query heads do not divide into {kv_heads} key/value heads")
        checks.check_shape("key_cache", given.key_cache, [None, kv_heads, None, head_dim])
        checks.check_rotary(heads, heads, given.positions, given.cos_sin)
        checks.check_shape("slot_mapping", given.slot_mapping, [num_tokens])
        checks.check_dtype("slot_mapping", given.slot_mapping, torch.int64)
        if given.norms is not None:
            for weight in (given.norms.query_weight, given.norms.key_weight):
                checks.check_norm(heads, weight)
        for name, tensor in (("positions", given.positions), ("slot_mapping", given.slot_mapping)):
            checks.check_last_dim_contiguous(name, tensor)
        return attention_input(heads, given)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        checks.check_act_mul(gate_up, activation)
        return act_mul(gate_up, activation)

    def gate_up(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """Together where the layer is ours."""
        if isinstance(linear, TritonLinear):
            return linear.gate_up(x, activation)
        return self.act_mul(linear(x), activation)

    def pack_linear(
        self, weight: Tensor | Deferred, bias: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> Linear:
        """The vendor's library where it may choose its order, else ours; so for quantised weights, which it has not."""
        if scheme is None and not self._exact:
            return TorchLinear(made(weight), bias)
        return TritonLinear.of(weight, bias, scheme)

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        """Like any other."""
        return self.pack_linear(weight, None, scheme)

    def pick(self, head: Linear, x: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """Never: there is no such kernel."""
        return None

    def pack_integers(self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype) -> TritonLinear | None:
        """Ours, in groups of at least 16 columns."""
        return TritonLinear.of_integers(weight, bias)

    def program(self, capacity: int, dtype: torch.dtype) -> None:
        """There is none."""

    def find_drafts(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
    ) -> IntArray:
        """Prompt lookup, on the host."""
        return find_drafts(token_ids, rows, num_tokens, most)

    def prepare_decodes(self, step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
        """Inputs of a step that decodes."""
        prepare_decodes(step, rows, block_size, out)

    def append_tokens(self, step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
        """Tokens into their rows."""
        append_tokens(step, tokens, token_ids)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """One token id per row."""
        checks.check_sampling(logits, params)
        return sample(logits, params)

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Token ids, and which rows are bad."""
        checks.check_sampling(logits, params)
        return choose(logits, params)


def _check_caches(like: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError unless both caches have the layout of `allocate_kv_cache` for like [..., head_dim]."""
    checks.check_shape("key_cache", key_cache, [None, None, None, like.shape[-1]])
    checks.check_shape("value_cache", value_cache, list(key_cache.shape))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        checks.check_dtype(name, cache, like.dtype, FLOAT8)
        if not cache.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
