"""Norm, rotation and store of a fused projection in one launch, against float64 and against the kernels one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.attention_input.reference import attention_input as one_by_one
from kernels.backend import AttentionInput, HeadNorms
from kernels.kv_store.reference import to_float8
from kernels.reference_backend import ReferenceBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.builders import assert_close

pytestmark = pytest.mark.stage0

TOKENS, BLOCK, BLOCKS, POSITIONS = 5, 16, 3, 40
SHAPES = [(4, 2, 32, 16), (3, 1, 24, 12), (6, 2, 128, 64), (2, 2, 40, 8), (1, 1, 16, 0)]  # heads, kv heads, size, half


def make(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, offset: float | None
) -> tuple[Tensor, AttentionInput]:
    """Random heads, and the rest; offset: of the norms, None: there are none. The caches are poisoned."""
    num_heads, kv_heads, dim, half = shape
    generator = torch.Generator().manual_seed(dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    heads = normal(TOKENS, num_heads + 2 * kv_heads, dim)
    norms = None if offset is None else HeadNorms(normal(dim), normal(dim), 1e-6, offset)
    caches = [torch.full((BLOCKS, kv_heads, BLOCK, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    positions = torch.tensor([0, 7, POSITIONS - 1, 1, 3], device=device)
    slots = torch.tensor([0, 17, 47, -1, 18], device=device)
    angles = torch.randn(POSITIONS, half, generator=generator)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)
    return heads, AttentionInput(num_heads, norms, positions, cos_sin, caches[0], caches[1], slots)


def wanted(heads: Tensor, given: AttentionInput) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64, with the norm's own rounding."""
    num_heads, half, dtype = given.num_heads, given.cos_sin.shape[2], heads.dtype
    kv_heads = (heads.shape[1] - num_heads) // 2

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None and given.norms is not None:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + given.norms.eps)
            if given.norms.weight_offset:
                x = (x * (given.norms.weight_offset + weight.double())).to(dtype).double()
            else:
                x = (x.to(dtype).double() * weight.double()).to(dtype).double()
        cos, sin = given.cos_sin[given.positions].double().unsqueeze(1).unbind(2)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    norms = given.norms
    query = turned(heads[:, :num_heads], None if norms is None else norms.query_weight)
    key = turned(heads[:, num_heads : num_heads + kv_heads], None if norms is None else norms.key_weight)
    return query, key, heads[:, num_heads + kv_heads :].double()


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_projection_when_prepared_then_it_is_what_float64_says_and_nothing_else_is_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype, offset: float | None, device: torch.device
) -> None:
    heads, given = make(shape, dtype, device, offset=offset)
    query, key, value = wanted(heads, given)
    got = TritonBackend(device).attention_input(heads, given)
    assert_close(got, query, dtype)
    for cache, tensor in ((given.key_cache, key), (given.value_cache, value)):
        by_slot = cache.transpose(1, 2).reshape(BLOCKS * BLOCK, -1, shape[2])
        stored = given.slot_mapping >= 0
        assert_close(by_slot[given.slot_mapping[stored]], tensor[stored], dtype)
        untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool, device=device)
        untouched[given.slot_mapping[stored]] = False
        assert bool(by_slot[untouched].isnan().all())


def test_a_projection_when_prepared_then_as_the_kernels_do_one_by_one(device: torch.device) -> None:
    backend = TritonBackend(device)
    heads, given = make(SHAPES[0], torch.float32, device, offset=0.0)
    other, also = make(SHAPES[0], torch.float32, device, offset=0.0)
    assert_close(backend.attention_input(heads, given), one_by_one(backend, other, also), torch.float32)
    stored = ~also.key_cache.isnan()
    assert_close(given.key_cache[stored], also.key_cache[stored], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_of_e4m3_when_stored_into_then_its_numbers_are_those_of_the_plain_one_rounded(
    dtype: torch.dtype, device: torch.device
) -> None:
    backend = TritonBackend(device)
    heads, given = make(SHAPES[0], dtype, device, offset=0.0)
    heads[0, 6:] *= 1000.0  # values beyond the largest number
    heads[1, 6, 0], heads[1, 6, 1], heads[2, 7, 3] = math.inf, -math.inf, math.nan
    caches = [to_float8(torch.full_like(given.key_cache, math.nan)) for _ in range(2)]
    small = replace(given, key_cache=caches[0], value_cache=caches[1])
    other = heads.clone()
    assert torch.equal(backend.attention_input(other, small), backend.attention_input(heads, given))
    for cache, plain in ((caches[0], given.key_cache), (caches[1], given.value_cache)):
        assert torch.equal(cache.view(torch.uint8) & 127, to_float8(plain).view(torch.uint8) & 127)
        finite = plain.isfinite()
        assert torch.equal(cache.float()[finite], to_float8(plain).float()[finite])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_when_stored_by_themselves_as_e4m3_then_as_the_reference_does(
    dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(TOKENS, 2, 24, generator=generator).to(device, dtype) * 300 for _ in range(2))
    key[0, 0, 0], value[1, 1, 5] = math.nan, math.inf
    slots = torch.tensor([0, 17, 47, -1, 18], device=device)
    caches = TritonBackend(device).allocate_kv_cache(BLOCKS, BLOCK, 2, 24, dtype, device, torch.float8_e4m3fn)
    cpu = torch.device("cpu")
    wanted = ReferenceBackend().allocate_kv_cache(BLOCKS, BLOCK, 2, 24, dtype, cpu, torch.float8_e4m3fn)
    TritonBackend(device).store_kv(key, value, *caches, slots)
    ReferenceBackend().store_kv(key.cpu(), value.cpu(), *wanted, slots.cpu())
    for cache, other in zip(caches, wanted, strict=True):
        got = cache.cpu().transpose(1, 2).contiguous().view(torch.uint8)
        assert torch.equal(got & 127, other.view(torch.uint8) & 127)
        assert torch.equal(got[other.float() < 0] >> 7, torch.ones_like(got[other.float() < 0]))


def test_a_token_when_it_stands_among_others_then_it_has_the_same_bits_as_alone(device: torch.device) -> None:
    backend = TritonBackend(device)
    heads, given = make(SHAPES[2], torch.bfloat16, device, offset=0.0)
    alone = heads[2:3].clone()
    among = backend.attention_input(heads, given)[2].clone()
    part = AttentionInput(
        given.num_heads, given.norms, given.positions[2:3], given.cos_sin, given.key_cache.clone(),
        given.value_cache.clone(), given.slot_mapping[2:3],
    )  # fmt: skip
    assert torch.equal(backend.attention_input(alone, part)[0].view(torch.int16), among.view(torch.int16))


def test_heads_that_do_not_divide_when_prepared_then_they_are_refused(device: torch.device) -> None:
    heads, given = make(SHAPES[0], torch.float32, device, offset=None)
    with pytest.raises(ValueError, match="are not 4 of queries"):
        TritonBackend(device).attention_input(heads[:, :7], given)
    assert TritonBackend(device).attention_input(heads[:0], _cut(given, 0)).shape == (0, 4, 32)


def _cut(given: AttentionInput, count: int) -> AttentionInput:
    return AttentionInput(
        given.num_heads, given.norms, given.positions[:count], given.cos_sin, given.key_cache, given.value_cache,
        given.slot_mapping[:count],
    )  # fmt: skip
