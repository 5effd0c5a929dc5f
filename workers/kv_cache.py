"""The paged KV cache of one rank: how large it may be, its tensors, and copies of whole blocks."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from kernels.backend import KernelBackend
from novainfer.config import MIB, CacheConfig, ServeConfig
from novainfer.errors import ConfigError
from novainfer.protocol.step import StepPlan
from workers.cache_memory import CacheMemory
from workers.models.base import CausalLM, KvCaches
from workers.row_sampling import to_device

# As `KernelBackend.allocate_kv_cache` takes them.
_CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LEFT_FREE = 512 * MIB  # for others, when a cache's memory is taken before it is used
_AHEAD_BYTES = 128 * MIB  # always taken beyond what was used
_WHOLE_AHEAD_BYTES = 512 * MIB  # the same where the rest will be taken as well: so much a rush of prompts writes to
_CONTROL_GROUP = Path("/sys/fs/cgroup")  # ours, as a container sees it
_MAX_CPU_SHARE = 4096 * MIB  # default ceiling of the KV caches of all ranks on a CPU host


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What fits."""

    num_blocks: int
    max_model_len: int  # tokens


class KVCache:
    """Key and value tensors of every layer."""

    def __init__(self, num_blocks: int, block_size: int, layers: KvCaches) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.layers = layers
        self._memory: CacheMemory | None = None

    @classmethod
    def allocate(
        cls, model: CausalLM, kernels: KernelBackend, num_blocks: int, config: CacheConfig, device: torch.device
    ) -> KVCache:
        """Zero-filled caches for this rank's heads of every layer."""
        spec, num_kv_heads, block_size = model.spec, model.num_local_kv_heads, config.block_size
        stored = _CACHE_DTYPES[config.kv_cache_dtype]
        layers = [
            kernels.allocate_kv_cache(num_blocks, block_size, num_kv_heads, spec.head_dim, spec.dtype, device, stored)
            for _ in range(spec.num_layers)
        ]
        return cls(num_blocks, block_size, layers)

    def take_memory(self, *, whole: bool, at_first: float = 0.0, mapped: int = 0) -> None:
        """Get the memory of a cache on a CPU before it is written to: all of it, or always what is soon used.

        at_first: seconds to get what can be had before this returns; the rest comes beside the steps. mapped: bytes of
        weights in files.
        """
        if self.layers[0][0].device.type == "cpu" and self._memory is None:
            tensors = [cache for layer in self.layers for cache in layer]
            block_bytes = sum(tensor.nbytes for tensor in tensors) // self.num_blocks
            ahead = max((_WHOLE_AHEAD_BYTES if whole else _AHEAD_BYTES) // block_bytes, 1)
            room = functools.partial(_room, mapped)
            self._memory = CacheMemory(tensors, ahead, room, is_whole=whole)
            if at_first:
                self._memory.take_first(at_first, torch.get_num_threads())
            self._memory.start()
            weakref.finalize(self, self._memory.close)  # its thread holds the tensors, and would for ever

    def close(self) -> None:
        """Get no more memory."""
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """While the plan runs on this device."""
        if self._memory is None:
            yield
            return
        lists = [*(row.block_ids for row in plan.new_rows), plan.grown_blocks]
        self._memory.step_begins(block for block_ids in lists for block in block_ids)
        try:
            yield
        finally:
            self._memory.step_ends()

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to block dst[i] in every layer; all sources are read before anything is written."""
        if not src:
            return
        device = self.layers[0][0].device
        src_index, dst_index = (to_device(np.array(blocks, np.int64), device) for blocks in (src, dst))
        for layer in self.layers:
            for cache in layer:
                cache[dst_index] = cache[src_index]


def block_bytes(model: CausalLM, kernels: KernelBackend, config: CacheConfig) -> int:
    """Bytes that one block takes on this rank, over all layers."""
    spec, stored = model.spec, _CACHE_DTYPES[config.kv_cache_dtype]
    num_kv_heads = model.num_local_kv_heads
    return spec.num_layers * kernels.kv_cache_bytes(
        1, config.block_size, num_kv_heads, spec.head_dim, spec.dtype, stored
    )


def resolve_max_model_len(config: ServeConfig, max_position: int) -> int:
    """The configured limit or the model's own. Raises `ConfigError` if the model cannot go that far."""
    explicit = config.model.max_model_len
    if explicit is not None and explicit > max_position:
        raise ConfigError(f"--max-model-len {explicit} is more than the {max_position} tokens that the model takes")
    return explicit or max_position


def fit_cache(
    config: ServeConfig, max_position: int, bytes_per_block: int, budget: int, work_space: int = 0
) -> CacheSize:
    """How many blocks to allocate, and how long a sequence may then be.

    budget: bytes for this rank's cache; `--num-blocks` goes before it. work_space: what was left free for steps. Raises
    `ConfigError` with the bill if not even one sequence of the explicitly configured length fits.
    """
    block_size = config.cache.block_size
    max_model_len = resolve_max_model_len(config, max_position)
    needed = -(-max_model_len // block_size)
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        # More than every row at full length could hold is never used.
        num_blocks = min(max(budget, 0) // bytes_per_block, config.scheduler.max_num_seqs * needed)
    if num_blocks >= needed:
        return CacheSize(num_blocks, max_model_len)
    if config.model.max_model_len is None and num_blocks > 0:
        return CacheSize(num_blocks, num_blocks * block_size)
    have = f"--num-blocks {num_blocks}" if config.cache.num_blocks else f"{max(budget, 0) / MIB:.0f} MiB"
    raise ConfigError(
        f"one sequence of {max_model_len} tokens needs {needed} KV blocks of {bytes_per_block / 1024:.0f} KiB = "
        f"{needed * bytes_per_block / MIB:.0f} MiB, but there is room for {num_blocks} ({have}); "
        f"lower --max-model-len or give the cache more memory{_work_space_hint(work_space)}"
    )


def _work_space_hint(work_space: int) -> str:
    if not work_space:
        return ""
    lower = "a lower --max-num-seqs or --max-num-batched-tokens, or --enforce-eager"
    words = f"are left free for steps of the largest size, less with {lower}"
    return f" ({work_space / MIB:.0f} MiB of it {words})"


def cpu_budget(config: ServeConfig, ranks_on_host: int, mapped: int) -> int:
    """Bytes for the KV cache of one of `ranks_on_host` ranks on a CPU. Call it when the weights are loaded.

    mapped: bytes of each rank's weights in files, which spare ranks share.
    """
    if config.cache.kv_cache_memory_mib is not None:
        return config.cache.kv_cache_memory_mib * MIB // ranks_on_host
    # A spare rank will hold what this one holds by now: the weights, above all.
    spares = config.parallel.spare_workers * ranks_on_host
    available = _available_host_memory(mapped * ranks_on_host)
    available -= spares * max(_private_memory() - mapped, 0) if spares else 0
    return min(max(available, 0) // 4, _MAX_CPU_SHARE) // ranks_on_host


def gpu_budget(config: ServeConfig, device: torch.device, work_space: int) -> int:
    """Bytes for the KV cache of the rank that owns `device`: what is free once the weights are loaded, but for
    `work_space` and the share that is not to be used.
    """
    gc.collect()  # an engine that was dropped may have its memory until then
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = int(total * (1.0 - config.cache.gpu_memory_utilization))
    return free - reserve - work_space


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Of the memory of a GPU that a call needs at once, what it has given back at its end."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _room(mapped: int) -> int:
    return _available_host_memory(mapped) - _LEFT_FREE


def _private_memory() -> int:
    """Bytes that this process shares with no other."""
    used: int = psutil.Process().memory_full_info().uss
    return used


def _available_host_memory(mapped: int) -> int:
    """Bytes that may still be taken without swapping, under the container's limit where there is one.

    mapped: bytes of files that are in use, which the system would count.
    """
    available: int = psutil.virtual_memory().available - mapped
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CONTROL_GROUP / "memory.current").read_text())
            statistics = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
            idle = int(statistics.get("inactive_file", 0))  # pages of files that are given up before anything else
            available = min(available, int(limit) - used + max(idle - mapped, 0))
    except OSError:
        pass  # no control group (version 2): the host's figure holds
    return max(available, 0)
