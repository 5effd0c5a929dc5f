"""How this rank computes, in words; see `novainfer.mode`."""

from __future__ import annotations

import torch

from kernels.backend import KernelBackend
from novainfer.config import ServeConfig
from novainfer.mode import NOT_QUANTIZED, Mode
from workers.models.base import CausalLM
from workers.models.decoder import Decoder
from workers.tensor_parallel import TensorParallel


def find_mode(
    config: ServeConfig, kernels: KernelBackend, model: CausalLM, tp: TensorParallel, device: torch.device
) -> Mode:
    """The mode of a model that was loaded by this configuration."""
    spec = model.spec
    is_native = isinstance(model, Decoder)  # of transformers' own code nobody knows which operations it uses
    return Mode(
        device=device.type,
        hardware=_hardware(kernels, device),
        kernel_backend=kernels.name,
        model_backend="native" if is_native else "transformers",
        dtype=str(spec.dtype).removeprefix("torch."),
        quantization=config.model.quantization
        if spec.stored_quantization == NOT_QUANTIZED
        else spec.stored_quantization,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        tensor_parallel_size=tp.world_size,
        is_exact=is_native
        and tp.adds_in_order  # else NCCL chooses how it adds up by the size of what it adds
        and kernels.is_exact(config.cache.block_size, spec.head_dim, spec.dtype),
    )


def _hardware(kernels: KernelBackend, device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return kernels.isa or f"torch-{torch.backends.cpu.get_cpu_capability()}"
