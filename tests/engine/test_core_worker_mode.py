"""What a loaded model says of how it computes: exact only where every kernel of it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backend import KernelBackend
from kernels.cpu_backend import CpuBackend
from kernels.reference_backend import ReferenceBackend
from novainfer.config import CacheConfig, ModelConfig, ServeConfig
from tests.parity.builders import build_checkpoint
from workers.mode import find_mode
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

CPU = torch.device("cpu")


def mode(
    folder: Path, kernels: KernelBackend, *, dtype: str = "float32", quantization: str = "none", **cache: Any
) -> str:
    tp = TensorParallel.single()
    config = ServeConfig(
        model=ModelConfig(model=str(folder), dtype=dtype, quantization=quantization),
        cache=CacheConfig(**cache),
    )
    model = load_model(config.model, tp=tp, kernels=kernels, device=CPU)
    return str(find_mode(config, kernels, model, tp, CPU))


def test_a_native_decoder_when_all_kernels_are_native_then_exact_else_not(tmp_path: Path) -> None:
    folder = build_checkpoint("qwen3", tmp_path / "model")
    native, fallback = CpuBackend("portable"), CpuBackend("no such instruction set")
    torch_isa = f"torch-{torch.backends.cpu.get_cpu_capability()}"
    assert mode(folder, native) == "cpu portable cpu/native float32 tp1 exact"
    assert mode(folder, native, dtype="bfloat16") == "cpu portable cpu/native bfloat16 tp1 exact"
    assert mode(folder, native, quantization="int8") == "cpu portable cpu/native float32 int8 tp1 exact"
    kv_int8 = mode(folder, native, dtype="bfloat16", quantization="int8", kv_cache_dtype="int8")
    assert kv_int8 == "cpu portable cpu/native bfloat16 int8 kv-int8 tp1 exact"
    assert mode(folder, native, block_size=10) == "cpu portable cpu/native float32 tp1 best-effort"
    assert mode(folder, fallback) == f"cpu {torch_isa} cpu/native float32 tp1 best-effort"
    assert mode(folder, ReferenceBackend()) == f"cpu {torch_isa} reference/native float32 tp1 best-effort"


def test_several_ranks_when_sums_are_in_their_order_then_exact_else_not(tmp_path: Path) -> None:
    folder, kernels = build_checkpoint("qwen3", tmp_path / "model"), CpuBackend("portable")
    config = ServeConfig(model=ModelConfig(model=str(folder)))
    model = load_model(config.model, tp=TensorParallel.single(), kernels=kernels, device=CPU)
    for in_order, promise in ((True, "exact"), (False, "best-effort")):
        tp = TensorParallel(0, 4, None, in_order=in_order)
        assert str(find_mode(config, kernels, model, tp, CPU)).endswith(f"tp4 {promise}")


def test_transformers_own_code_when_it_runs_then_nothing_is_promised(tmp_path: Path) -> None:
    folder = build_checkpoint("starcoder2", tmp_path / "model")
    assert mode(folder, CpuBackend("portable")) == "cpu portable cpu/transformers float32 tp1 best-effort"
