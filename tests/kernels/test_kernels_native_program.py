"""A recorded program: what its operations compute, and how far it is while it runs, for whoever watches a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, Kept
from kernels.cpu_backend import CpuBackend
from tests.kernels.native_cases import CPU, ISAS

pytestmark = [pytest.mark.unit, pytest.mark.stage0]

CAPACITY, HEADS, DIM, LONGEST = 4, 2, 8, 30


def metadata(num_tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )


def test_a_program_when_it_stops_in_the_middle_then_it_has_told_of_what_ended_before() -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    x, weight = program.buffer("x", HEADS * DIM), torch.ones(HEADS * DIM)
    query, key = (program.buffer(name, HEADS * DIM).view(CAPACITY, HEADS, DIM) for name in ("query", "key"))
    x.normal_()
    for _ in range(2):
        program.rms_norm(x, weight, program.buffer("y", HEADS * DIM), 1e-6, 0.0)
    program.rotary(query, key, torch.randn(LONGEST, 2, DIM // 2))
    program.rms_norm(x, weight, program.buffer("y", HEADS * DIM), 1e-6, 0.0)
    slots = torch.zeros(2, dtype=torch.int64)
    program.run(torch.tensor([0, LONGEST - 1]), slots, metadata(2))
    assert program.num_done == 4
    with pytest.raises(IndexError, match="operation 2"):
        program.run(torch.tensor([0, LONGEST]), slots, metadata(2))
    assert program.num_done == 4 + 2


@dataclass(frozen=True)
class HeadCase:
    """What lies between a projection and attention."""

    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    num_norms: int = 2  # of queries, of keys
    weight_offset: float = 0.0
    num_rotated: int | None = None  # numbers of a head; None: all
    in_order: bool = True  # whether tokens lie in the cache one behind the other, from the middle of a panel on

    def slots(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Where tokens go; -1: nowhere."""
        slots = torch.arange(tokens) + 13
        slots[200:] += 31
        if not self.in_order:
            slots = slots[torch.randperm(tokens, generator=generator)]
        slots[7], slots[100:103] = -1, -1
        return slots


HEAD_CASES = (
    HeadCase(),
    HeadCase(in_order=False),
    HeadCase(dim=64, weight_offset=1.0),
    HeadCase(dim=256, num_norms=0),
    HeadCase(num_norms=1),
    HeadCase(num_rotated=64),
    HeadCase(dim=16),
    HeadCase(dtype=torch.float32),
    HeadCase(dtype=torch.float16),
    HeadCase(cache_dtype=torch.int8),
    HeadCase(dim=64, dtype=torch.float32, cache_dtype=torch.int8, num_norms=0),
)


@pytest.mark.parametrize("case", HEAD_CASES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_operations_on_single_tokens_when_recorded_one_after_the_other_then_the_bits_of_each_by_itself(
    isa: str, case: HeadCase
) -> None:
    backend, tokens, heads, kv_heads, dim, dtype = CpuBackend(isa), 330, 4, 2, case.dim, case.dtype
    generator = torch.Generator().manual_seed(0)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width, generator=generator).to(dtype)
    qkv[3, 5], qkv[4, 2 * dim + 1], qkv[5, heads * dim], qkv[6] = math.nan, 1e-39, math.inf, 1e-30
    residual = torch.randn(tokens, width, generator=generator).to(dtype)
    residual[4:7] = 0.0
    weight, *norms = (torch.randn(n, generator=generator).to(dtype) for n in (width, dim, dim))
    cos_sin = torch.randn(tokens, 2, (case.num_rotated or dim) // 2, generator=generator)
    positions, slots = torch.randperm(tokens, generator=generator), case.slots(tokens, generator)

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = x.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
        return query, key, value

    def caches() -> tuple[Tensor, Tensor]:
        found = backend.allocate_kv_cache(24, 16, kv_heads, dim, dtype, CPU, case.cache_dtype)
        for cache in found:
            cache.fill_(3)
        return found

    expected, expected_sums = backend.add_rms_norm(qkv, residual, weight, 1e-6)
    expected_half, expected_caches = backend.act_mul(expected, "silu"), caches()
    query, key, value = parts(expected)
    for x, norm in list(zip((query, key), norms, strict=True))[: case.num_norms]:
        x.copy_(backend.rms_norm(x.reshape(-1, dim), norm, 1e-6, case.weight_offset).view_as(x))
    backend.rotary(query, key, positions, cos_sin)
    backend.store_kv(key, value, *expected_caches, slots)

    for threads in (1, 2):
        program, recorded_caches = backend.program(tokens + 5, dtype), caches()
        assert program is not None
        buffer, sums, half = (program.buffer(*of) for of in (("qkv", width), ("sums", width), ("half", width // 2)))
        views = parts(buffer)
        program.add_rms_norm(buffer, sums, weight, buffer, 1e-6, 0.0)
        program.act_mul(buffer, "silu", half)
        for x, norm in list(zip(views[:2], norms, strict=True))[: case.num_norms]:
            program.rms_norm(x, norm, x, 1e-6, case.weight_offset)
        program.rotary(*views[:2], cos_sin)
        program.store_kv(*views[1:], *recorded_caches)
        buffer[:tokens], sums[:tokens] = qkv, residual
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for begin, end in ((0, 1), (1, 3), (3, 20), (20, tokens)):
                program.run(positions[begin:end], slots[begin:end], metadata(end - begin))
                assert bits_of(views[0][: end - begin]).equal(bits_of(query[begin:end]))
                assert bits_of(sums[: end - begin]).equal(bits_of(expected_sums[begin:end]))
                assert bits_of(half[: end - begin]).equal(bits_of(expected_half[begin:end]))
                buffer[: tokens - end], sums[: tokens - end] = qkv[end:], residual[end:]
        finally:
            torch.set_num_threads(before)
        for recorded, by_itself in zip(recorded_caches, expected_caches, strict=True):
            assert bits_of(recorded).equal(bits_of(by_itself))


def bits_of(x: Tensor) -> Tensor:
    """The same memory as integers: NaN and the sign of zero count as well."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("dim", [8, 64])
def test_wrong_indices_when_several_operations_meet_them_then_the_first_one_is_told(dim: int) -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    query, key, value = (
        program.buffer(name, HEADS * dim).zero_().view(CAPACITY, HEADS, dim) for name in ("query", "key", "value")
    )
    caches = CpuBackend().allocate_kv_cache(1, 16, HEADS, dim, torch.float32, CPU)
    for x in (query, key):
        program.rms_norm(x, torch.ones(dim), x, 1e-6, 0.0)
    program.rotary(query, key, torch.randn(LONGEST, 2, dim // 2))
    program.store_kv(key, value, *caches)
    good, bad = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 0, 99])
    for positions, slots, told in ((good, bad, 3), (bad, good, 2), (bad, bad.flip(0), 2), (bad - 100, good, 2)):
        with pytest.raises(IndexError, match=f"operation {told}:"):
            program.run(positions, slots, metadata(4))
    program.run(good, torch.arange(4), metadata(4))


@pytest.mark.parametrize("index", [(3,), (0, 2, 3), (0, 1, 2, 3), ()])
def test_a_program_when_tokens_are_kept_then_it_goes_on_with_their_rows_alone(index: tuple[int, ...]) -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    x, y, z, wide = (
        program.buffer(name, width) for name, width in (("x", DIM), ("y", DIM), ("z", DIM), ("w", 2 * DIM))
    )
    numbers = torch.arange(1.0, CAPACITY * 2 * DIM + 1).view(CAPACITY, 2 * DIM)
    program.rms_norm(x, torch.ones(DIM), y, 0.0, 0.0)
    program.keep(y, wide.view(CAPACITY, 2, DIM)[:, :1])
    program.rms_norm(y, torch.full((DIM,), 2.0), z, 0.0, 0.0)

    def run(kept: Kept | None) -> Tensor:
        x.copy_(numbers[:, DIM:])
        wide.copy_(numbers)
        z.zero_()
        program.run(
            torch.zeros(CAPACITY, dtype=torch.int64), torch.zeros(CAPACITY, dtype=torch.int64), metadata(4), kept
        )
        return z.clone()

    whole = run(None)
    assert torch.equal(wide, numbers)
    some, count = run((torch.tensor(index, dtype=torch.int64), metadata(len(index)))), len(index)
    assert torch.equal(some[:count], whole[list(index)])
    assert some[count:].count_nonzero() == 0
    assert torch.equal(wide[:count, :DIM], numbers[list(index), :DIM])
    assert torch.equal(wide[:, DIM:], numbers[:, DIM:])
    assert program.num_done == 8


def test_kept_tokens_that_are_none_of_a_step_when_run_then_refused() -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    x, positions = program.buffer("x", HEADS * DIM), torch.zeros(CAPACITY, dtype=torch.int64)
    program.keep(x)
    for index in ([4], [-1], [2, 0], [1, 1], [0, 1, 2, 3, 3]):
        with pytest.raises(IndexError, match="operation 0:"):
            program.run(positions, positions, metadata(4), (torch.tensor(index), metadata(len(index))))
    for wrong in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.arange(4)[::2]):
        with pytest.raises(ValueError, match="which tokens are kept"):
            program.run(positions, positions, metadata(4), (wrong, metadata(len(wrong))))
    with pytest.raises(ValueError, match="as many as it has room for"):
        program.keep(x[:2])
    query = x.view(CAPACITY, HEADS, DIM)
    with pytest.raises(ValueError, match="no positions"):
        program.rotary(query, query, torch.randn(LONGEST, 2, DIM // 2))
    with pytest.raises(ValueError, match="no positions"):
        program.store_kv(query, query, *CpuBackend().allocate_kv_cache(1, 16, HEADS, DIM, torch.float32, CPU))
