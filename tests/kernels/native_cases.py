"""What the tests of the native CPU kernels share: the instruction sets of this machine, tolerances, paged contexts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.cpu_backend import CpuBackend
from kernels.kv_store.reference import is_quantized, quantize
from kernels.native.build import EMULATED_TILES, runs_here, supported_isas

# Tiles are tested on every processor that can at least emulate them.
ISAS = (*supported_isas(), *((EMULATED_TILES,) if runs_here(EMULATED_TILES) and not runs_here("amxbf16") else ()))
TILES = ("amxbf16", EMULATED_TILES)
DOT_PRODUCTS = (*TILES, "avx512bf16")  # those that multiply bf16 numbers in pairs
TWIN_ROWS = (*DOT_PRODUCTS, "avx512vnni")  # that make bf16 rows integers: twin_rows.h
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (None, torch.int8)
CPU = torch.device("cpu")
# Largest relative error (Frobenius norm) against float64 on the same inputs, output rounding included.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, bit for bit but for the sign of zero."""
    return a.dtype == b.dtype and torch.equal(a, b)


def twin_rows(x: Tensor) -> Tensor:
    """x [M, K] in steps of 2^-14 of the power of two below each row's largest number: float64.

    Where that number has eight ones, steps are twice as long. Rows of whose numbers below 1/16 of that power too much
    would be lost stay as they are.
    """
    is_full = (x.abs().amax(1, keepdim=True).bfloat16().view(torch.int16) & 0x7F) == 0x7F
    numbers = x.double()
    largest = numbers.abs().amax(1, keepdim=True)
    step = torch.exp2(largest.clamp(min=1e-18).log2().floor() - torch.where(is_full, 13.0, 14.0))
    rounded = (numbers / step).round() * step
    rest = numbers.where((numbers / step).abs() < 1024, 0.0)
    is_kept = (numbers - rounded).square().sum(1) > 2.0**-19 * rest.square().sum(1)
    return numbers.where(is_kept[:, None], rounded)


def poison(cache: Tensor) -> None:
    """Fill it with NaN: with bytes of ones, a quantised one's integers are not zero and its scales NaN."""
    cache.fill_(-1 if is_quantized(cache) else float("nan"))


@dataclass(frozen=True)
class Heads:
    """The shape of one attention layer."""

    head_dim: int
    group: int = 2
    num_kv_heads: int = 2
    block_size: int = 16


class PagedContext:
    """One sequence with random keys, values and queries, stored in shuffled blocks of caches poisoned with NaN."""

    def __init__(
        self,
        backend: CpuBackend,
        heads: Heads,
        length: int,
        dtype: torch.dtype,
        seed: int = 0,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads = heads.group * heads.num_kv_heads
        self.backend = backend
        self.heads = heads
        self.length = length
        self.query = torch.randn(length, num_heads, heads.head_dim, generator=generator).to(dtype)
        self.key = torch.randn(length, heads.num_kv_heads, heads.head_dim, generator=generator).to(dtype)
        self.value = torch.randn(length, heads.num_kv_heads, heads.head_dim, generator=generator).to(dtype)
        num_blocks = -(-length // heads.block_size)
        self.block_table = torch.full((1, num_blocks + 2), -1, dtype=torch.int32)
        self.block_table[0, :num_blocks] = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks]
        self.caches = backend.allocate_kv_cache(
            num_blocks + 3, heads.block_size, heads.num_kv_heads, heads.head_dim, dtype, CPU, cache_dtype
        )
        for cache in self.caches:
            poison(cache)
        backend.store_kv(self.key, self.value, *self.caches, self.slots(torch.arange(length)))

    def slots(self, positions: Tensor) -> Tensor:
        """Where tokens lie: positions [n] -> [n] int64."""
        size = self.heads.block_size
        return self.block_table[0, positions // size].long() * size + positions % size

    def attend(self, params: AttentionParams, start: int = 0, stop: int | None = None) -> Tensor:
        """The queries at positions [start, stop) as one step: [stop - start, num_heads, head_dim]."""
        stop = self.length if stop is None else stop
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            block_table=self.block_table,
            num_decodes=int(stop - start == 1),
            max_query_len=stop - start,
            max_seq_len=stop,
        )
        out = torch.full_like(self.query[start:stop], float("nan"))
        return self.backend.paged_attention(self.query[start:stop], *self.caches, metadata, params, out)

    def expected(self, params: AttentionParams) -> Tensor:
        """All rows in float64, over what the cache stands for, with a dense mask: [length, num_heads, head_dim]."""
        query = self.query.double().unflatten(1, (self.heads.num_kv_heads, self.heads.group))
        key, value = (self._as_cached(x) for x in (self.key, self.value))
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * params.scale
        if params.soft_cap is not None:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)[None, :]
        hidden = distance < 0
        if params.sliding_window is not None:
            hidden |= distance >= params.sliding_window
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hgqk,khd->qhgd", probabilities, value).flatten(1, 2)

    def _as_cached(self, x: Tensor) -> Tensor:
        """Keys or values in float64, rounded to integers where the caches are quantised."""
        if not is_quantized(self.caches[0]):
            return x.double()
        integers, scales = quantize(x)
        return integers.double() * scales.double()
