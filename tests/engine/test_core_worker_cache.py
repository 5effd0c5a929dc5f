"""How large the KV cache becomes, and what happens when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kernels.backend import select_backend
from novainfer.config import MIB, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import ConfigError
from tests.builders import CPU
from tests.parity.builders import build_checkpoint
from workers import kv_cache, worker
from workers.decode_graphs import graph_sizes, kept_bytes
from workers.kv_cache import CacheSize, KVCache, cpu_budget, fit_cache, gpu_budget, peak_bytes
from workers.models.loader import load_model
from workers.step_graphs import step_graph_bytes
from workers.step_tokens import step_tokens
from workers.tensor_parallel import TensorParallel

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
    assert cpu_budget(config(kv_cache_memory_mib=100), 4, 0) == 25 * MIB
    assert 0 < cpu_budget(config(), 1, 0) <= 4096 * MIB
    assert cpu_budget(config(), 2, 0) <= 2048 * MIB


def test_given_spare_workers_when_the_cache_is_sized_then_room_is_left_for_another_copy_of_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_available_host_memory", lambda mapped: 6000 * MIB - mapped)
    spared = replace(config(), parallel=ParallelConfig(spare_workers=1))
    for ranks in (1, 2):
        left_free = 4 * ranks * (cpu_budget(config(), ranks, 0) - cpu_budget(spared, ranks, 0))
        own = psutil.Process().memory_full_info().uss
        assert left_free == pytest.approx(ranks * own, rel=0.1)
    assert cpu_budget(replace(spared, cache=CacheConfig(kv_cache_memory_mib=100)), 1, 0) == 100 * MIB


def test_given_weights_in_a_file_when_the_cache_is_sized_then_they_do_not_count_as_free_and_spares_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_available_host_memory", lambda mapped: 6000 * MIB - mapped)
    monkeypatch.setattr(kv_cache, "_private_memory", lambda: 1000 * MIB)
    assert cpu_budget(config(), 1, 800 * MIB) == 1300 * MIB
    assert cpu_budget(config(), 2, 800 * MIB) == 550 * MIB  # of each of two ranks
    spared = replace(config(), parallel=ParallelConfig(spare_workers=1))
    assert cpu_budget(spared, 1, 800 * MIB) == 1250 * MIB
    assert cpu_budget(spared, 1, 1200 * MIB) == 1200 * MIB


def test_memory_that_is_available_given_mapped_files_when_asked_then_it_is_less_by_that() -> None:
    free, less = kv_cache._available_host_memory(0), kv_cache._available_host_memory(512 * MIB)
    assert free - less == pytest.approx(512 * MIB, abs=128 * MIB)  # others use memory, too


def test_memory_that_is_available_given_a_container_when_asked_then_files_that_nobody_uses_do_not_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_CONTROL_GROUP", tmp_path)
    figures = {"memory.max": 100 * MIB, "memory.current": 90 * MIB}
    for name, figure in figures.items():
        (tmp_path / name).write_text(f"{figure}\n")
    (tmp_path / "memory.stat").write_text(f"anon {5 * MIB}\nfile {85 * MIB}\ninactive_file {60 * MIB}\n")
    assert kv_cache._available_host_memory(0) == 70 * MIB
    assert kv_cache._available_host_memory(20 * MIB) == 50 * MIB
    assert kv_cache._available_host_memory(80 * MIB) == 10 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_cache._available_host_memory(0) > 100 * MIB


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


@pytest.mark.parametrize(("is_recorded", "graph_peak"), [(False, 0), (True, 7000), (True, 3_000_000)])
def test_what_steps_need_when_measured_then_prompts_and_decodes_count_and_graphs_once_more(
    is_recorded: bool, graph_peak: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(device: torch.device, call: Callable[[], object]) -> int:
        call()
        return peaks.pop(0)

    peaks = [5000, 1_000_000, graph_peak]  # of the largest prompt, of the largest decode, of the largest graph
    monkeypatch.setattr(worker, "peak_bytes", peak)
    monkeypatch.setattr(worker, "has_graphs", lambda config, model, device: is_recorded)
    given = replace(
        config(64), model=ModelConfig(model=str(build_checkpoint("qwen3", tmp_path / "model")), max_model_len=64)
    )
    kernels, tp = select_backend(CPU), TensorParallel.single()
    model = load_model(given.model, tp=tp, kernels=kernels, device=CPU)
    assert 4 * 4 * 4 * model.spec.vocab_size < 1_000_000  # what sampling may need is less
    layers, hidden = model.spec.num_layers, model.spec.hidden_size * model.spec.dtype.itemsize
    kept = kept_bytes(4, layers, 64 // 16) + step_graph_bytes(
        step_tokens(given.scheduler, model.spec, CPU, torch.get_num_threads()), layers, hidden
    )
    graphs = max(1_000_000, graph_peak) + kept if is_recorded else 0
    rows = 4 * 4 * (64 + 64 // 16)  # tokens and block tables
    assert worker._work_space(given, model, kernels, tp, CPU) == 5000 + 1_000_000 + rows + graphs
    assert kept_bytes(8, 10, 4) > kept_bytes(4, 10, 4) > kept_bytes(4, 5, 4) > 0
    assert kept_bytes(4, 5, 104) - kept_bytes(4, 5, 4) == 4 * 100 * sum(graph_sizes(4))


def test_steps_when_a_gpu_has_no_memory_for_them_then_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work_space(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker, "_work_space", work_space)
    spec = ModelConfig(model=str(build_checkpoint("qwen3", tmp_path / "model")), max_model_len=64)
    kernels, tp = select_backend(CPU), TensorParallel.single()
    model = load_model(spec, tp=tp, kernels=kernels, device=CPU)
    with pytest.raises(ConfigError, match="no memory for steps of the largest size; lower --max-num-seqs"):
        worker._size_cache(config(64), model, kernels, tp, torch.device("cuda"), 0)


def test_room_when_steps_take_it_then_the_bill_says_so() -> None:
    with pytest.raises(ConfigError, match=r"\(3 MiB of it are left free for steps .* or --enforce-eager\)"):
        fit_cache(config(max_model_len=128), 128, BLOCK_BYTES, 0, 3 * MIB)


def test_a_peak_when_measured_then_what_is_kept_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fakes = {
        "synchronize": lambda device: order.append("wait"),
        "reset_peak_memory_stats": lambda device: order.append("reset"),
        "max_memory_allocated": lambda device: 700,
        "memory_allocated": lambda device: 300,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert peak_bytes(CPU, lambda: order.append("call")) == 400
    assert order == ["wait", "reset", "call", "wait"]


def test_a_gpu_when_its_cache_is_sized_then_what_steps_need_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 * MIB, 1000 * MIB))
    used = config(gpu_memory_utilization=0.75)
    assert gpu_budget(used, torch.device("cuda"), 100 * MIB) == 350 * MIB
