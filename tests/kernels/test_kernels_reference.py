"""The reference kernels against torch's own operators and against what the contract says in words."""

from __future__ import annotations

import math

import psutil
import pytest
import torch
import torch.nn.functional as F

from kernels.backend import AttentionParams, KernelBackend, select_backend
from tests.kernels.builders import Context, Heads, assert_close

pytestmark = pytest.mark.stage0
CPU = torch.device("cpu")


@pytest.fixture
def reference() -> KernelBackend:
    return select_backend(CPU, "reference")


@pytest.mark.parametrize("length", [1, 17, 40])
def test_reference_attention_of_a_whole_prompt_equals_torch(reference: KernelBackend, length: int) -> None:
    context = Context([length], Heads(group=3), CPU)
    got = context.attend(reference, [(0, 0, length)], 0, AttentionParams(0.2))
    query, key, value = (t[0].transpose(0, 1) for t in (context.queries, context.keys, context.values))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=0.2)
    assert_close(got, wanted.transpose(0, 1), torch.float32)


def test_reference_attention_with_window_and_soft_cap_equals_a_dense_mask(reference: KernelBackend) -> None:
    context = Context([40], Heads(), CPU)
    got = context.attend(reference, [(0, 0, 40)], 0, AttentionParams(0.2, sliding_window=5, soft_cap=1.5))
    scores = torch.einsum("qhd,khd->hqk", context.queries[0], context.keys[0]) * 0.2
    scores = 1.5 * torch.tanh(scores / 1.5)
    distance = torch.arange(40)[:, None] - torch.arange(40)[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= 5), -math.inf)
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), context.values[0])
    assert_close(got, wanted, torch.float32)


def test_reference_attention_in_any_chunking_gives_the_same_bits(reference: KernelBackend) -> None:
    context = Context([37, 21], Heads(group=2), CPU)
    params = AttentionParams(0.2)
    whole = context.attend(reference, [(0, 0, 37)], 0, params)
    mixed = context.attend(reference, [(1, 20, 21), (0, 30, 37), (1, 3, 9)], 1, params)
    assert torch.equal(mixed[1:8], whole[30:37])


def test_reference_linear_of_a_row_does_not_depend_on_the_batch(reference: KernelBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(9, 33, generator=generator), torch.randn(9, generator=generator)
    x = torch.randn(5, 33, generator=generator)
    linear = reference.pack_linear(weight, bias)
    assert_close(linear(x), F.linear(x, weight, bias), torch.float32)
    assert torch.equal(linear(x)[3:4], linear(x[3:4]))
    assert linear(x[:0]).shape == (0, 9)


def test_reference_rotary_equals_complex_multiplication(reference: KernelBackend) -> None:
    query, key = torch.randn(3, 2, 10), torch.randn(3, 1, 10)
    angles = torch.rand(7, 4) * 6
    positions = torch.tensor([6, 0, 3])
    turn = torch.polar(torch.ones(3, 1, 4), angles[positions][:, None])
    wanted = torch.complex(query[..., :4], query[..., 4:8]) * turn
    got, key_before = query.clone(), key.clone()
    reference.rotary(got, key, positions, torch.stack((angles.cos(), angles.sin()), dim=1))
    assert_close(got, torch.cat((wanted.real, wanted.imag, query[..., 8:]), -1), torch.float32)
    assert torch.equal(key[1], key_before[1]) is False
    assert torch.equal(key[..., 8:], key_before[..., 8:])


def test_given_a_kv_cache_on_a_cpu_when_allocated_then_it_is_zero_and_takes_no_memory_before_it_is_touched(
    reference: KernelBackend,
) -> None:
    before = psutil.Process().memory_info().rss
    keys, values = reference.allocate_kv_cache(1024, 16, 16, 128, torch.bfloat16, CPU)
    assert keys.nbytes == values.nbytes == 64 << 20
    assert psutil.Process().memory_info().rss - before < 16 << 20
    keys[1000] = 1
    assert (keys.sum(), values.sum()) == (16 * 16 * 128, 0)


def test_reference_kv_cache_bytes_are_those_of_both_tensors(reference: KernelBackend) -> None:
    caches = reference.allocate_kv_cache(3, 16, 2, 8, torch.bfloat16, CPU)
    assert sum(cache.nbytes for cache in caches) == reference.kv_cache_bytes(3, 16, 2, 8, torch.bfloat16)
