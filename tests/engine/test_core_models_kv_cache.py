"""Models over a quantised KV cache: the same bits alone and in company, after preemption, copies and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.backend import KernelBackend
from kernels.cpu_backend import CpuBackend
from kernels.kv_store.reference import is_quantized
from kernels.reference_backend import ReferenceBackend
from novainfer.config import CacheConfig, ModelConfig
from novainfer.errors import ConfigError
from tests.builders import CPU, PlanWriter, execute, generate, make_runner
from tests.parity.builders import build_checkpoint
from tests.parity.harness import largest_difference, load, paged_greedy, ragged_prompts
from workers.kv_cache import block_bytes
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel
from workers.worker import check_kv_cache

pytestmark = pytest.mark.stage0

NUM_TOKENS = 12
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(37)]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 12345}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("gemma2", "bfloat16"),
        ("gemma3", "float16"),
        ("starcoder2", "float32"),
    ],
)
def test_model_given_any_batch_and_chunking_when_decoded_then_logprobs_have_the_same_bits(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model, kernels = load(build_checkpoint(name, tmp_path / name), dtype=dtype)
    prompts = ragged_prompts()
    alone = [paged_greedy(model, kernels, [prompt], NUM_TOKENS, 512, torch.int8) for prompt in prompts]
    for budget in (7, 16, 512):
        together = paged_greedy(model, kernels, prompts, NUM_TOKENS, budget, torch.int8)
        assert together.tokens == [generation.tokens[0] for generation in alone]
        assert together.logprobs == [generation.logprobs[0] for generation in alone]
    assert paged_greedy(model, kernels, [prompts[5]], NUM_TOKENS, 1, torch.int8) == alone[5]


def test_model_when_its_cache_is_quantised_then_near_the_reference_and_the_plain_cache(tmp_path: Path) -> None:
    folder, prompts = build_checkpoint("qwen3", tmp_path / "qwen3"), ragged_prompts()
    model, kernels = load(folder, dtype="float32")
    quantised = paged_greedy(model, kernels, prompts, 1, cache_dtype=torch.int8)
    config = ModelConfig(model=str(folder), dtype="float32")
    oracle = load_model(config, tp=TensorParallel.single(), kernels=ReferenceBackend(), device=CPU)
    expected = paged_greedy(oracle, ReferenceBackend(), prompts, 1, cache_dtype=torch.int8)
    # A number near the middle of two integers may become the other one, after sums in another order.
    assert largest_difference(quantised, expected) < 5e-3
    assert 0.0 < largest_difference(quantised, paged_greedy(model, kernels, prompts, 1)) < 5e-2


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = build_checkpoint("qwen3", tmp_path_factory.mktemp("kv") / "qwen3", request.param)
    return load_model(ModelConfig(model=str(folder)), tp=TensorParallel.single(), kernels=CpuBackend(), device=CPU)


def solo(model: CausalLM, prompt: list[int], count: int, **fields: object) -> list[int]:
    writer = PlanWriter()
    writer.add(0, prompt, **fields)
    return generate(make_runner(model, CpuBackend(), kv_cache_dtype="int8"), writer, 0, count)


def test_rows_when_chunked_cached_copied_or_resumed_then_the_same_tokens(model: CausalLM) -> None:
    whole = solo(model, PROMPT, 6, **SAMPLED)
    runner = make_runner(model, CpuBackend(), kv_cache_dtype="int8")
    assert all(is_quantized(cache) for layer in runner.cache.layers for cache in layer)
    for layer in runner.cache.layers:
        for cache in layer:
            cache.fill_(-1)  # NaN for scales
    writer = PlanWriter()
    writer.add(0, PROMPT, **SAMPLED)
    assert generate(runner, writer, 0, 2, chunk=7) == whole[:2]
    writer.add(1, PROMPT, num_computed_tokens=36, block_ids=[0, 1, 50], **SAMPLED)
    result = execute(runner, writer.plan({0: 1, 1: 1}, copy_src=[2], copy_dst=[50]))
    assert dict(zip(result.rows, result.token_ids, strict=True)) == {0: whole[2], 1: whole[0]}
    assert generate(runner, writer, 1, 5) == whole[1:]
    assert solo(model, PROMPT + whole[:3], 3, prompt_len=len(PROMPT), **SAMPLED) == whole[3:]


def test_a_block_with_nan_for_scales_when_a_row_reads_it_then_only_that_row_is_bad(model: CausalLM) -> None:
    runner, writer = make_runner(model, CpuBackend(), kv_cache_dtype="int8"), PlanWriter()
    writer.add(0, PROMPT)
    writer.add(1, PROMPT[::-1])
    execute(runner, writer.plan({0: 37, 1: 37}))
    for key_cache, _ in runner.cache.layers:
        key_cache[runner.states.block_table[0, 1].long()] = -1
    result = execute(runner, writer.plan({0: 1, 1: 1}))
    assert result.bad_rows == [0]
    assert result.token_ids[result.rows.index(1)] == solo(model, PROMPT[::-1], 2)[1]


def test_a_block_when_quantised_then_it_takes_about_half_of_16_bits(model: CausalLM) -> None:
    plain, quantised = (
        block_bytes(model, CpuBackend(), CacheConfig(block_size=32, kv_cache_dtype=name)) for name in ("auto", "int8")
    )
    spec = model.spec
    vectors = spec.num_layers * 2 * spec.num_kv_heads * 32
    assert plain == vectors * spec.head_dim * spec.dtype.itemsize
    assert quantised == vectors * (spec.head_dim + 4)


def test_kernels_without_such_a_cache_when_checked_then_config_error_and_none_elsewhere() -> None:
    class Triton:
        name = "triton"

    triton: KernelBackend = Triton()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 runs on CPUs only so far; fp8 runs on GPUs"):
        check_kv_cache(CacheConfig(kv_cache_dtype="int8"), triton, CPU)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 runs on GPUs only"):
        check_kv_cache(CacheConfig(kv_cache_dtype="fp8"), CpuBackend(), CPU)
    for dtype in ("auto", "fp8"):
        check_kv_cache(CacheConfig(kv_cache_dtype=dtype), triton, CPU)
    for dtype in ("auto", "int8"):
        check_kv_cache(CacheConfig(kv_cache_dtype=dtype), CpuBackend(), CPU)
