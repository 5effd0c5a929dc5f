"""Native paged attention: against float64, and the same bits for a row however its prompt was cut."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.backend import AttentionMetadata, AttentionParams
from kernels.cpu_backend import CpuBackend
from tests.kernels.native_cases import (
    CACHE_DTYPES,
    CPU,
    DTYPES,
    ISAS,
    TOLERANCE,
    Heads,
    PagedContext,
    relative_error,
    same_bits,
)

pytestmark = pytest.mark.stage0

CASES = (  # heads, sliding window, soft cap
    (Heads(head_dim=128), None, None),
    (Heads(head_dim=16, group=1, num_kv_heads=3), None, None),
    (Heads(head_dim=48, group=4, num_kv_heads=1, block_size=32), None, 30.0),
    (Heads(head_dim=64, group=7), 50, None),
    (Heads(head_dim=96, group=5, num_kv_heads=1), 150, None),
    (Heads(head_dim=64, group=3, num_kv_heads=1), 70, 4.0),
    (Heads(head_dim=32, group=2, num_kv_heads=1), None, 8.0),
    (Heads(head_dim=80, group=4, block_size=48), 17, 5.0),
    (Heads(head_dim=256, group=2, num_kv_heads=1, block_size=64), 130, None),
    (Heads(head_dim=18, group=3, num_kv_heads=1), 1, None),
)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 333)


def _params(heads: Heads, window: int | None, soft_cap: float | None) -> AttentionParams:
    return AttentionParams(1 / math.sqrt(heads.head_dim), window, soft_cap)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"dim{case[0].head_dim}")
@pytest.mark.parametrize("isa", ISAS)
def test_poisoned_cache_when_prompt_is_cut_anyhow_then_near_float64_with_the_same_bits(
    isa: str, case: tuple[Heads, int | None, float | None], dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    heads, params = case[0], _params(*case)
    context = PagedContext(CpuBackend(isa), heads, LENGTHS[-1], dtype, cache_dtype=cache_dtype)
    whole = context.attend(params)
    assert relative_error(whole, context.expected(params)) < TOLERANCE[dtype]
    for length in LENGTHS:
        assert same_bits(context.attend(params, length - 1, length)[0], whole[length - 1]), f"decode at {length}"
        assert same_bits(context.attend(params, 0, length), whole[:length]), f"prefill of {length}"
    for size in (7, 16):
        starts = range(0, context.length, size)
        parts = [context.attend(params, start, min(start + size, context.length)) for start in starts]
        assert same_bits(torch.cat(parts), whole), f"chunks of {size}"


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_scores_that_rise_a_little_and_much_when_attended_then_near_float64_with_the_same_bits(
    isa: str, cache_dtype: torch.dtype | None
) -> None:
    heads, params = Heads(head_dim=32, group=2, num_kv_heads=1), AttentionParams(1.0)
    context = PagedContext(CpuBackend(isa), heads, 512, torch.bfloat16, cache_dtype=cache_dtype)
    rising = torch.tensor([-40.0, -33.0, -26.0, 12.0, 15.0, 14.0, 100.0, 106.0]).repeat_interleave(64)
    context.query.mul_(0.1).add_(1.0)
    context.key.mul_(0.1).add_(rising.bfloat16()[:, None, None] / 32)
    context.backend.store_kv(context.key, context.value, *context.caches, context.slots(torch.arange(512)))
    whole = context.attend(params)
    assert relative_error(whole, context.expected(params)) < TOLERANCE[torch.bfloat16]
    for length in (64, 65, 150, 193, 300, 384, 385, 449, 512):
        assert same_bits(context.attend(params, length - 1, length)[0], whole[length - 1])
        assert same_bits(context.attend(params, length // 2, length), whole[length // 2 : length])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_context_of_several_segments_when_decoded_on_any_number_of_threads_then_prefill_bits(
    isa: str, cache_dtype: torch.dtype | None
) -> None:
    heads = Heads(head_dim=32, group=2, num_kv_heads=1)
    context = PagedContext(CpuBackend(isa), heads, 1200, torch.bfloat16, cache_dtype=cache_dtype)
    threads = torch.get_num_threads()
    for params in (_params(heads, None, None), _params(heads, 700, None)):
        whole = context.attend(params)
        assert relative_error(whole, context.expected(params)) < TOLERANCE[torch.bfloat16]
        try:
            for team in (1, 2, 5):
                torch.set_num_threads(team)
                for position in (510, 511, 512, 1023, 1024, 1199):
                    assert same_bits(context.attend(params, position, position + 1)[0], whole[position]), position
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", ISAS)
def test_context_of_more_segments_than_are_kept_at_a_time_when_decoded_then_as_on_one_thread(isa: str) -> None:
    heads = Heads(head_dim=32, group=2, num_kv_heads=3)  # a task each: fewer than twice the threads
    context = PagedContext(CpuBackend(isa), heads, 12_000, torch.bfloat16)  # 24 segments of 3 tasks; 2 x 32 are kept
    params, threads = _params(heads, None, None), torch.get_num_threads()
    decoded = []
    try:
        for team in (1, 2):
            torch.set_num_threads(team)
            decoded.append(context.attend(params, 11_999, 12_000))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(*decoded)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_mixed_batch_with_padding_when_attended_then_each_sequence_as_alone(
    isa: str, cache_dtype: torch.dtype | None
) -> None:
    backend, heads = CpuBackend(isa), Heads(head_dim=64, group=4)
    params = _params(heads, None, None)
    lengths, queries = (100, 17, 0, 65, 333), (1, 1, 2, 65, 40)
    alone = [
        PagedContext(backend, heads, length, torch.bfloat16, seed, cache_dtype)
        for seed, length in enumerate(lengths)
        if length
    ]
    caches = [torch.cat(parts) for parts in zip(*(context.caches for context in alone), strict=True)]
    tables, first_block = [], 0
    for context in alone:
        table = torch.where(context.block_table[0] < 0, -1, context.block_table[0] + first_block)
        tables.append(torch.nn.functional.pad(table, (0, 30 - len(table)), value=-1))
        first_block += context.caches[0].shape[0]
    tables.insert(2, torch.full((30,), -1, dtype=torch.int32))
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    unowned = 3
    whole_query = torch.randn(starts[-1] + unowned, 2 * 8, 64).bfloat16()[:, :8]  # a strided view
    by_length = {context.length: context for context in alone}
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if length:
            whole_query[starts[row] : starts[row + 1]] = by_length[length].query[length - count :]
    metadata = AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.stack(tables),
        2,
        65,
        333,
    )
    out = torch.full((len(whole_query), 8, 64), float("nan"), dtype=torch.bfloat16)
    assert backend.paged_attention(whole_query, *caches, metadata, params, out) is out
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        part = out[starts[row] : starts[row + 1]]
        if length:
            assert same_bits(part, by_length[length].attend(params, length - count, length)), row
        else:
            assert not part.any()
    assert not out[starts[-1] :].any()


def test_window_when_blocks_before_it_are_gone_then_same_result() -> None:
    heads = Heads(head_dim=32)
    context = PagedContext(CpuBackend(), heads, 200, torch.float32)
    params = _params(heads, 40, None)
    before = context.attend(params, 190, 200)
    context.block_table[0, : (190 + 1 - 40) // 16] = -1
    assert same_bits(context.attend(params, 190, 200), before)


def test_block_outside_the_cache_when_attended_then_index_error() -> None:
    heads = Heads(head_dim=32)
    context = PagedContext(CpuBackend(), heads, 40, torch.float32)
    context.block_table[0, 1] = 1000
    with pytest.raises(IndexError, match="outside the cache"):
        context.attend(_params(heads, None, None))


def test_slots_when_stored_then_minus_one_is_skipped_and_bad_ones_refused() -> None:
    backend = CpuBackend()
    caches = backend.allocate_kv_cache(2, 16, 1, 16, torch.float32, CPU)
    key = torch.randn(3, 1, 16)
    backend.store_kv(key, key, *caches, torch.tensor([-1, 5, -1]))
    assert all(int((cache != 0).sum()) == 16 for cache in caches)
    with pytest.raises(IndexError, match="slot"):
        backend.store_kv(key, key, *caches, torch.tensor([0, 32, 1]))
    assert all(int((cache != 0).sum()) == 16 for cache in caches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_keys_when_stored_then_as_contiguous(dtype: torch.dtype) -> None:
    backend = CpuBackend()
    fused = torch.randn(20, 8, 48).to(dtype)
    key, value = fused[:, 4:6], fused[:, 6:8]
    slots = torch.randperm(32)[:20]
    caches = [backend.allocate_kv_cache(2, 16, 2, 48, dtype, CPU) for _ in range(2)]
    backend.store_kv(key, value, *caches[0], slots)
    backend.store_kv(key.contiguous(), value.contiguous(), *caches[1], slots)
    assert all(same_bits(a, b) for a, b in zip(*caches, strict=True))
    total = backend.kv_cache_bytes(2, 16, 2, 48, dtype)
    assert total == sum(cache.nbytes for cache in caches[0])


def test_shape_without_native_kernel_when_attended_then_plain_layout_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = CpuBackend()
    for heads in (Heads(head_dim=32, block_size=8), Heads(head_dim=15), Heads(head_dim=288)):
        params = _params(heads, None, None)
        context = PagedContext(backend, heads, 33, torch.float32)
        assert context.caches[0].dim() == 4
        assert relative_error(context.attend(params), context.expected(params)) < TOLERANCE[torch.float32]
    assert sum("native attention" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("isa", ISAS)
def test_value_that_is_not_finite_when_only_later_rows_see_it_then_the_others_have_their_own_bits(
    isa: str, bad: float, window: int | None
) -> None:
    heads = Heads(head_dim=64, group=2, num_kv_heads=1)
    params = _params(heads, window, None)
    context = PagedContext(CpuBackend(isa), heads, 140, torch.bfloat16)
    for position in (4, 35, 127):
        context.value[position, 0, 7] = bad
    context.backend.store_kv(context.key, context.value, *context.caches, context.slots(torch.arange(140)))
    whole = context.attend(params)
    alone = torch.cat([context.attend(params, position, position + 1) for position in range(140)])
    assert torch.equal(whole.nan_to_num(nan=-7.0, posinf=-8.0), alone.nan_to_num(nan=-7.0, posinf=-8.0))
    assert whole[:4].isfinite().all()
    assert not whole[4:12].isfinite().all(-1).any()
    assert bool(whole[12:35].isfinite().all()) == (window is not None)


def test_sinks_when_attention_is_asked_for_then_they_are_refused() -> None:
    backend, params = CpuBackend(), AttentionParams(0.3, sinks=torch.zeros(3))
    caches = backend.allocate_kv_cache(2, 16, 1, 16, torch.float32, CPU)
    starts, lengths = torch.tensor([0, 10], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    metadata = AttentionMetadata(starts, lengths, torch.tensor([[1, 0]], dtype=torch.int32), 0, 10, 20)
    with pytest.raises(ValueError, match="no attention sinks"):
        backend.paged_attention(torch.zeros(10, 3, 16), *caches, metadata, params)
    program = backend.program(4, torch.float32)
    assert program is not None
    rows = program.buffer("rows", 48).view(4, 3, 16)
    with pytest.raises(ValueError, match="no attention sinks"):
        program.paged_attention(rows, *caches, params, rows)
