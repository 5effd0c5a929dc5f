"""One rank: device, kernels, model, KV cache and rows, put together from the configuration.

Runs in a worker process (`step_loop`) or in the process of the offline engine (`local_executor`). Knows no socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from kernels.backend import KernelBackend, select_backend
from novainfer.checkpoint import resolve_checkpoint
from novainfer.config import (
    GIB,
    MIB,
    NO_FP8_CACHE_ON_CPUS,
    NO_FP8_ON_CPUS,
    NO_INT8_CACHE_ON_GPUS,
    NO_W8A8_ON_GPUS,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    ServeConfig,
)
from novainfer.errors import ConfigError
from novainfer.executor.base import ExecutorInfo
from novainfer.mode import Mode
from novainfer.protocol.columns import column
from novainfer.protocol.step import NewRow, StepPlan, StepResult
from novainfer.sampling.params import SamplingParams
from workers.checkpoint import find_checkpoint
from workers.decode_graphs import decode_once, kept_bytes
from workers.fingerprint import checksum_of, fingerprint
from workers.grammars import Grammars
from workers.graphs import Rank, cuda_recorder, is_out_of_memory
from workers.kv_cache import (
    CacheSize,
    KVCache,
    block_bytes,
    cpu_budget,
    fit_cache,
    gpu_budget,
    peak_bytes,
    resolve_max_model_len,
)
from workers.launch import RankPlace
from workers.mode import find_mode
from workers.model_runner import ModelRunner
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.null_runner import null_runner
from workers.request_states import RequestStates, RowLimits
from workers.step_graphs import step_graph_bytes, step_once
from workers.step_tokens import step_tokens
from workers.tensor_parallel import TensorParallel
from workers.weight_ahead import weight_folder
from workers.weight_file import WeightFile
from workers.weight_key import weight_key
from workers.weights import find_bad_tensor

if TYPE_CHECKING:
    from novainfer.text.vocabulary import Vocabulary

Progress = Callable[[str, int, int], None]  # (stage, done, total)

STAGE_WEIGHTS = "weights"
STAGE_KV_CACHE = "kv cache"
STAGE_WARM_UP = "warm-up"
_WARM_UP_TOKENS = 32
_GPU_WARM_UP_TOKENS = 128  # so many that what long prompts take is compiled
_WARM_UP_PARAMS = SamplingParams(seed=0, top_p=0.9, logprobs=0)
_FINGERPRINT_PARAMS = replace(_WARM_UP_PARAMS, logprobs=8)
_FINGERPRINT_STRIDE = 7919  # from one token's id to the next one's: they lie far apart
_SAMPLING_COPIES = 4  # of the largest step's float32 logits, live at once: raw, processed, log-probabilities, noise


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepResult:
        """Wait for its end."""


class Runner(Protocol):
    """Runs plans in the order they come."""

    @property
    def progress(self) -> int:
        """Grows while it works; may be read by another thread."""

    def launch(self, plan: StepPlan) -> Pending | None:
        """Start one step; None on ranks other than 0. Raises `EngineError` for an impossible plan."""

    def drop_rows(self) -> None:
        """Forget all rows: their owner is gone."""

    def use_idle_time(self) -> bool:
        """No plan has come for a while: get something ready, in less than a second or so. False: there is nothing."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A rank that can run plans."""

    runner: Runner
    info: ExecutorInfo
    tp: TensorParallel
    max_launched: int  # steps worth launching before the first is finished: 2 where the device works on its own
    cache: KVCache | None  # None: it computes nothing
    fingerprint: str = ""  # of a group in an exact mode, on rank 0
    weight_file: WeightFile | None = None

    @classmethod
    def build(cls, config: ServeConfig, place: RankPlace, progress: Progress) -> Worker:
        """Load all and run a first step. Raises `ConfigError` or `UnsupportedModelError` for what cannot be served."""
        if config.parallel.executor == "null":
            null, info = null_runner(config, place)
            return cls(null, info, TensorParallel.single(), 1, None)
        device = choose_device(config.parallel, place.rank)
        kernels = choose_kernels(config.parallel, device)
        check_quantization(config.model, kernels, device)
        check_kv_cache(config.cache, kernels, device)
        if device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_worker or default_threads(place.world_size))
        else:
            torch.cuda.set_device(device)
        deterministic = config.parallel.deterministic
        tp = TensorParallel.init(place.rank, place.world_size, place.meeting_point, device, deterministic=deterministic)
        model, weight_file = _load_model(config.model, kernels, tp, device, progress)
        mapped = 0 if weight_file is None else weight_file.mapped_bytes
        mode = find_mode(config, kernels, model, tp, device)
        checksum = checksum_of(model) if mode.is_exact else 0
        progress(STAGE_KV_CACHE, 0, 1)
        size = _size_cache(config, model, kernels, tp, device, mapped)
        cache = KVCache.allocate(model, kernels, size.num_blocks, config.cache, device)
        limits = _limits(config, model, size, _step_tokens(config, model, tp, device))
        record = cuda_recorder(device) if has_graphs(config, model, device) else None
        grammars = Grammars(partial(_load_vocabulary, _find_tokenizer(config.model), limits.vocab_size))
        runner = ModelRunner(model, kernels, tp, RequestStates(limits, device), cache, record, grammars)
        progress(STAGE_WARM_UP, 0, 1)
        most = _WARM_UP_TOKENS if device.type == "cpu" else _GPU_WARM_UP_TOKENS
        num_tokens = min(most, limits.max_num_batched_tokens, limits.max_model_len - 2)
        if any(result.bad_rows for result in _run_dummy(runner, [0] * num_tokens, _WARM_UP_PARAMS)):
            raise ConfigError(_why_not_finite(config.model))
        info = ExecutorInfo(
            epoch=place.epoch,
            num_blocks=size.num_blocks,
            block_size=limits.block_size,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            can_draft=device.type == "cpu",
            mode=str(mode),
            hidden_size=model.spec.hidden_size,
        )
        own = _fingerprint_of(runner, mode, tp, checksum, num_tokens) if mode.is_exact else ""
        return cls(runner, info, tp, 1 if device.type == "cpu" else 2, cache, own, weight_file)

    def take_cache_memory(self, config: ServeConfig, at_first: float = 0.0) -> None:
        """All of a cache whose size was given: it is wanted, and later may not be there. Else what is soon used.

        at_first: seconds that may be spent on it before anything runs.
        """
        if self.cache is not None:
            whole = config.cache.kv_cache_memory_mib is not None
            mapped = 0 if self.weight_file is None else self.weight_file.mapped_bytes
            self.cache.take_memory(whole=whole, at_first=at_first, mapped=mapped)

    def use_idle_time(self) -> bool:
        """Get something ready that is wanted later; see `Runner`. False: there is nothing."""
        return self.runner.use_idle_time() or self.write_weights()

    def write_weights(self) -> bool:
        """A piece of the file that the next start maps; see `WeightFile.write_next`. False: there is nothing to do."""
        return self.weight_file is not None and self.weight_file.write_next()


def _load_model(
    config: ModelConfig, kernels: KernelBackend, tp: TensorParallel, device: torch.device, progress: Progress
) -> tuple[CausalLM, WeightFile | None]:
    """This rank's part, with the file that keeps its packed weights where there is one, or may be."""
    memory, kept = kernels.weight_memory, None
    if memory is not None and config.weight_cache_gib:
        limit = int(config.weight_cache_gib * GIB)
        kept = WeightFile(weight_folder(), weight_key(config, kernels, tp), limit)
    with nullcontext() if memory is None else memory.keeping(kept):
        model = load_model(
            config,
            tp=tp,
            kernels=kernels,
            device=device,
            progress=lambda done, total: progress(STAGE_WEIGHTS, done, total),
        )
    return model, kept


def _find_tokenizer(config: ModelConfig) -> Path | ConfigError:
    """The tokenizer's folder, or why there is none: only rows with grammars need it."""
    try:
        return resolve_checkpoint(config.tokenizer or config.model, revision=config.revision)
    except ConfigError as error:
        return error


def _load_vocabulary(folder: Path | ConfigError, size: int) -> Vocabulary:
    """Raises `ConfigError`. Within a step: nothing is fetched."""
    from novainfer.text.vocabulary import Vocabulary  # few ranks ever need it, and what it imports

    if isinstance(folder, ConfigError):
        raise folder
    return Vocabulary.load(folder, size)


def choose_device(config: ParallelConfig, rank: int) -> torch.device:
    """The rank's device; `auto` takes GPUs where there are enough for all ranks of this process's view."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("--device cuda was asked for, but no CUDA device is visible")
    # Ray shows an actor its own GPU alone; without it all are visible.
    return torch.device("cuda", rank if count > rank else 0)


def choose_kernels(config: ParallelConfig, device: torch.device) -> KernelBackend:
    """The configured kernel backend. Raises `ConfigError` if it cannot run on the device."""
    try:
        return select_backend(
            device, None if config.kernel_backend == "auto" else config.kernel_backend, exact=config.deterministic
        )
    except ValueError as error:
        raise ConfigError(f"--kernel-backend {config.kernel_backend}: {error}") from None


def has_graphs(config: ServeConfig, model: CausalLM, device: torch.device) -> bool:
    """Whether steps become CUDA graphs."""
    return device.type == "cuda" and model.is_static and not config.parallel.enforce_eager


def check_quantization(config: ModelConfig, kernels: KernelBackend, device: torch.device) -> None:
    """Raises `ConfigError` if these kernels cannot multiply by the weights that were asked for on this device."""
    if config.quantization == "w8a8" and kernels.name == "triton":
        raise ConfigError(NO_W8A8_ON_GPUS)
    if config.quantization == "fp8" and (kernels.name == "cpu" or not _multiplies_fp8(device)):
        raise ConfigError(NO_FP8_ON_CPUS)


def _multiplies_fp8(device: torch.device) -> bool:
    """Whether it has tensor cores for it; what is no GPU goes without."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def check_kv_cache(config: CacheConfig, kernels: KernelBackend, device: torch.device) -> None:
    """Raises `ConfigError` if these kernels have no KV cache of the type that was asked for on this device."""
    if config.kv_cache_dtype == "int8" and kernels.name == "triton":
        raise ConfigError(NO_INT8_CACHE_ON_GPUS)
    if config.kv_cache_dtype == "fp8" and (kernels.name == "cpu" or not _multiplies_fp8(device)):
        raise ConfigError(NO_FP8_CACHE_ON_CPUS)


def default_threads(world_size: int) -> int:
    """The cores this process may use, divided by the ranks."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // world_size)


def _step_tokens(config: ServeConfig, model: CausalLM, tp: TensorParallel, device: torch.device) -> int:
    return step_tokens(config.scheduler, model.spec, device, torch.get_num_threads() * tp.world_size)


def _limits(config: ServeConfig, model: CausalLM, size: CacheSize, num_tokens: int) -> RowLimits:
    return RowLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=size.max_model_len,
        max_num_batched_tokens=num_tokens,
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        vocab_size=model.spec.vocab_size,
    )


def _size_cache(
    config: ServeConfig, model: CausalLM, kernels: KernelBackend, tp: TensorParallel, device: torch.device, mapped: int
) -> CacheSize:
    """Decide the number of blocks; on a GPU after steps of the largest size have shown what they need beside them."""
    max_position = model.spec.max_position
    per_block = block_bytes(model, kernels, config.cache)
    if config.cache.num_blocks is not None:
        return fit_cache(config, max_position, per_block, budget=0)
    if device.type == "cpu":
        return fit_cache(config, max_position, per_block, cpu_budget(config, tp.world_size, mapped))
    if config.cache.kv_cache_memory_mib is not None:
        return fit_cache(config, max_position, per_block, config.cache.kv_cache_memory_mib * MIB)
    try:
        needed = _work_space(config, model, kernels, tp, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        words = "beside the weights the GPU has no memory for steps of the largest size; lower --max-num-seqs,"
        raise ConfigError(f"{words} --max-num-batched-tokens or --max-model-len") from error
    return fit_cache(config, max_position, per_block, gpu_budget(config, device, needed), needed)


def _work_space(
    config: ServeConfig, model: CausalLM, kernels: KernelBackend, tp: TensorParallel, device: torch.device
) -> int:
    """Bytes that steps of the largest size need on a GPU beside weights and cache: by running them on a small one."""
    rows, step = config.scheduler.max_num_seqs, _step_tokens(config, model, tp, device)
    max_model_len = resolve_max_model_len(config, model.spec.max_position)
    num_tokens = min(step, max_model_len - 2)
    probe = CacheSize(-(-(num_tokens + 2) // config.cache.block_size), max_model_len)
    cache = KVCache.allocate(model, kernels, probe.num_blocks, config.cache, device)
    states = RequestStates(_limits(config, model, probe, step), device)
    runner = ModelRunner(model, kernels, tp, states, cache)
    prompt_bytes = peak_bytes(device, lambda: _run_dummy(runner, [0] * num_tokens, _WARM_UP_PARAMS))
    decode_bytes, rank = 0, Rank(model, kernels, tp, states, cache)
    if model.is_static:  # else the host has to watch its steps: they are no graphs
        # Contexts may be as long as they can be: so are the partial results of decode attention.
        decode_bytes = peak_bytes(device, lambda: decode_once(rank))
    sampling_bytes = _SAMPLING_COPIES * 4 * rows * model.spec.vocab_size
    needed = prompt_bytes + max(sampling_bytes, decode_bytes) + states.token_ids.nbytes + states.block_table.nbytes
    if has_graphs(config, model, device):  # they have memory of their own
        spec = model.spec
        needed += max(decode_bytes, peak_bytes(device, lambda: step_once(rank)))
        needed += kept_bytes(rows, spec.num_layers, states.block_table.shape[1])
        needed += step_graph_bytes(step, spec.num_layers, spec.hidden_size * spec.dtype.itemsize)
    return needed


def _why_not_finite(config: ModelConfig) -> str:
    name = find_bad_tensor(find_checkpoint(config.model, config.revision))
    if name is None:
        return "the model's first logits are not finite: its numbers do not fit into this type, try another --dtype"
    return f"the model's first logits are not finite: tensor '{name}' of the checkpoint holds NaN or infinity"


def _run_dummy(runner: ModelRunner, token_ids: list[int], params: SamplingParams) -> list[StepResult]:
    """Prefill these tokens and decode once, then leave the rows as they were; rank 0 alone has results.

    Pays for lazy initialisation and compilation before the first request does. What it leaves in the KV blocks is never
    read: a slot is written before it belongs to a context.
    """
    num_tokens, block_size = len(token_ids), runner.states.limits.block_size
    if num_tokens < 1:
        return []
    new = NewRow(
        row=0,
        token_ids=column(token_ids),
        prompt_len=num_tokens,
        num_computed_tokens=0,
        block_ids=list(range(-(-(num_tokens + 1) // block_size))),
        params=params,
        choice=0,
    )
    row, none = column([0]), column()
    results = [
        runner.execute(StepPlan(epoch=0, step=0, rows=row, num_new_tokens=column([num_tokens]), new_rows=[new])),
        runner.execute(StepPlan(epoch=0, step=1, rows=row, num_new_tokens=column([1]))),
        runner.execute(StepPlan(epoch=0, step=2, rows=none, num_new_tokens=none, freed_rows=[0])),
    ]
    return [result for result in results if result is not None]


def _fingerprint_of(runner: ModelRunner, mode: Mode, tp: TensorParallel, checksum: int, num_tokens: int) -> str:
    """After the warm-up: what a process computes first may be its own (see `rotary_table`)."""
    vocab_size = runner.states.limits.vocab_size
    token_ids = [i * _FINGERPRINT_STRIDE % vocab_size for i in range(num_tokens)]
    return fingerprint(mode, tp, checksum, _run_dummy(runner, token_ids, _FINGERPRINT_PARAMS))
