"""Ready-made configurations for common hardware, each a whole `ServeConfig`; its differences from the defaults count.

`novainfer serve --preset tp4`; `--print-config` shows the values, which are also options of the offline `LLM`.
"""

from __future__ import annotations

from novainfer.config import CacheConfig, ParallelConfig, SchedulerConfig, ServeConfig


def laptop_cpu() -> ServeConfig:
    """A CPU with 8 to 16 GB of memory: small batches, 1 GiB of KV cache."""
    return ServeConfig(
        cache=CacheConfig(kv_cache_memory_mib=1024),
        scheduler=SchedulerConfig(max_num_seqs=16),
        parallel=ParallelConfig(device="cpu"),
    )


def gpus(count: int) -> ServeConfig:
    """`count` data-centre GPUs of one machine as one tensor-parallel group: large batches, long prefill chunks."""
    return ServeConfig(
        cache=CacheConfig(gpu_memory_utilization=0.92),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        parallel=ParallelConfig(device="cuda", tensor_parallel_size=count),
    )


PRESETS: dict[str, ServeConfig] = {
    "laptop-cpu": laptop_cpu(),
    "one-gpu": gpus(1),
    "tp2": gpus(2),
    "tp4": gpus(4),
    "tp8": gpus(8),
}
