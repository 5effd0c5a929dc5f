"""Prometheus metrics of one gateway: its own requests. docs/metrics.md lists all that a server exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.engine_metrics import ClientCollector, EngineCollector, View
from gateway.foreign_names import renamed
from gateway.loop_metrics import Count, LoopCounter, LoopHistogram
from gateway.metrics_files import MetricsFiles
from novainfer import __version__

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_BETWEEN_TOKENS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
_WHOLE_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
_MAX_TENANTS = 50  # with series of their own
_OTHERS, _EVERYBODY = "other", "everybody"  # the tenants beyond that; the one of a server without keys

# How a request ends that was begun.
FINISHED, CANCELLED, REFUSED, FAILED = "finished", "cancelled", "refused", "failed"


class GatewayMetrics:
    """One registry per application. Label values come from fixed sets, never from a request."""

    def __init__(
        self, model_name: str, view: View, *, tenants: Iterable[str] = (), foreign_names: str = "none"
    ) -> None:
        """view: of this gateway's client. tenants: who may have series. foreign_names: see `foreign_names`."""
        self._registry = CollectorRegistry()
        self._foreign_names = foreign_names
        self._engines = EngineCollector(model_name, view)
        self._files: MetricsFiles | None = None
        self._tenants = frozenset(sorted(tenants)[:_MAX_TENANTS])
        self._registry.register(ClientCollector(model_name, view))
        self._register_refusals()
        self._register_times(model_name)
        self._register_requests(model_name)

    def _register_refusals(self) -> None:
        self._http = self._counter(
            "http_requests", "HTTP requests by route and status.", ["method", "handler", "status"]
        )
        self._rejected = self._counter("admission_rejections", "Generations refused.", ["reason"])
        for reason in ("invalid", "overloaded", "rate_limit"):  # a series that begins at 1 has no rate
            self._rejected.labels(reason)
        self._text_processes_lost = self._counter(
            "text_processes_lost",
            "Text processes killed for their time or as nobody waited for them, or dead, and replaced.",
            ["reason"],
        )
        for reason in ("time", "unwanted", "died"):
            self._text_processes_lost.labels(reason)

    def _register_times(self, model_name: str) -> None:
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_BUCKETS, model_name
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a choice.", _BETWEEN_TOKENS_BUCKETS, model_name
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Of a choice, from its first token to its last, by the number of those between.",
            _BETWEEN_TOKENS_BUCKETS,
            model_name,
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WHOLE_BUCKETS, model_name
        )

    def _register_requests(self, model_name: str) -> None:
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS, model_name
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", _TOKEN_BUCKETS, model_name
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens",
            "Most tokens that each choice of a request may have.",
            _TOKEN_BUCKETS,
            model_name,
        )
        self._begun = self._counter("requests_begun", "Generations sent to an engine, or taken over.")
        self._ended = self._counter("requests_ended", "Those of them that have ended, by how.", ["outcome"])
        for outcome in (FINISHED, CANCELLED, REFUSED, FAILED):
            self._ended.labels(outcome)
        self._tenant_requests = self._counter("tenant_requests", "Generations of a tenant that have ended.", ["tenant"])
        self._tenant_prompt = self._counter("tenant_prompt_tokens", "Their prompt tokens.", ["tenant"])
        self._tenant_generation = self._counter("tenant_generation_tokens", "Tokens generated for them.", ["tenant"])
        self._begun_count = self._begun.labels()
        self._http_counts: dict[tuple[str, str, int], Count] = {}
        self._tenant_counts: dict[str, tuple[Count, Count, Count]] = {}  # by name
        self.live = Gauge("novainfer_gateway_live_requests", "Generations now live.", registry=self._registry)
        self.journal = Gauge(
            "novainfer_gateway_journal_entries", "Requests (one a prompt) in the journal.", registry=self._registry
        )

    def http_request(self, method: str, handler: str, status: int) -> None:
        """Count one answer."""
        self.http_counter(method, handler, status).inc()

    def http_counter(self, method: str, handler: str, status: int) -> Count:
        """What counts such answers."""
        key = method if method in _METHODS else "other", handler, status
        count = self._http_counts.get(key)
        if count is None:
            count = self._http_counts[key] = self._http.labels(key[0], handler, str(status))
        return count

    def rejected(self, status: int) -> None:
        """Count a generation that was refused for its own fault, for lack of room or by a limit."""
        self.rejected_counter(status).inc()

    def rejected_counter(self, status: int) -> Count:
        """What counts such generations."""
        return self._rejected.labels({429: "rate_limit", 503: "overloaded"}.get(status, "invalid"))

    def text_process_lost(self, reason: str) -> None:
        """Count one: 'time', 'unwanted' or 'died'."""
        self._text_processes_lost.labels(reason).inc()

    def watch_tenants(self, live: Callable[[], Mapping[str, int]]) -> None:
        """live: how many generations each tenant has now."""
        self._registry.register(_TenantsCollector(live, self._name_of))

    def request_begun(self, max_tokens: int) -> None:
        """Count a generation that goes to an engine."""
        self._begun_count.inc()
        self._max_tokens.observe(max_tokens)

    def request_ended(self, tenant: str, outcome: str, *, prompt_tokens: int, generation_tokens: int) -> None:
        """Count its end: `FINISHED`, `CANCELLED`, `REFUSED` or `FAILED`."""
        self._ended.labels(outcome).inc()
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(generation_tokens)
        requests, prompt, generation = self._counts_of(tenant)
        requests.value += 1
        prompt.value += prompt_tokens
        generation.value += generation_tokens

    def _counts_of(self, tenant: str) -> tuple[Count, Count, Count]:
        """Requests, prompt tokens and generated tokens."""
        name = self._name_of(tenant)
        counts = self._tenant_counts.get(name)
        if counts is None:
            requests, prompt = self._tenant_requests.labels(name), self._tenant_prompt.labels(name)
            counts = self._tenant_counts[name] = requests, prompt, self._tenant_generation.labels(name)
        return counts

    def share(self, files: MetricsFiles) -> None:
        """From now on the exposition is that of all gateways that write such files."""
        self._files = files

    def publish(self) -> None:
        """Let the other gateways know how far this one is."""
        if self._files is not None:
            self._files.publish(self._registry.collect())

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes: of the whole server."""
        mine = self._registry.collect()
        families = [
            *(mine if self._files is None else self._files.merged(mine)),
            *self._engines.collect(),
            _build_info(),
        ]
        if self._foreign_names != "none":
            families += renamed(families)
        return generate_latest(_Collected(families))

    def _name_of(self, tenant: str) -> str:
        if not tenant:
            return _EVERYBODY
        return tenant if tenant in self._tenants else _OTHERS

    def _counter(self, name: str, help_text: str, label_names: Sequence[str] = ()) -> LoopCounter:
        counter = LoopCounter(f"novainfer_{name}", help_text, label_names)
        self._registry.register(counter)
        return counter

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float], model_name: str) -> LoopHistogram:
        histogram = LoopHistogram(f"novainfer_{name}", help_text, buckets, {"model_name": model_name})
        self._registry.register(histogram)
        return histogram


class _TenantsCollector(Collector):
    """How many generations each tenant has now."""

    def __init__(self, live: Callable[[], Mapping[str, int]], name_of: Callable[[str], str]) -> None:
        self._live = live
        self._name_of = name_of

    def collect(self) -> Iterable[Metric]:
        """The family, for a scrape."""
        counts: dict[str, int] = {}
        for tenant, count in self._live().items():
            name = self._name_of(tenant)
            counts[name] = counts.get(name, 0) + count
        family = GaugeMetricFamily("novainfer_tenant_live_requests", "Generations now live.", labels=["tenant"])
        for name, count in sorted(counts.items()):
            family.add_metric([name], count)
        yield family


class _Collected(CollectorRegistry):
    """Families that were collected before, for `generate_latest`."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _build_info() -> Metric:
    family = GaugeMetricFamily("novainfer_build_info", "What serves.", labels=["version"])
    family.add_metric([__version__], 1)
    return family
