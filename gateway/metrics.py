"""Prometheus metrics of one gateway: its own requests, and the scheduler's figures as last reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.histogram import TokenHistogram
from novainfer.protocol.messages import EngineInfo, EngineStats

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_BETWEEN_TOKENS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
_WHOLE_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica's scheduler as this gateway last heard of it; `engine` is the replica's number."""

    engine: int
    info: EngineInfo | None
    stats: EngineStats | None
    num_protocol_errors: int  # broken messages of it, dropped


Engines = Callable[[], Sequence[EngineView]]


class GatewayMetrics:
    """One registry per application. Label values come from fixed sets, never from a request."""

    def __init__(self, model_name: str, engines: Engines) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, engines))
        self._http = Counter(
            "novainfer_http_requests",
            "HTTP requests by route and status.",
            ["method", "handler", "status"],
            registry=self._registry,
        )
        self._http_counters: dict[tuple[str, str, str], Counter] = {}  # `labels` looks it up under a lock
        self._rejected = Counter(
            "novainfer_admission_rejections", "Generations refused.", ["reason"], registry=self._registry
        )
        self._rejected_counters: dict[int, Counter] = {}
        self._text_processes_lost = Counter(
            "novainfer_text_processes_lost",
            "Text processes killed for their time or as nobody waited for them, or dead, and replaced.",
            ["reason"],
            registry=self._registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_BUCKETS, model_name
        )
        self.between_tokens = TokenHistogram(
            "novainfer_inter_token_latency_seconds",
            "Between the tokens of a choice.",
            _BETWEEN_TOKENS_BUCKETS,
            {"model_name": model_name},
        )
        self._registry.register(self.between_tokens)
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WHOLE_BUCKETS, model_name
        )
        self.live = Gauge("novainfer_gateway_live_requests", "Generations now live.", registry=self._registry)
        self.journal = Gauge(
            "novainfer_gateway_journal_entries", "Requests (one a prompt) in the journal.", registry=self._registry
        )

    def http_request(self, method: str, handler: str, status: int) -> None:
        """Count one answer."""
        self.http_counter(method, handler, status).inc()

    def http_counter(self, method: str, handler: str, status: int) -> Counter:
        """What counts such answers."""
        key = (method if method in _METHODS else "other", handler, str(status))
        counter = self._http_counters.get(key)
        if counter is None:
            counter = self._http_counters[key] = self._http.labels(*key)
        return counter

    def rejected(self, status: int) -> None:
        """Count a generation that was refused for its own fault, for lack of room or by a limit."""
        self.rejected_counter(status).inc()

    def rejected_counter(self, status: int) -> Counter:
        """What counts such generations."""
        counter = self._rejected_counters.get(status)
        if counter is None:
            reason = {429: "rate_limit", 503: "overloaded"}.get(status, "invalid")
            counter = self._rejected_counters[status] = self._rejected.labels(reason)
        return counter

    def text_process_lost(self, reason: str) -> None:
        """Count one: 'time', 'unwanted' or 'died'."""
        self._text_processes_lost.labels(reason).inc()

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], model_name: str) -> Histogram:
        family = Histogram(f"novainfer_{name}", help_text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(model_name)


class _EngineCollector(Collector):
    """Reads the schedulers' last reports when scraped."""

    def __init__(self, model_name: str, engines: Engines) -> None:
        self._model_name = model_name
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for view in self._engines():
            _Exposition(families, [self._model_name, str(view.engine)]).add(view)
        yield from families.values()


class _Exposition:
    """Adds one replica's samples to families that all replicas share."""

    def __init__(self, families: dict[str, Metric], labels: list[str]) -> None:
        self._families = families
        self._labels = labels

    def add(self, view: EngineView) -> None:
        """What the replica says of itself; little before its first report."""
        self._gauge("engine_ready", "1 when the engine takes requests.", bool(view.info and view.info.ready))
        self._counter("protocol_errors", "Broken messages of the engine, dropped.", view.num_protocol_errors)
        stats = view.stats
        if stats is None:
            return
        used = stats.num_blocks - stats.num_free_blocks
        self._gauge("engine_epoch", "Grows with every new start of scheduler or workers.", stats.epoch)
        self._gauge("num_requests_running", "Sequences running.", stats.num_running)
        self._gauge("num_requests_waiting", "Sequences waiting.", stats.num_waiting)
        self._gauge("kv_cache_usage_ratio", "Share of KV blocks in use.", used / max(stats.num_blocks, 1))
        self._gauge(
            "seconds_since_progress", "Seconds since the engine last finished a step or was idle.",
            stats.seconds_since_progress,
        )  # fmt: skip
        self._counter("engine_steps", "Steps of the engine.", stats.step)
        self._counter("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens_total)
        self._counter("generation_tokens", "Tokens sampled.", stats.generation_tokens_total)
        self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens_total)
        self._counter("prefix_cache_hits", "Prompt tokens found cached.", stats.cached_prompt_tokens_total)
        self._counter("num_preemptions", "Sequences preempted.", stats.preemptions_total)
        self._counter("spec_decode_num_draft_tokens", "Tokens guessed by prompt lookup.", stats.drafted_total)
        self._counter("spec_decode_num_accepted_tokens", "Those of them that came true.", stats.drafts_accepted_total)
        self._counter("requests_accepted", "Requests (of one or more choices) accepted.", stats.accepted_total)
        finished = self._family(
            CounterMetricFamily, "choices_finished", "Choices finished, by their finish reason.", ["finish_reason"]
        )
        for reason, count in sorted(stats.finished_total.items()):
            finished.add_metric([*self._labels, reason], count)

    def _gauge(self, name: str, help_text: str, value: float) -> None:
        self._family(GaugeMetricFamily, name, help_text).add_metric(self._labels, value)

    def _counter(self, name: str, help_text: str, value: float) -> None:
        self._family(CounterMetricFamily, name, help_text).add_metric(self._labels, value)

    def _family(self, kind: type[_Family], name: str, help_text: str, labels: Sequence[str] = ()) -> _Family:
        family = self._families.get(name)
        if family is None:
            family = kind(f"novainfer_{name}", help_text, labels=["model_name", "engine", *labels])
            self._families[name] = family
        return cast(_Family, family)
