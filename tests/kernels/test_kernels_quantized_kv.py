"""The quantised KV cache: what is stored, to the bit, and what a token that is not finite does to the rows that see it.

How attention over it is computed is tested beside that over the plain one, in `test_kernels_native_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.cpu_backend import CpuBackend
from kernels.kv_store.reference import dequantize, quantize
from kernels.reference_backend import ReferenceBackend
from tests.kernels.native_cases import (
    CPU,
    DOT_PRODUCTS,
    DTYPES,
    ISAS,
    TOLERANCE,
    Heads,
    PagedContext,
    poison,
    relative_error,
    same_bits,
)

pytestmark = pytest.mark.stage0

LARGEST = {torch.float32: 3e38, torch.bfloat16: 3e38, torch.float16: 65504.0}


def _fallback() -> CpuBackend:
    return CpuBackend("no such instruction set")


def make_heads(count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[count, 2, dim], in whose first tokens is everything that could go wrong; a view into a wider tensor."""
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(count, 5, dim, generator=generator) * torch.logspace(-3, 3, count)[:, None, None]
    x = wide.to(dtype)[:, 1:3]
    x[0] = 0.0
    x[1, 0, dim // 2], x[2, 1, -1], x[3, 0, 0] = math.nan, math.inf, -math.inf
    x[4] = (torch.arange(dim) % 255 - 127) / 4
    x[4, :, 0] = 63.5  # so the scale is 1 / 2, and every second of the others in the middle between two integers
    x[5, 0, :2] = torch.tensor((LARGEST[dtype], -LARGEST[dtype]))
    x[6] = 0.0
    x[6, 0, 1] = 5e-44  # so small that its scale becomes zero
    x[7] = torch.finfo(dtype).smallest_normal * torch.linspace(-50, 50, dim)
    return x


def unpacked(cache: Tensor, *, in_pairs: bool, is_key: bool) -> tuple[Tensor, Tensor]:
    """A packed cache -> integers [slots, num_kv_heads, padded_dim] and scales [slots, num_kv_heads, 1]."""
    column, k = torch.arange(16)[:, None], torch.arange(4)
    at = column // 4 * 16 + k // 2 * 8 + column % 4 * 2 + k % 2 if in_pairs else 4 * column + k
    scales = cache[..., 0, :].contiguous().view(torch.float32)  # [blocks, heads, panels, 16]
    integers = cache[..., 1:, :][..., at].int()  # [blocks, heads, panels, chunks, 16, 4]
    if in_pairs:
        magnitude = integers & 0x7F
        integers = torch.where(integers < 0, -magnitude, magnitude)
    if is_key:
        integers = integers.transpose(3, 4).flatten(4)  # chunks are dimensions, columns tokens
    else:
        integers = integers.unflatten(3, (4, -1)).permute(0, 1, 2, 3, 6, 4, 5).flatten(5).flatten(3, 4)
    assert integers.shape[3] == 16
    return _by_slot(integers.to(torch.int8)), _by_slot(scales[..., None])


def _by_slot(tensor: Tensor) -> Tensor:
    """[blocks, heads, panels, 16, n] -> [slots, heads, n]."""
    return tensor.permute(0, 2, 3, 1, 4).flatten(0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_keys_and_values_when_stored_then_integers_and_scales_have_the_references_bits(
    isa: str, dtype: torch.dtype
) -> None:
    in_pairs = isa in DOT_PRODUCTS and dtype == torch.bfloat16
    backend = CpuBackend(isa)
    for dim, block_size in ((2, 16), (18, 48), (64, 16), (128, 32), (256, 16)):
        key, value = make_heads(40, dim, dtype), make_heads(41, dim, dtype)[1:]
        slots = torch.randperm(48 * 4, generator=torch.Generator().manual_seed(1))[:40]
        slots[9] = slots[30] = -1
        caches = backend.allocate_kv_cache(48 * 4 // block_size, block_size, 2, dim, dtype, CPU, torch.int8)
        for cache in caches:
            poison(cache)
        before = [cache.clone() for cache in caches]
        backend.store_kv(value, key, *caches, slots)  # to be written over
        backend.store_kv(key, value, *caches, slots)
        for cache, old, x in zip(caches, before, (key, value), strict=True):
            is_key = x is key
            wanted_integers, wanted_scales = unpacked(old, in_pairs=in_pairs, is_key=is_key)
            integers, scales = quantize(x)
            wanted_integers[slots[slots >= 0], :, :dim] = integers[slots >= 0]
            wanted_scales[slots[slots >= 0]] = scales[slots >= 0]
            got_integers, got_scales = unpacked(cache, in_pairs=in_pairs, is_key=is_key)
            assert torch.equal(got_integers, wanted_integers), (dim, is_key)
            got_bits, wanted_bits = (scales.contiguous().view(torch.int32) for scales in (got_scales, wanted_scales))
            assert torch.equal(got_bits, wanted_bits), (dim, is_key)


def test_numbers_when_quantised_then_zeros_have_scale_zero_and_what_is_not_finite_scale_nan() -> None:
    x = make_heads(40, 64, torch.float32)
    integers, scales = quantize(x)
    assert integers.abs().max() == 127
    bad = ~x.isfinite().all(-1, keepdim=True)
    assert torch.equal(scales.isnan(), bad)
    assert not integers[bad.squeeze(-1)].any()
    assert not scales[0].any()
    assert x[6, 0].any()
    assert not scales[6, 0].any()
    assert not integers[6, 0].any()
    assert integers[4, 0, :8].tolist() == [127, -63, -62, -62, -62, -61, -60, -60]
    good = ~bad.squeeze(-1)
    off = (integers.double() * scales.double() - x.double()).abs()[good]
    assert bool((off <= scales.double()[good] * 0.5001 + 1e-43).all())


@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_when_stored_on_any_number_of_threads_then_the_same_bytes(isa: str) -> None:
    """Tokens of one chunk share words, and are written by different threads."""
    backend, x = CpuBackend(isa), torch.randn(500, 4, 64)
    threads = torch.get_num_threads()
    try:
        for dtype in DTYPES:
            found = []
            for team in (1, 2, 5):
                torch.set_num_threads(team)
                caches = backend.allocate_kv_cache(32, 16, 4, 64, dtype, CPU, torch.int8)
                backend.store_kv(x.to(dtype), x.to(dtype), *caches, torch.arange(500))
                found.append(caches)
            assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_a_token_that_is_not_finite_when_rows_see_it_then_they_alone_are_nan(isa: str, dtype: torch.dtype) -> None:
    for number in (math.nan, math.inf):
        for is_key in (True, False):
            for window in (None, 30):
                context = PagedContext(CpuBackend(isa), Heads(48, 2, 2), 150, dtype, cache_dtype=torch.int8)
                params = AttentionParams(0.1, window)
                before = context.attend(params)
                (context.key if is_key else context.value)[70, 1, 5] = number
                at = torch.tensor([70])
                context.backend.store_kv(context.key[at], context.value[at], *context.caches, context.slots(at))
                after = context.attend(params)
                sees = torch.zeros(150, 4, dtype=torch.bool)
                sees[70 : None if window is None else 70 + window, 2:] = True
                assert bool(after[sees].isnan().all())
                assert same_bits(after[~sees], before[~sees])


@pytest.mark.parametrize("make", [ReferenceBackend, _fallback])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_kernels_when_they_store_and_attend_then_near_the_native_ones(
    make: Callable[[], CpuBackend], dtype: torch.dtype
) -> None:
    for heads, params in (
        (Heads(18, 3, 1), AttentionParams(0.3)),
        (Heads(64, 2, 2, 32), AttentionParams(0.1, sliding_window=20, soft_cap=4.0)),
    ):
        native = PagedContext(CpuBackend(), heads, 70, dtype, cache_dtype=torch.int8)
        other = PagedContext(make(), heads, 70, dtype, cache_dtype=torch.int8)
        assert relative_error(other.attend(params), native.attend(params)) < 2 * TOLERANCE[dtype]
        rows = other.caches[0].flatten(0, 1)[other.slots(torch.arange(70))]
        integers, scales = quantize(other.key)
        assert torch.equal(dequantize(rows), integers.double() * scales.double())


def test_odd_head_or_block_size_when_there_is_no_packed_layout_then_torch_attends() -> None:
    for heads in (Heads(15, 2, 1), Heads(32, 2, 1, block_size=10)):
        context = PagedContext(CpuBackend(), heads, 40, torch.float32, cache_dtype=torch.int8)
        assert context.caches[0].shape[1:] == (heads.block_size, 1, heads.head_dim + 4)
        params = AttentionParams(0.2)
        assert relative_error(context.attend(params), context.expected(params)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_program_when_run_then_it_stores_and_attends_as_the_kernels_do(dtype: torch.dtype) -> None:
    backend, params = CpuBackend(), AttentionParams(0.2)
    x = torch.randn(5, 4 * 32).to(dtype)
    table, positions = torch.tensor([[2, 0]], dtype=torch.int32), torch.arange(5)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_table=table,
        num_decodes=0,
        max_query_len=5,
        max_seq_len=5,
    )
    program = backend.program(8, dtype)
    assert program is not None
    caches, others = (backend.allocate_kv_cache(3, 16, 1, 32, dtype, CPU, torch.int8) for _ in range(2))
    query, key, value = program.buffer("x", 4 * 32).view(8, 4, 32).split([2, 1, 1], dim=1)
    out = program.buffer("out", 2 * 32)
    program.store_kv(key, value, *caches)
    program.paged_attention(query, *caches, params, out.view(8, 2, 32))
    program.buffer("x", 4 * 32)[:5] = x
    program.run(positions, positions + 32, metadata)
    query, key, value = x.view(5, 4, 32).split([2, 1, 1], dim=1)
    backend.store_kv(key, value, *others, positions + 32)
    assert all(same_bits(a, b) for a, b in zip(caches, others, strict=True))
    assert same_bits(out[:5].view(5, 2, 32), backend.paged_attention(query, *others, metadata, params))


@pytest.mark.parametrize("make", [CpuBackend, ReferenceBackend, _fallback])
def test_caches_when_allocated_then_of_the_size_that_was_told_and_about_half_that_of_16_bits(
    make: Callable[[], CpuBackend],
) -> None:
    backend = make()
    for dim in (64, 128):
        caches = backend.allocate_kv_cache(3, 32, 2, dim, torch.bfloat16, CPU, torch.int8)
        assert all(cache.dtype is torch.int8 and not cache.any() for cache in caches)
        total = backend.kv_cache_bytes(3, 32, 2, dim, torch.bfloat16, torch.int8)
        assert total == sum(cache.nbytes for cache in caches) == 3 * 32 * 2 * 2 * (dim + 4)
    for wrong in (torch.float16, torch.int32, torch.uint8):
        with pytest.raises(ValueError, match="there is no KV cache of"):
            backend.allocate_kv_cache(3, 16, 2, 64, torch.bfloat16, CPU, wrong)


def test_keys_of_a_type_without_kernels_when_stored_then_value_error() -> None:
    backend, x = CpuBackend(), torch.randn(1, 1, 16).double()
    caches = backend.allocate_kv_cache(1, 16, 1, 16, torch.float32, CPU, torch.int8)
    for key, value in ((x, x), (x.float(), x), (x.float(), x.half())):
        with pytest.raises(ValueError, match="must be torch"):
            backend.store_kv(key, value, *caches, torch.tensor([0]))


def test_triton_backend_when_asked_for_integers_then_it_has_no_such_cache() -> None:
    triton_backend = pytest.importorskip("kernels.triton_backend")
    backend = object.__new__(triton_backend.TritonBackend)  # nothing is launched
    with pytest.raises(ValueError, match=r"'triton' has no KV cache of torch\.int8"):
        backend.allocate_kv_cache(1, 16, 1, 16, torch.float32, CPU, torch.int8)
