"""The kernels that `bench.gpu` times, ours and torch's, as calls over memory that no other call has just used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_peers import flashinfer_decode, flex, sdpa
from kernels.attention_input.reference import attention_input
from kernels.backend import AttentionInput, AttentionMetadata, AttentionParams, HeadNorms
from kernels.linear.schemes import FLOAT8, INT4, INT8, WeightScheme
from kernels.linear.triton import TritonLinear
from kernels.triton_backend import TritonBackend

Call = Callable[[], object]

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
FLOAT8_KV, WITH_LIST = "novainfer, fp8 KV", "novainfer, with its list"
# Contexts of the sequences of a batch. Ragged ones stand beside as many of their mean length.
_RAGGED = [int(64 * 256 ** (i / 63)) for i in range(64)]
DECODES: dict[str, list[int]] = {
    "256 x 1024": [1024] * 256,
    "64 x 4096": [4096] * 64,
    "8 x 32768": [32768] * 8,
    "32 x 4096": [4096] * 32,
    "8 x 4096": [4096] * 8,
    "1 x 4096": [4096],
    "1 x 32768": [32768],
    "ragged, 64 of 64 to 16384": _RAGGED,
    "64 of the ragged ones' mean": [sum(_RAGGED) // 64] * 64,
}
# Timed with their list of work as well, which is one launch a step.
LISTED, TOY_LISTED = ("1 x 4096", "64 x 4096"), ("2 x 40",)
# Contexts, queries at the end of each, tokens of each.
PREFILLS = {"4 x 1024": (4, 1024, 1024), "1 x 8192": (1, 8192, 8192), "2 x 2048 behind 6144": (2, 2048, 8192)}
TOY_PREFILLS = {"2 x 20": (2, 20, 20), "1 x 5 behind 20": (1, 5, 25)}
SAMPLED_ROWS, TOY_SAMPLED_ROWS = (1, 8, 64, 256), (3,)
VOCAB, TOY_VOCAB = 151_936, 500
TOY_DECODES: dict[str, list[int]] = {"2 x 40": [40, 40], "ragged": [5, 300]}
# Of Qwen3-8B: outputs, columns.
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
# How our linear layers hold their weights.
SCHEMES: dict[str, WeightScheme | None] = {"": None, " int8": INT8, " int4": INT4, " fp8": FLOAT8}
TOY_LAYERS = {"layer": (70, 1100)}
ROWS, TOY_ROWS = (1, 8, 64, 256, 2048), (1, 70)
# Tokens of the step between a layer's QKV and its attention, and of norms and activations.
TOKENS, TOY_TOKENS = (1, 256, 1024, 8192), (3,)
HIDDEN, INTERMEDIATE = 4096, 12288
_COLD_BYTES = 200 * 2**20  # that the variants of a call read together, so that each finds the cache without its own


def decode_calls(
    lengths: Sequence[int], device: torch.device, *, is_toy: bool, with_list: bool = False
) -> tuple[dict[str, list[Call]], int]:
    """One token of each sequence, by whom; and the bytes of keys and values in bf16 that such a step reads.

    with_list: one more, whose call also makes the list of work, as a step does once for all of its layers.
    """
    heads, kv_heads, dim = _sizes(0, is_toy=is_toy)
    num_bytes = 2 * 2 * kv_heads * dim * sum(lengths)
    copies = _copies(num_bytes, is_toy=is_toy)
    calls = {"novainfer": our_decodes(lengths, device, is_toy=is_toy)}
    calls[FLOAT8_KV] = our_decodes(lengths, device, is_toy=is_toy, stored=torch.float8_e4m3fn)
    if with_list:
        calls[WITH_LIST] = our_decodes(lengths, device, is_toy=is_toy, with_list=True)
    if len(set(lengths)) == 1:
        shape = (len(lengths), 1, lengths[0], heads, kv_heads, dim)
        calls["torch sdpa"] = [sdpa(*_contiguous(*shape, device), is_causal=False) for _ in range(copies)]
        calls["torch flex"] = [flex(*_contiguous(*shape, device), is_causal=False) for _ in range(copies)]
    theirs = flashinfer_decode(lengths, heads, kv_heads, dim, device)
    if theirs is not None:
        calls["flashinfer"] = [theirs]
    return calls, num_bytes


def our_decodes(
    lengths: Sequence[int],
    device: torch.device,
    *,
    is_toy: bool,
    dim: int = 0,
    stored: torch.dtype | None = None,
    with_list: bool = False,
) -> list[Call]:
    """Ours alone, over so many copies of keys and values that each finds the cache without its own."""
    sizes = _sizes(dim, is_toy=is_toy)
    num_bytes = (2 if stored is None else 1) * 2 * sizes[1] * sizes[2] * sum(lengths)
    copies = _copies(num_bytes, is_toy=is_toy, most=8 if stored is None else 16)
    return [_our_decode(lengths, sizes, device, stored, with_list=with_list) for _ in range(copies)]


def _sizes(dim: int, *, is_toy: bool) -> tuple[int, int, int]:
    """Heads of queries, heads of keys, and their size, unless that is given."""
    return (4, 2, dim or 32) if is_toy else (HEADS, KV_HEADS, dim or DIM)


def _copies(num_bytes: int, *, is_toy: bool, most: int = 8) -> int:
    return 1 if is_toy else max(1, min(most, _COLD_BYTES // num_bytes + 1))


def prefill_calls(
    batch: int, queries: int, length: int, device: torch.device, *, is_toy: bool
) -> tuple[dict[str, list[Call]], int]:
    """The last `queries` tokens of so many contexts, by whom; and the operations that causality leaves."""
    heads, kv_heads, dim = _sizes(0, is_toy=is_toy)
    seen = sum(range(length - queries + 1, length + 1))
    given = _contiguous(batch, queries, length, heads, kv_heads, dim, device)
    calls = {
        "novainfer": [our_prefill(batch, queries, length, device, exact=False, is_toy=is_toy)],
        "novainfer deterministic": [our_prefill(batch, queries, length, device, exact=True, is_toy=is_toy)],
        "torch flex": [flex(*given, is_causal=True)],
    }
    if queries == length:  # else its mask is another one
        calls["torch sdpa"] = [sdpa(*given, is_causal=True)]
    return calls, 4 * batch * heads * dim * seen


def _our_decode(
    lengths: Sequence[int],
    sizes: tuple[int, int, int],
    device: torch.device,
    stored: torch.dtype | None,
    *,
    with_list: bool,
) -> Call:
    heads, kv_heads, dim = sizes
    backend = TritonBackend(device)
    needed = [-(-length // BLOCK) for length in lengths]
    most = max(needed)
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table = torch.zeros(len(lengths), most, dtype=torch.int32)
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    caches = backend.allocate_kv_cache(sum(needed), BLOCK, kv_heads, dim, torch.bfloat16, device, stored)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, dtype=torch.bfloat16, device=device))
    metadata = AttentionMetadata(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table.to(device),
        len(lengths),
        1,
        max(lengths),
    )
    query = torch.randn(len(lengths), heads, dim, device=device).bfloat16()
    out, params = torch.empty_like(query), AttentionParams(dim**-0.5)
    if with_list:  # what the first layer of a step has found out is not in a copy
        return lambda: backend.paged_attention(query, *caches, replace(metadata), params, out)
    return partial(backend.paged_attention, query, *caches, metadata, params, out)


def our_prefill(
    batch: int, queries: int, length: int, device: torch.device, *, exact: bool, is_toy: bool, dim: int = 0
) -> Call:
    """Ours alone; exact: as in deterministic mode."""
    heads, kv_heads, dim = _sizes(dim, is_toy=is_toy)
    backend, blocks = TritonBackend(device, exact), -(-length // BLOCK)
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    caches = backend.allocate_kv_cache(batch * blocks, BLOCK, kv_heads, dim, torch.bfloat16, device)
    for cache in caches:
        cache.normal_()
    metadata = AttentionMetadata(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        torch.full((batch,), length, dtype=torch.int32, device=device),
        order.view(batch, blocks).to(device),
        0,
        queries,
        length,
    )
    query = torch.randn(batch * queries, heads, dim, device=device).bfloat16()
    out = torch.empty_like(query)
    return partial(backend.paged_attention, query, *caches, metadata, AttentionParams(dim**-0.5), out)


def _contiguous(
    batch: int, queries: int, length: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, H, Q, D], key and value [B, Hkv, L, D]."""
    key, value = (torch.randn(batch, kv_heads, length, dim, device=device).bfloat16() for _ in range(2))
    return torch.randn(batch, heads, queries, dim, device=device).bfloat16(), key, value


def input_calls(tokens: int, device: torch.device, *, is_toy: bool) -> tuple[dict[str, list[Call]], int]:
    """Norms of queries and keys, rotary and the store of keys and values: in one launch, and in one for each part.

    And the bytes that have to be read and written. Queries stay where they are, so that a call reads what one before it
    has written: for the time that is the same.
    """
    heads, kv_heads, dim = (4, 2, 32) if is_toy else (HEADS, KV_HEADS, DIM)
    all_heads = heads + 2 * kv_heads
    num_bytes = 2 * 2 * all_heads * dim * tokens
    backend, blocks = TritonBackend(device), -(-tokens // BLOCK)
    copies = 1 if is_toy else max(1, min(32, _COLD_BYTES // num_bytes + 1))
    weight = torch.ones(dim, dtype=torch.bfloat16, device=device)
    angles = torch.rand(tokens, 2, dim // 2, device=device)
    slots = torch.arange(tokens, device=device)
    calls: dict[str, list[Call]] = {"novainfer, one launch": [], "novainfer, in parts": []}
    for _ in range(copies):
        caches = backend.allocate_kv_cache(blocks, BLOCK, kv_heads, dim, torch.bfloat16, device)
        given = AttentionInput(heads, HeadNorms(weight, weight, 1e-6, 0.0), slots, angles, *caches, slots)
        rows = torch.randn(tokens, all_heads, dim, device=device).bfloat16()
        calls["novainfer, one launch"].append(partial(backend.attention_input, rows, given))
        calls["novainfer, in parts"].append(partial(attention_input, backend, rows, given))
    return calls, num_bytes


def row_calls(tokens: int, device: torch.device, *, is_toy: bool) -> dict[str, tuple[dict[str, list[Call]], int]]:
    """What goes through a step's rows between layers, by whom; and the bytes that have to be read and written."""
    hidden, wide = (64, 96) if is_toy else (HIDDEN, INTERMEDIATE)
    backend = TritonBackend(device)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def rows(width: int) -> Tensor:
        return torch.randn(tokens, width, device=device).bfloat16()

    def each(num_bytes: int, make: Callable[[], Call]) -> list[Call]:
        return [make() for _ in range(1 if is_toy else max(1, min(32, _COLD_BYTES // num_bytes + 1)))]

    norm, add, gated = 2 * 2 * tokens * hidden, 2 * 4 * tokens * hidden, 2 * 3 * tokens * wide
    return {
        "norm": (
            {
                "novainfer": each(norm, lambda: partial(backend.rms_norm, rows(hidden), weight, 1e-6)),
                "torch": each(norm, lambda: partial(F.rms_norm, rows(hidden), (hidden,), weight, 1e-6)),
            },
            norm,
        ),
        "add and norm": (
            {"novainfer": each(add, lambda: partial(backend.add_rms_norm, rows(hidden), rows(hidden), weight, 1e-6))},
            add,
        ),
        "silu and mul": (
            {"novainfer": each(gated, lambda: partial(backend.act_mul, rows(2 * wide), "silu"))},
            gated,
        ),
    }


def linear_calls(rows: int, outputs: int, columns: int, device: torch.device, *, is_toy: bool) -> dict[str, list[Call]]:
    """x [rows, columns] times weights [outputs, columns], by whom."""
    x, weights = _rows_and_weights(rows, outputs, columns, device, is_toy=is_toy)
    schemes: dict[str, list[Call]] = {
        f"novainfer{name}": [partial(TritonLinear.of(weight, None, scheme), x) for weight in weights]
        for name, scheme in SCHEMES.items()
    }
    return {"torch": [partial(F.linear, x, weight) for weight in weights], **schemes}


def our_linears(
    rows: int, outputs: int, columns: int, device: torch.device, scheme: WeightScheme | None, *, is_toy: bool
) -> list[Call]:
    """Ours alone, with one kind of weights."""
    x, weights = _rows_and_weights(rows, outputs, columns, device, is_toy=is_toy)
    return [partial(TritonLinear.of(weight, None, scheme), x) for weight in weights]


def our_gate_ups(
    rows: int, outputs: int, columns: int, device: torch.device, scheme: WeightScheme | None, *, is_toy: bool
) -> list[Call]:
    """The same of gate and up, half of the outputs each, with the activation in the same launch."""
    x, weights = _rows_and_weights(rows, outputs, columns, device, is_toy=is_toy)
    return [partial(TritonLinear.of(weight, None, scheme).gate_up, x, "silu") for weight in weights]


def _rows_and_weights(
    rows: int, outputs: int, columns: int, device: torch.device, *, is_toy: bool
) -> tuple[Tensor, list[Tensor]]:
    """x [rows, columns], and so many weights [outputs, columns] that each finds the cache without its own."""
    copies = _copies(2 * outputs * columns, is_toy=is_toy)
    x = torch.randn(rows, columns, device=device).bfloat16()
    return x, [torch.randn(outputs, columns, device=device).bfloat16() for _ in range(copies)]
