"""Grafana's dashboards, written down short; `python deploy/dashboards.py` makes the JSON that the chart ships.

A panel is a title, a unit, what it tells, and queries with their legends. $model and $engine are the dashboard's
variables, $__rate_interval is Grafana's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "helm" / "novainfer" / "dashboards"
MODEL = 'model_name=~"$model"'
ENGINE = f'{MODEL},engine=~"$engine"'
SCHEMA_VERSION = 39
WIDTH, HEIGHT, COLUMNS = 8, 8, 24  # of a panel, and of the grid


@dataclass(frozen=True)
class Panel:
    """queries: PromQL and legend."""

    title: str
    unit: str
    text: str
    queries: tuple[tuple[str, str], ...]


def rate(counter: str, labels: str = "", by: str = "") -> str:
    """Per second, summed up."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}(rate(novainfer_{counter}_total{{{labels}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, labels: str = MODEL, by: str = "le") -> str:
    """Of a histogram of seconds."""
    return (
        f"histogram_quantile({share}, sum by ({by}) (rate(novainfer_{histogram}_bucket{{{labels}}}[$__rate_interval])))"
    )


def quantiles(histogram: str, *shares: float, labels: str = MODEL) -> tuple[tuple[str, str], ...]:
    """One line each."""
    return tuple((quantile(share, histogram, labels), f"p{share * 100:g}") for share in shares)


def per_engine(name: str, of_servers: str = "sum") -> tuple[tuple[str, str], ...]:
    """A gauge, a line for each engine.

    of_servers: what is told of those with the same number in several servers: their sum, or the max or min of them.
    """
    return ((f"{of_servers} by (engine) (novainfer_{name}{{{ENGINE}}})", "engine {{engine}}"),)


API = 'handler=~"/v1/.*|/(de)?tokenize"'  # what clients ask; probes of a server that loads hear 503, and scrapes 200
ERRORS = f'{API},status=~"5.."'
OVERVIEW = (
    Panel(
        "Requests", "reqps", "Generations that ended, by how.", ((rate("requests_ended", by="outcome"), "{{outcome}}"),)
    ),
    Panel(
        "Tokens",
        "none",
        "Tokens per second: prompts taken in, and generated.",
        ((rate("prompt_tokens", MODEL), "prompt"), (rate("generation_tokens", MODEL), "generated")),
    ),
    Panel(
        "Running and waiting",
        "none",
        "Sequences. Waiting ones that do not get fewer: more replicas.",
        (
            (f"sum(novainfer_num_requests_running{{{MODEL}}})", "running"),
            (f"sum(novainfer_num_requests_waiting{{{MODEL}}})", "waiting"),
        ),
    ),
    Panel("Time to first token", "s", "As clients see it.", quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99)),
    Panel("Between tokens", "s", "As clients see it.", quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99)),
    Panel("Whole request", "s", "As clients see it.", quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99)),
    Panel(
        "Where the time goes",
        "s",
        "Median of a choice: waiting, its prompt, its tokens.",
        (
            (quantile(0.5, "request_queue_time_seconds"), "queue"),
            (quantile(0.5, "request_prefill_time_seconds"), "prefill"),
            (quantile(0.5, "request_decode_time_seconds"), "decode"),
        ),
    ),
    Panel("KV cache", "percentunit", "Blocks in use, of each engine.", per_engine("kv_cache_usage_ratio", "max")),
    Panel(
        "Prefix cache",
        "percentunit",
        "Prompt tokens that were found cached.",
        ((f"{rate('prefix_cache_hits', MODEL)} / {rate('prefix_cache_queries', MODEL)}", "found"),),
    ),
    Panel(
        "HTTP answers",
        "reqps",
        "By status.",
        ((rate("http_requests", by="status"), "{{status}}"),),
    ),
    Panel(
        "Errors",
        "percentunit",
        "Answers of the API that say 5xx, of all.",
        ((f"({rate('http_requests', ERRORS)} or vector(0)) / {rate('http_requests', API)}", "5xx"),),
    ),
    Panel(
        "Refused",
        "reqps",
        "Generations that were not let in.",
        ((rate("admission_rejections", by="reason"), "{{reason}}"),),
    ),
)
ENGINES = (
    Panel("Running", "none", "Sequences with a row.", per_engine("num_requests_running")),
    Panel("Waiting", "none", "Sequences without.", per_engine("num_requests_waiting")),
    Panel("KV cache", "percentunit", "Blocks in use.", per_engine("kv_cache_usage_ratio", "max")),
    Panel(
        "Steps", "ops", "Forward passes per second.", ((rate("engine_steps", ENGINE, "engine"), "engine {{engine}}"),)
    ),
    Panel(
        "Tokens generated", "none", "Per second.", ((rate("generation_tokens", ENGINE, "engine"), "engine {{engine}}"),)
    ),
    Panel(
        "Tokens a step",
        "none",
        "How full the batches are.",
        (
            (
                f"{rate('generation_tokens', ENGINE, 'engine')} / {rate('engine_steps', ENGINE, 'engine')}",
                "engine {{engine}}",
            ),
        ),
    ),
    Panel("Queue", "s", "Until the first step.", quantiles("request_queue_time_seconds", 0.5, 0.95, labels=ENGINE)),
    Panel(
        "Prefill",
        "s",
        "First step to first token.",
        quantiles("request_prefill_time_seconds", 0.5, 0.95, labels=ENGINE),
    ),
    Panel("Decode", "s", "First token to last.", quantiles("request_decode_time_seconds", 0.5, 0.95, labels=ENGINE)),
    Panel(
        "Preemptions",
        "ops",
        "Sequences that lost their blocks.",
        ((rate("num_preemptions", ENGINE, "engine"), "engine {{engine}}"),),
    ),
    Panel(
        "Prompt tokens",
        "none",
        "Per second: taken in, and found cached.",
        ((rate("prefix_cache_queries", ENGINE), "in"), (rate("prefix_cache_hits", ENGINE), "cached")),
    ),
    Panel(
        "Guessed tokens",
        "none",
        "Per second, by prompt lookup: tried, and right.",
        (
            (rate("spec_decode_num_draft_tokens", ENGINE), "tried"),
            (rate("spec_decode_num_accepted_tokens", ENGINE), "right"),
        ),
    ),
    Panel(
        "Where requests go",
        "reqps",
        "To each engine, by why it was chosen.",
        ((rate("requests_routed", ENGINE, "engine, reason"), "engine {{engine}}: {{reason}}"),),
    ),
    Panel(
        "Requests' sizes",
        "none",
        "Medians.",
        (
            (quantile(0.5, "request_prompt_tokens"), "prompt"),
            (quantile(0.5, "request_generation_tokens"), "generated"),
            (quantile(0.5, "request_params_max_tokens"), "max_tokens"),
        ),
    ),
    Panel(
        "Time per output token", "s", "A choice's mean.", quantiles("request_time_per_output_token_seconds", 0.5, 0.95)
    ),
)
TENANTS = (
    Panel("Requests", "reqps", "That ended.", ((rate("tenant_requests", by="tenant"), "{{tenant}}"),)),
    Panel("Live", "none", "Generations.", (("sum by (tenant) (novainfer_tenant_live_requests)", "{{tenant}}"),)),
    Panel("Tokens generated", "none", "Per second.", ((rate("tenant_generation_tokens", by="tenant"), "{{tenant}}"),)),
    Panel("Prompt tokens", "none", "Per second.", ((rate("tenant_prompt_tokens", by="tenant"), "{{tenant}}"),)),
    Panel(
        "Share",
        "percentunit",
        "Of all tokens generated.",
        (
            (
                f"{rate('tenant_generation_tokens', by='tenant')} / ignoring(tenant) group_left "
                f"{rate('tenant_generation_tokens')}",
                "{{tenant}}",
            ),
        ),
    ),
    Panel(
        "Refused",
        "reqps",
        "By limit or for lack of room.",
        ((rate("admission_rejections", by="reason"), "{{reason}}"),),
    ),
)
RECOVERY = (
    Panel("Engines that serve", "none", "1: all of its processes are ready.", per_engine("engine_ready", "min")),
    Panel(
        "Replacements",
        "none",
        "Workers or schedulers replaced in the last 5 minutes.",
        ((f"sum by (engine) (changes(novainfer_engine_epoch{{{ENGINE}}}[5m]))", "engine {{engine}}"),),
    ),
    Panel(
        "Live requests",
        "none",
        "In the gateways' journals: what is never lost.",
        (("sum(novainfer_gateway_journal_entries)", "journal"), ("sum(novainfer_gateway_live_requests)", "live")),
    ),
    Panel(
        "Tokens", "none", "Generated per second.", ((rate("generation_tokens", ENGINE, "engine"), "engine {{engine}}"),)
    ),
    Panel(
        "Between tokens", "s", "A pause is in the highest.", quantiles("inter_token_latency_seconds", 0.5, 0.99, 0.999)
    ),
    Panel(
        "Moved",
        "ops",
        "Live requests that went to another engine.",
        ((rate("requests_moved", MODEL, "reason"), "{{reason}}"),),
    ),
    Panel(
        "Without progress",
        "s",
        "Since the engine last ended a step or was idle.",
        per_engine("seconds_since_progress", "max"),
    ),
    Panel(
        "Lost streams",
        "reqps",
        "Requests that failed: 0, whatever dies.",
        ((rate("requests_ended", 'outcome="failed"'), "failed"),),
    ),
    Panel(
        "Faults",
        "ops",
        "Broken messages; text processes replaced.",
        (
            (rate("protocol_errors", MODEL), "protocol"),
            (rate("text_processes_lost", by="reason"), "text process: {{reason}}"),
        ),
    ),
)
DASHBOARDS = {"overview": OVERVIEW, "engine": ENGINES, "tenants": TENANTS, "recovery": RECOVERY}


def variable(name: str, query: str) -> dict[str, Any]:
    """One that lists a label's values, all of them chosen."""
    return {
        "name": name,
        "type": "query",
        "label": name,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 3,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def panel(number: int, one: Panel) -> dict[str, Any]:
    """In Grafana's words."""
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": one.title,
        "description": one.text,
        "datasource": datasource,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": number * WIDTH % COLUMNS, "y": number * WIDTH // COLUMNS * HEIGHT},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": datasource, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(one.queries)
        ],
    }


def dashboard(name: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """In Grafana's words."""
    source = {"name": "datasource", "type": "datasource", "label": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": f"novainfer-{name}",
        "title": f"NovaInfer / {name}",
        "tags": ["novainfer"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["novainfer"], "title": "NovaInfer", "asDropdown": False}],
        "templating": {
            "list": [
                source,
                variable("model", "label_values(novainfer_engine_ready, model_name)"),
                variable("engine", 'label_values(novainfer_engine_ready{model_name=~"$model"}, engine)'),
            ]
        },
        "panels": [panel(number, one) for number, one in enumerate(panels)],
    }


def rendered() -> dict[Path, str]:
    """The files, and what is to be in them."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
