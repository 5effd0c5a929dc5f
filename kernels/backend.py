"""The interface between the model code and the kernels, and the choice of an implementation.

Lives in the worker process. Knows tensors and shapes; must not know requests, models or the scheduler.
Importing this module loads torch alone: a concrete backend, and with it triton or the native library, is
imported by `select_backend`.

Shape letters: T tokens of this step, H query heads, Hkv key/value heads, D head size, B rows to sample, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.linear.schemes import IntegerWeight, WeightScheme
from kernels.weights import Deferred, WeightMemory

IntArray = npt.NDArray[np.int64]

BACKEND_NAMES = ("cpu", "triton", "reference")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where this step's query tokens and their context lie. Sequences of one query token (decodes) come first."""

    query_start_loc: Tensor  # [num_seqs + 1] int32: sequence i owns query rows [i] .. [i + 1] - 1
    seq_lens: Tensor  # [num_seqs] int32: context length including this step's tokens; 0 marks a padding row
    block_table: Tensor  # [num_seqs, max_blocks] int32
    num_decodes: int  # the first num_decodes sequences have exactly one query token
    max_query_len: int
    max_seq_len: int  # none is longer
    has_empty_decodes: bool = False  # those of length 0 have none; rows of prompts may then begin before
    # What a backend has found out about all of this, for the other layers of the step, by keys of its own.
    derived: dict[object, object] = field(default_factory=dict, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is constant for one attention layer."""

    scale: float
    sliding_window: int | None = None  # a query at position p sees keys p - window + 1 .. p
    soft_cap: float | None = None  # scores = soft_cap * tanh(scores / soft_cap), after scale
    # [H] float32: each the score of one more key, which has no value. Tensors do not compare to one truth.
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of the queries and of the keys by itself."""

    query_weight: Tensor  # [D]
    key_weight: Tensor  # [D]
    eps: float
    weight_offset: float


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What stands between a fused projection and attention."""

    num_heads: int  # H; the other heads are keys, then as many values
    norms: HeadNorms | None
    positions: Tensor  # [T] int64
    cos_sin: Tensor  # [max_position, 2, rotary_dim // 2] float32
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of B rows, on the device of the logits; `kernels.sampling` states what they mean."""

    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int32, 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off
    seed: Tensor  # [B] int64, the two's complement bits of a uint64
    choice: Tensor  # [B] int32
    index: Tensor  # [B] int64: index of the token in the output, 0 = first sampled


MakeSampling = Callable[[], SamplingTensors]  # those of a step, for who wants them
Kept = tuple[Tensor, AttentionMetadata]  # some of a step's tokens: which, [K] int64, rising; what holds for these alone


@dataclass(frozen=True, slots=True)
class PersistentRows:
    """What a device knows of R rows from step to step. All contiguous in their last dimension."""

    token_ids: Tensor  # [R, max_model_len] int32
    block_table: Tensor  # [R, max_blocks] int32
    floats: Tensor  # [3, R] float32: temperature, top_p, min_p
    integers: Tensor  # [3, R] int64: top_k, choice, seed


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a step of `size` decodes, in memory that stays where it is."""

    input_ids: Tensor  # [size] int64
    positions: Tensor  # [size] int64
    seq_lens: Tensor  # [size] int32
    slot_mapping: Tensor  # [size] int64
    block_table: Tensor  # [size, max_blocks] int32
    sampling: SamplingTensors  # [size]


class Linear(Protocol):
    """A linear layer with its weight packed the way its backend likes it."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] in x's dtype. In an exact backend the bits of row m depend on x[m] alone."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """The same numbers in float32."""
        ...


class Program(Protocol):
    """A model's layers, recorded once over buffers of `capacity` tokens and run as one call for steps of up to so many.

    The kernels do what those of `KernelBackend` do, with the same bits; outputs go into buffers that the caller names.
    Every method raises ValueError on what it cannot take.
    """

    capacity: int

    @property
    def num_done(self) -> int:
        """Operations that have ended, in all runs together; it counts up while one runs."""
        ...

    def buffer(self, name: str, width: int) -> Tensor:
        """[capacity, width] in the program's dtype, to read and write; one for each name and width."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float) -> None:
        """out = rms_norm(x); both [capacity, width], or in place [capacity, heads, width]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float
    ) -> None:
        """residual += x; out = rms_norm(residual)."""
        ...

    def linear(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """out = linear(x)."""
        ...

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
        """Rotate query and key in place, at the step's positions."""
        ...

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Into the step's slots. What then stands in `key` is undefined."""
        ...

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams, out: Tensor
    ) -> None:
        """out = attention over the step's sequences."""
        ...

    def act_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """out = act(gate) * up."""
        ...

    def keep(self, *buffers: Tensor) -> None:
        """From here on kept tokens alone: rows [capacity, ...] of these buffers move up. No rotary or store_kv then."""
        ...

    def run(
        self, positions: Tensor, slot_mapping: Tensor, metadata: AttentionMetadata, kept: Kept | None = None
    ) -> None:
        """For one step's tokens; kept: None = all. Raises IndexError for a position, slot or block not there."""
        ...


class KernelBackend(Protocol):
    """All kernels that a model step needs. Every method raises ValueError on shapes, dtypes or names it
    cannot take.

    Nothing is mutated except where a method says so. Activations are bf16, fp16 or fp32.
    """

    @property
    def name(self) -> str:
        """One of BACKEND_NAMES."""
        ...

    @property
    def isa(self) -> str | None:
        """The CPU instruction set that the kernels were compiled for; None where torch or Triton runs them."""
        ...

    @property
    def weight_memory(self) -> WeightMemory | None:
        """Where packed weights lie, for tables beside them; None where each tensor has memory of its own."""
        ...

    def is_exact(self, block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether with such KV blocks and weights of `dtype` a row's bits depend on that row alone, in every method."""
        ...

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
        """Zero-filled (key_cache, value_cache) of one layer; dimension 0 is the block, the rest the backend's own.

        dtype: of keys and values; cache_dtype: the same or None, or torch.int8 for integers with one scale for each
        token and head, or torch.float8_e4m3fn (`kernels.kv_store.reference`). Raises ValueError if the backend has no
        such cache.
        """
        ...

    def kv_cache_bytes(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> int:
        """Bytes that both tensors of `allocate_kv_cache` take together."""
        ...

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key and value [T, Hkv, D] (views with a contiguous last dimension will do) into the caches,
        in place.

        slot_mapping [T] int64: slot = block * block_size + offset; -1 skips the token. Slots are unique.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of query [T, H, D] over the paged context -> [T, H, D], written to `out` where
        given.

        This step's keys and values must have been stored before. H is a multiple of Hkv. Query row j of a
        sequence with q rows stands at position seq_len - q + j. Cache slots outside a row's context are
        never read into its result.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
        """x [..., hidden] -> norm(x) * (weight_offset + weight), statistics in fp32.

        With offset 0 the normalised value is cast to x's dtype before the product (Llama); otherwise the
        product is taken in fp32 and cast once (Gemma).
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """x, residual [..., hidden] -> (rms_norm(x + residual), x + residual); the sum is rounded first."""
        ...

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate query [T, H, D] and key [T, Hkv, D] in place, in half-split (neox) pairs, computed in fp32.

        positions [T] int64; cos_sin [max_position, 2, rotary_dim // 2] float32; elements from rotary_dim on
        are untouched.
        """
        ...

    def attention_input(self, heads: Tensor, given: AttentionInput) -> Tensor:
        """heads [T, H + 2 * Hkv, D] -> queries [T, H, D], normalised and rotated; so are keys, and stored with values.

        `rms_norm`, `rotary` and `store_kv` in one, but for the last bit. What then stands in `heads` is undefined, and
        the result may be a view of it.
        """
        ...

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [T, 2 * I], gate first -> act(gate) * up [T, I]; fp32, rounded once; activation in ACTIVATIONS."""
        ...

    def gate_up(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """`act_mul(linear(x), activation)`, with its bits: x [T, K] -> [T, I], for a layer of 2 * I outputs."""
        ...

    def pack_linear(
        self, weight: Tensor | Deferred, bias: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> Linear:
        """weight [N, K], bias [N] or None -> a callable; the caller may release the weight afterwards.

        With a scheme the weight is quantised; columns that come with peaks, and are whole groups, become what they
        become in the whole weight. Raises ValueError if the backend cannot multiply by such weights.
        """
        ...

    def pack_head(self, weight: Tensor | Deferred, scheme: WeightScheme | None = None) -> Linear:
        """`pack_linear` of a vocabulary projection, from whose rows tokens are picked."""
        ...

    def pick(self, head: Linear, x: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """`choose` from the logits that head.in_float32(x) would be, x [B, K], without computing most of them.

        None where that is not possible, or saves nothing: always, unless `pack_head` has made head.
        """
        ...

    def pack_integers(self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear | None:
        """weight [N, K], bias [N] or None -> a callable over exactly these weights, for activations in `dtype`.

        None where the backend multiplies by no such weights: they have to be widened.
        """
        ...

    def program(self, capacity: int, dtype: torch.dtype) -> Program | None:
        """An empty one; None where the backend has none to offer."""
        ...

    def find_drafts(
        self, token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
    ) -> IntArray:
        """Guess up to most[i] tokens of row rows[i], and write them behind its num_tokens[i] tokens in token_ids.

        token_ids [max_rows, max_len] with a contiguous last dimension and room for them; returns how many were written,
        [len(rows)]. `kernels.prompt_lookup` states which.
        """
        ...

    def prepare_decodes(self, step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
        """Write the inputs of a step in which each row reads the token at its position and samples the one behind it.

        step [3, size] int64, contiguous: row, position, index of the token to sample. A negative row pads the step:
        token and position 0, no context, slot -1, greedy.
        """
        ...

    def append_tokens(self, step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
        """Write tokens [size] int64 into token_ids [R, max_model_len] int32, behind the positions of `step`'s rows."""
        ...

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """logits [B, V] float32 -> [B] int64 token ids. Row b depends on logits[b] and params[b] alone."""
        ...

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """(token ids, is_bad [B] bool). A row with NaN or +infinity, or with no id above -infinity, is bad: token 0."""
        ...


def select_backend(device: torch.device, name: str | None = None, *, exact: bool = True) -> KernelBackend:
    """The backend called `name`, or the device's own: "triton" on cuda, "cpu" on cpu, "reference" elsewhere.

    exact: see `TritonBackend`; the others are as exact as they can be. Raises ValueError for an unknown name, or for a
    backend that cannot run on the device.
    """
    if name is None:
        name = {"cuda": "triton", "cpu": "cpu"}.get(device.type, "reference")
    if name == "reference":
        from kernels.reference_backend import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"kernel backend 'cpu' cannot run on device '{device}'")
        from kernels.cpu_backend import CpuBackend

        return CpuBackend()
    if name == "triton":
        from kernels.triton_backend import TritonBackend

        return TritonBackend(device, exact)
    raise ValueError(f"unknown kernel backend '{name}', expected one of {', '.join(BACKEND_NAMES)}")
