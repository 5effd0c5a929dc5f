"""Native norms, rotary embedding, activations and sampling: against the reference kernels, and one row at a time."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from kernels.backend import ACTIVATIONS, SamplingTensors
from kernels.cpu_backend import CpuBackend
from kernels.reference_backend import ReferenceBackend
from tests.kernels.native_cases import DTYPES, ISAS, TOLERANCE, relative_error, same_bits

pytestmark = pytest.mark.stage0

WIDTHS = (1, 16, 33, 100, 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_when_normalised_then_near_reference_and_as_alone(isa: str, dtype: torch.dtype) -> None:
    backend, reference = CpuBackend(isa), ReferenceBackend()
    for width in WIDTHS:
        torch.manual_seed(width)
        x, residual = torch.randn(2, 13, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        for offset in (0.0, 1.0):
            normed = backend.rms_norm(x, weight, 1e-6, offset)
            assert relative_error(normed, reference.rms_norm(x, weight, 1e-6, offset)) < TOLERANCE[dtype]
            added, total = backend.add_rms_norm(x, residual, weight, 1e-6, offset)
            expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6, offset)
            assert same_bits(total, expected_total)
            assert relative_error(added, expected) < TOLERANCE[dtype]
            for row in (0, 7, 12):
                assert same_bits(backend.rms_norm(x[row], weight, 1e-6, offset), normed[row])


@pytest.mark.parametrize("isa", ISAS)
def test_every_kind_of_number_when_rounded_to_bf16_then_as_torch_rounds_it(isa: str) -> None:
    tiny, most = 2.0**-126, torch.finfo(torch.bfloat16).max
    ordinary = [(1.0, 2.0**-8), (1.0, 3 * 2.0**-8), (1.0, 2.0**-8 + 2.0**-12), (-3.0, 2.0**-7), (most, most * 2.0**-8)]
    special = [(1.5 * tiny, -tiny), (2.0**-130, 2.0**-131), (-0.0, -0.0)]
    special += [(math.inf, 1.0), (math.inf, -math.inf), (math.nan, 1.0)]
    for rare in special:  # beside ordinary numbers, and among its like
        pairs = torch.tensor([ordinary * 4 + [rare], special * 3 + [rare] * 3]).bfloat16()
        x, residual = pairs[..., 0].contiguous(), pairs[..., 1].contiguous()
        total = CpuBackend(isa).add_rms_norm(x, residual, torch.ones(21).bfloat16(), 1e-6)[1]
        expected = (x.float() + residual.float()).bfloat16()
        assert total.isnan().equal(expected.isnan()), rare
        assert total.nan_to_num(0.0).view(torch.int16).equal(expected.nan_to_num(0.0).view(torch.int16)), rare


def test_heads_view_when_normalised_then_shape_kept_and_input_untouched() -> None:
    backend, fused = CpuBackend(), torch.randn(5, 6, 32).bfloat16()
    weight, heads = torch.randn(32).bfloat16(), fused[:, 1:4]
    before = fused.clone()
    assert same_bits(backend.rms_norm(heads, weight, 1e-5), backend.rms_norm(heads.contiguous(), weight, 1e-5))
    assert same_bits(fused, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_partial_rotary_on_views_when_rotated_then_reference_bits(isa: str, dtype: torch.dtype) -> None:
    for half in (1, 8, 17, 20):
        fused = torch.randn(9, 5, 50).to(dtype)
        positions, cos_sin = torch.randint(0, 30, (9,)), torch.randn(30, 2, half)
        expected = fused.clone()
        CpuBackend(isa).rotary(fused[:, :3, :40], fused[:, 3:, :40], positions, cos_sin)
        ReferenceBackend().rotary(expected[:, :3, :40], expected[:, 3:, :40], positions, cos_sin)
        assert same_bits(fused, expected)


def test_position_outside_table_when_rotated_then_index_error_and_nothing_changed() -> None:
    query = torch.randn(2, 1, 8)
    before = query.clone()
    with pytest.raises(IndexError, match="position"):
        CpuBackend().rotary(query, torch.randn(2, 1, 8), torch.tensor([0, 30]), torch.randn(30, 2, 4))
    assert same_bits(query, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_gates_when_activated_then_near_reference_and_as_alone(isa: str, dtype: torch.dtype) -> None:
    backend, reference = CpuBackend(isa), ReferenceBackend()
    for width in WIDTHS:
        gate_up = torch.randn(7, 2 * width).to(dtype) * 4
        gate_up[0, 0], gate_up[1, 0] = 80.0, -200.0
        for activation in ACTIVATIONS:
            actual = backend.act_mul(gate_up, activation)
            assert relative_error(actual, reference.act_mul(gate_up, activation)) < TOLERANCE[dtype]
            assert same_bits(backend.act_mul(gate_up[3:4], activation)[0], actual[3])


def _parameters(rows: int) -> SamplingTensors:
    """Every combination of switched-on and switched-off filters, and all temperatures, within 60 rows."""
    row = torch.arange(rows)
    return SamplingTensors(
        temperature=torch.tensor([0.0, 0.5, 1.0, 2.0])[row % 4],
        top_k=torch.tensor([0, 1, 5, 50, 0], dtype=torch.int32)[row % 5],
        top_p=torch.tensor([1.0, 0.9, 0.3])[row % 3],
        min_p=torch.tensor([0.0, 0.05])[row // 3 % 2],
        seed=torch.randint(-(2**62), 2**62, (rows,)),
        choice=(row % 7).int(),
        index=row * 1000,
    )


@functools.cache
def _sampling_cases() -> list[tuple[torch.Tensor, SamplingTensors, list[int]]]:
    """Awkward logits, parameters and the reference's tokens."""
    torch.manual_seed(3)
    cases = []
    for vocab_size, spread in ((1, 1.0), (5, 8.0), (63, 1.0), (64, 0.1), (1000, 1.0), (4099, 0.1), (4099, 8.0)):
        logits, params = torch.randn(60, vocab_size) * spread, _parameters(60)
        logits[:, ::7] = -math.inf
        logits[:, vocab_size // 2] = logits[:, -1]
        logits[11, vocab_size // 3], logits[12] = math.nan, -math.inf
        logits[13, -1] = math.inf
        cases.append((logits, params, ReferenceBackend().sample(logits, params).tolist()))
    return cases


@pytest.mark.parametrize("isa", ISAS)
def test_logits_with_ties_infinities_and_nan_when_sampled_then_reference_tokens(isa: str) -> None:
    backend = CpuBackend(isa)
    for logits, params, expected in _sampling_cases():
        assert backend.sample(logits, params).tolist() == expected, logits.shape


@pytest.mark.parametrize("isa", ISAS)
def test_ids_that_rounding_makes_equal_when_sampled_then_the_lowest_of_them(isa: str) -> None:
    """Numbers so large that most of the noise is rounded away; with these seeds two ids become equal by it."""
    temperature = 2.0**-18
    seeds = torch.tensor([966, 1138, 2071, 2747, 2768])
    logits = torch.zeros(5, 64)
    logits[:, 3], logits[:, 20] = 4194304.5 * temperature, 4194310 * temperature
    ones, zeros = torch.ones(5), torch.zeros(5, dtype=torch.int32)
    params = SamplingTensors(ones * temperature, zeros, ones, zeros.float(), seeds, zeros, zeros.long())
    assert ReferenceBackend().sample(logits, params).tolist() == [3] * 5
    assert CpuBackend(isa).sample(logits, params).tolist() == [3] * 5


def test_rows_when_sampled_together_then_as_alone() -> None:
    backend, logits, params = CpuBackend(), torch.randn(60, 5000), _parameters(60)
    tokens = backend.sample(logits, params)
    for row in range(0, 60, 7):
        fields = (getattr(params, name)[row : row + 1].clone() for name in SamplingTensors.__dataclass_fields__)
        assert backend.sample(logits[row : row + 1], SamplingTensors(*fields))[0] == tokens[row]


def test_many_draws_when_counted_then_distribution_is_softmax() -> None:
    draws = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]).repeat(draws, 1)
    ones, zeros = torch.ones(draws), torch.zeros(draws, dtype=torch.int32)
    params = SamplingTensors(
        ones, zeros, ones, torch.zeros(draws), torch.full((draws,), 42), zeros, torch.arange(draws)
    )
    counts = torch.bincount(CpuBackend().sample(logits, params), minlength=5).double()
    expected = logits[0].double().softmax(0) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.47  # chi-squared, 4 degrees of freedom, p = 0.001
