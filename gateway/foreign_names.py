"""Our figures under vLLM's names, for dashboards, autoscalers and routers that read those (`--metrics-compat vllm`).

Only names with the same meaning and unit. They hold a colon, which is for recording rules: off by default.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

_OURS = "novainfer_"
_THEIRS = "vllm:"
_SAME = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "cache_config_info",
    }
)
_OTHER = {"kv_cache_usage_ratio": "kv_cache_usage_perc", "choices_finished": "request_success"}
_LABELS = {"choices_finished": {"finish_reason": "finished_reason"}}


def renamed(families: Iterable[Metric]) -> list[Metric]:
    """Of families, those that vLLM has too, under its names."""
    found = []
    for family in families:
        name = family.name.removeprefix(_OURS)
        theirs = name if name in _SAME else _OTHER.get(name)
        if theirs is None:
            continue
        labels = _LABELS.get(name, {})
        copy = Metric(f"{_THEIRS}{theirs}", family.documentation, family.type)
        for sample in family.samples:
            ending = sample.name.removeprefix(family.name)
            renamed_labels = {labels.get(label, label): value for label, value in sample.labels.items()}
            copy.add_sample(f"{_THEIRS}{theirs}{ending}", renamed_labels, sample.value)
        found.append(copy)
    return found
