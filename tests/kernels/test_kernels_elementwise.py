"""Triton's KV store, RMSNorm, rotary and gated activation against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.backend import ACTIVATIONS, KernelBackend, select_backend
from tests.kernels.builders import assert_close

pytestmark = pytest.mark.stage0
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def backends(device: torch.device) -> tuple[KernelBackend, KernelBackend]:
    """(reference, triton)"""
    return select_backend(device, "reference"), select_backend(device, "triton")


@pytest.fixture
def normal(device: torch.device):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(1, 16, 16), (3, 80, 32)])
def test_store_kv_writes_its_slots_and_nothing_else(backends, normal, device, heads, head_dim, block_size) -> None:
    _, backend = backends
    fused = normal(5, 3 * heads, head_dim, dtype=torch.bfloat16)
    key, value = fused[:, :heads], fused[:, heads : 2 * heads]
    key_cache, value_cache = backend.allocate_kv_cache(4, block_size, heads, head_dim, torch.bfloat16, device)
    slots = torch.tensor([3 * block_size + 7, -1, 0, 2 * block_size - 1, -1], device=device)
    backend.store_kv(key, value, key_cache, value_cache, slots)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        wanted = torch.zeros_like(cache)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                wanted[slot // block_size, :, slot % block_size] = row
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_equals_the_reference(backends, normal, dtype, weight_offset) -> None:
    reference, backend = backends
    weight = normal(63, dtype=dtype)
    for x in (normal(63, dtype=dtype), normal(3, 63, dtype=dtype), normal(3, 5, 63, dtype=dtype)[:, 1:3]):
        wanted = reference.rms_norm(x, weight, 1e-5, weight_offset)
        assert_close(backend.rms_norm(x, weight, 1e-5, weight_offset), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_and_the_sum(backends, normal, dtype) -> None:
    reference, backend = backends
    x, residual, weight = normal(4, 100, dtype=dtype), normal(4, 100, dtype=dtype), normal(100, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-6)
    wanted_normed, wanted_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(normed, wanted_normed, dtype)
    assert_close(total, wanted_total, dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_of_a_row_does_not_depend_on_the_batch(backends, normal) -> None:
    _, backend = backends
    x, weight = normal(7, 100), normal(100)
    assert torch.equal(backend.rms_norm(x, weight, 1e-6)[4:5], backend.rms_norm(x[4:5], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (80, 20)])
def test_rotary_equals_the_reference(backends, normal, device, dtype, head_dim, rotary_dim) -> None:
    reference, backend = backends
    fused = normal(4, 6, head_dim, dtype=dtype)
    cos_sin = normal(9, 2, rotary_dim // 2)
    positions = torch.tensor([8, 0, 3, 3], device=device)
    wanted = fused.clone()
    reference.rotary(wanted[:, :3], wanted[:, 3:5], positions, cos_sin)
    backend.rotary(fused[:, :3], fused[:, 3:5], positions, cos_sin)
    assert_close(fused, wanted, dtype)
    assert torch.equal(fused[..., rotary_dim:], wanted[..., rotary_dim:])
    assert torch.equal(fused[:, 5], wanted[:, 5])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_act_mul_equals_the_reference(backends, normal, activation, dtype) -> None:
    reference, backend = backends
    gate_up = normal(3, 2 * 1027, dtype=dtype) * 4
    assert_close(backend.act_mul(gate_up, activation), reference.act_mul(gate_up, activation), dtype)


def test_no_tokens_give_empty_results(backends, normal, device) -> None:
    _, backend = backends
    empty = normal(0, 2, 16)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    backend.rotary(empty, empty.clone(), none, normal(4, 2, 8))
    backend.store_kv(empty, empty, *backend.allocate_kv_cache(1, 16, 2, 16, torch.float32, device), none)
    assert backend.rms_norm(empty, normal(16), 1e-6).shape == (0, 2, 16)
    assert backend.act_mul(normal(0, 8), "silu").shape == (0, 4)


def test_linear_multiplies_and_checks_its_shapes(backends, normal) -> None:
    _, backend = backends
    weight, bias, x = normal(5, 7), normal(5), normal(3, 7)
    linear = backend.pack_linear(weight, bias)
    assert_close(linear(x), x.double() @ weight.double().T + bias.double(), torch.float32)
    with pytest.raises(ValueError, match=r"x must have shape \[\*, 7\]"):
        linear(normal(3, 8))
    with pytest.raises(ValueError, match=r"bias must have shape \[5\]"):
        backend.pack_linear(weight, normal(4))


@pytest.mark.parametrize("which", [0, 1])
def test_wrong_arguments_are_refused(backends, normal, device, which) -> None:
    backend = backends[which]
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        backend.act_mul(normal(2, 8), "relu")
    with pytest.raises(ValueError, match="even last dimension"):
        backend.act_mul(normal(2, 7), "silu")
    with pytest.raises(ValueError, match=r"weight must have shape \[8\]"):
        backend.rms_norm(normal(2, 8), normal(7), 1e-6)
    with pytest.raises(ValueError, match="residual must have shape"):
        backend.add_rms_norm(normal(2, 8), normal(3, 8), normal(8), 1e-6)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="larger than head_dim"):
        backend.rotary(normal(2, 1, 8), normal(2, 1, 8), positions, normal(4, 2, 5))
