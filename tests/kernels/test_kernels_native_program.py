"""A recorded program: what its operations compute, and how far it is while it runs, for whoever watches a rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata
from kernels.cpu_backend import CpuBackend
from tests.kernels.native_cases import CPU, ISAS, same_bits

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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_operations_on_single_tokens_when_recorded_one_after_the_other_then_the_bits_of_each_by_itself(
    isa: str, threads: int
) -> None:
    backend, tokens, heads, kv_heads, dim, dtype = CpuBackend(isa), 530, 4, 2, 16, torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width, generator=generator).to(dtype)
    residual = torch.randn(tokens, width, generator=generator).to(dtype)
    weight, head_weight = (torch.randn(n, generator=generator).to(dtype) for n in (width, dim))
    cos_sin = torch.randn(tokens, 2, dim // 2, generator=generator)
    positions, slots = (torch.randperm(tokens, generator=generator) for _ in range(2))
    slots[7] = -1

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = x.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
        return query, key, value

    def caches() -> tuple[Tensor, Tensor]:
        return backend.allocate_kv_cache(34, 16, kv_heads, dim, dtype, CPU)

    program, recorded_caches, expected_caches = backend.program(tokens + 5, dtype), caches(), caches()
    assert program is not None
    buffer, sums = program.buffer("qkv", width), program.buffer("sums", width)
    query, key, value = parts(buffer)
    program.add_rms_norm(buffer, sums, weight, buffer, 1e-6, 0.0)
    program.rms_norm(query, head_weight, query, 1e-6, 0.0)
    program.rms_norm(key, head_weight, key, 1e-6, 0.0)
    program.rotary(query, key, cos_sin)
    program.store_kv(key, value, *recorded_caches)
    program.act_mul(buffer, "silu", program.buffer("half", width // 2))
    buffer[:tokens], sums[:tokens] = qkv, residual
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        program.run(positions, slots, metadata(tokens))
    finally:
        torch.set_num_threads(before)

    expected, expected_sums = backend.add_rms_norm(qkv, residual, weight, 1e-6)
    query, key, value = parts(expected)
    query.copy_(backend.rms_norm(query.reshape(-1, dim), head_weight, 1e-6).view_as(query))
    key.copy_(backend.rms_norm(key.reshape(-1, dim), head_weight, 1e-6).view_as(key))
    backend.rotary(query, key, positions, cos_sin)
    backend.store_kv(key, value, *expected_caches, slots)
    assert same_bits(buffer[:tokens], expected)
    assert same_bits(sums[:tokens], expected_sums)
    assert same_bits(program.buffer("half", width // 2)[:tokens], backend.act_mul(expected, "silu"))
    for recorded, by_itself in zip(recorded_caches, expected_caches, strict=True):
        assert same_bits(recorded, by_itself)


def test_wrong_indices_when_several_operations_meet_them_then_the_first_one_is_told() -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    query, key = (program.buffer(name, HEADS * DIM).view(CAPACITY, HEADS, DIM) for name in ("query", "key"))
    caches = CpuBackend().allocate_kv_cache(1, 16, HEADS, DIM, torch.float32, CPU)
    program.rotary(query, key, torch.randn(LONGEST, 2, DIM // 2))
    program.store_kv(key, key, *caches)
    good, bad = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 0, 99])
    for positions, slots, told in ((good, bad, 1), (bad, good, 0), (bad, bad.flip(0), 0)):
        with pytest.raises(IndexError, match=f"operation {told}:"):
            program.run(positions, slots, metadata(4))
    program.run(good, torch.arange(4), metadata(4))
