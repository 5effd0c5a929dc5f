"""How large the KV cache becomes, and what happens when it does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from kernels.backend import select_backend
from novainfer.config import MIB, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import ConfigError
from tests.builders import CPU
from workers import kv_cache
from workers.kv_cache import CacheSize, KVCache, cpu_budget, fit_cache

pytestmark = pytest.mark.stage0

BLOCK_BYTES = 1024


def config(max_model_len: int | None = None, max_num_seqs: int = 4, **cache: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


@pytest.mark.parametrize(
    ("options", "budget_blocks", "expected"),
    [
        ({}, 1000, CacheSize(4 * 8, 128)),  # no more than all rows at full length need
        ({}, 20, CacheSize(20, 128)),
        ({}, 5, CacheSize(5, 80)),  # not even one sequence fits, and nobody asked for its length
        ({"max_model_len": 65}, 1000, CacheSize(4 * 5, 65)),
        ({"num_blocks": 9}, 0, CacheSize(9, 128)),
        ({"num_blocks": 3}, 0, CacheSize(3, 48)),
        ({"block_size": 32}, 1000, CacheSize(4 * 4, 128)),
    ],
)
def test_budget_when_cache_is_sized_then_blocks_and_length_fit(
    options: dict[str, Any], budget_blocks: int, expected: CacheSize
) -> None:
    assert fit_cache(config(**options), 128, BLOCK_BYTES, budget_blocks * BLOCK_BYTES) == expected


@pytest.mark.parametrize("budget", [7 * BLOCK_BYTES, 0, -1])
def test_explicit_length_when_it_does_not_fit_then_config_error_with_the_bill(budget: int) -> None:
    with pytest.raises(ConfigError, match=r"128 tokens needs 8 KV blocks"):
        fit_cache(config(max_model_len=128), 128, BLOCK_BYTES, budget)


def test_no_memory_when_cache_is_sized_then_config_error() -> None:
    with pytest.raises(ConfigError, match="give the cache more memory"):
        fit_cache(config(), 128, BLOCK_BYTES, BLOCK_BYTES - 1)


def test_length_above_the_models_when_asked_for_then_config_error() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 129"):
        fit_cache(config(max_model_len=129), 128, BLOCK_BYTES, 10**9)


def test_cpu_budget_when_ranks_share_a_host_then_they_share_the_memory() -> None:
    assert cpu_budget(config(kv_cache_memory_mib=100), 4) == 25 * MIB
    assert 0 < cpu_budget(config(), 1) <= 4096 * MIB
    assert cpu_budget(config(), 2) <= 2048 * MIB


def test_given_spare_workers_when_the_cache_is_sized_then_room_is_left_for_another_copy_of_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_available_host_memory", lambda: 6000 * MIB)
    spared = replace(config(), parallel=ParallelConfig(spare_workers=1))
    for ranks in (1, 2):
        left_free = 4 * ranks * (cpu_budget(config(), ranks) - cpu_budget(spared, ranks))
        own = psutil.Process().memory_full_info().uss
        assert left_free == pytest.approx(ranks * own, rel=0.1)
    assert cpu_budget(replace(spared, cache=CacheConfig(kv_cache_memory_mib=100)), 1) == 100 * MIB


def test_blocks_when_copied_then_sources_are_read_before_anything_is_written() -> None:
    kernels = select_backend(CPU, "reference")
    layers = [kernels.allocate_kv_cache(4, 16, 2, 8, torch.float32, CPU) for _ in range(2)]
    for layer in layers:
        for tensor in layer:
            tensor += torch.arange(4).view(4, 1, 1, 1)
    KVCache(4, 16, layers).copy_blocks([0, 1], [1, 3])
    for layer in layers:
        for tensor in layer:
            assert tensor[:, 0, 0, 0].tolist() == [0, 0, 2, 1]
            assert (tensor == tensor[:, :1, :1, :1]).all()
