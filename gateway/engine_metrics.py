"""What the schedulers report of themselves, and what this gateway's client counts of each, as Prometheus families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from novainfer.client.engine_client import DRAINED, LOST
from novainfer.protocol.messages import TIME_BUCKETS, EngineInfo, EngineStats, Spread

_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)
_BOUNDS = [*map(floatToGoString, TIME_BUCKETS), "+Inf"]


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica's scheduler as this gateway last heard of it; `engine` is the replica's number."""

    engine: int
    info: EngineInfo | None
    stats: EngineStats | None
    num_protocol_errors: int = 0  # broken messages of it, dropped
    num_tokens_received: int = 0


@dataclass(frozen=True, slots=True)
class ClientView:
    """What one gateway's client has counted since its start. moved: by why; routed: by replica, and how chosen."""

    engines: Sequence[EngineView] = ()
    moved: Mapping[str, int] = field(default_factory=Counter)
    routed: Mapping[tuple[int, str], int] = field(default_factory=Counter)


View = Callable[[], ClientView]


class ClientCollector(Collector):
    """Counted in this gateway: the server's figure is the sum over its gateways."""

    def __init__(self, model_name: str, view: View) -> None:
        self._model_name = model_name
        self._view = view
        self._seen: dict[int, EngineView] = {}  # also replicas that have gone: counters do not go back

    def collect(self) -> Iterator[Metric]:
        """The families, for a scrape."""
        view = self._view()
        self._seen |= {one.engine: one for one in view.engines}
        labels = ["model_name", "engine"]
        errors = CounterMetricFamily(
            "novainfer_protocol_errors", "Broken messages of the engine, dropped.", labels=labels
        )
        received = CounterMetricFamily(
            "novainfer_gateway_tokens_received", "Generated tokens that gateways got from the engine.", labels=labels
        )
        routed = CounterMetricFamily(
            "novainfer_requests_routed",
            "Requests sent to the engine, by why it was chosen.",
            labels=[*labels, "reason"],
        )
        moved = CounterMetricFamily(
            "novainfer_requests_moved", "Live requests that went on in another engine.", labels=["model_name", "reason"]
        )
        for number, one in sorted(self._seen.items()):
            errors.add_metric([self._model_name, str(number)], one.num_protocol_errors)
            received.add_metric([self._model_name, str(number)], one.num_tokens_received)
        for (number, how), count in sorted(view.routed.items()):
            routed.add_metric([self._model_name, str(number), how], count)
        for why in (DRAINED, LOST):
            moved.add_metric([self._model_name, why], view.moved.get(why, 0))
        yield from (errors, received, routed, moved)


class EngineCollector(Collector):
    """The schedulers' last reports: every gateway has the same."""

    def __init__(self, model_name: str, view: View) -> None:
        self._model_name = model_name
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """The families, for a scrape."""
        families: dict[str, Metric] = {}
        for view in self._view().engines:
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
        if view.info is not None and view.info.num_blocks:
            self._info(view.info)
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
        self._counter("choices_accepted", "Choices of accepted requests.", stats.choices_accepted_total)
        finished = self._family(
            CounterMetricFamily, "choices_finished", "Choices finished, by their finish reason.", ["finish_reason"]
        )
        for reason, count in sorted(stats.finished_total.items()):
            finished.add_metric([*self._labels, reason], count)
        self._histogram("request_queue_time_seconds", "From acceptance to the first step.", stats.queue_time)
        self._histogram("request_prefill_time_seconds", "From the first step to the first token.", stats.prefill_time)
        self._histogram("request_decode_time_seconds", "From the first token to the last.", stats.decode_time)
        self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", stats.inference_time
        )

    def _info(self, info: EngineInfo) -> None:
        labels = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks), "mode": info.mode}
        family = self._family(
            GaugeMetricFamily, "cache_config_info", "The KV cache, and how the engine computes.", [*labels]
        )
        family.add_metric([*self._labels, *labels.values()], 1)

    def _histogram(self, name: str, help_text: str, spread: Spread) -> None:
        below = list(zip(_BOUNDS, accumulate(spread.counts), strict=True))
        self._family(HistogramMetricFamily, name, help_text).add_metric(self._labels, below, spread.total)

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
