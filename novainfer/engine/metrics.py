"""The engine as gateways know it, and the scheduler's figures as one record, for the gateways' metrics and health."""

from __future__ import annotations

from novainfer.config import SchedulerConfig
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.messages import EngineInfo, EngineStats
from novainfer.scheduler.scheduler import Scheduler


def describe(info: ExecutorInfo, epoch: int, config: SchedulerConfig) -> EngineInfo:
    """An engine whose workers are ready."""
    return EngineInfo(
        epoch=epoch,
        ready=True,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=min(info.max_num_seqs, config.max_num_seqs),
        mode=info.mode,
        hidden_size=info.hidden_size,
        max_num_batched_tokens=config.max_num_batched_tokens or info.max_num_batched_tokens,
    )


def collect_stats(scheduler: Scheduler, epoch: int, seconds_since_progress: float) -> EngineStats:
    """Gauges now, totals since start. `seconds_since_progress`: 0 when idle."""
    totals = scheduler.totals
    return EngineStats(
        epoch=epoch,
        step=scheduler.step,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=scheduler.kv.pool.num_blocks,
        num_free_blocks=scheduler.kv.pool.num_free,
        accepted_total=totals.accepted,
        finished_total=totals.by_reason,
        prompt_tokens_total=totals.prompt_tokens,
        cached_prompt_tokens_total=totals.cached_prompt_tokens,
        generation_tokens_total=totals.generation_tokens,
        preemptions_total=totals.preemptions,
        drafted_total=totals.drafted,
        drafts_accepted_total=totals.drafts_accepted,
        seconds_since_progress=seconds_since_progress,
        queue_seconds=scheduler.queue_seconds,
        choices_accepted_total=totals.choices_accepted,
        queue_time=scheduler.timing.queue,
        prefill_time=scheduler.timing.prefill,
        decode_time=scheduler.timing.decode,
        inference_time=scheduler.timing.inference,
    )
