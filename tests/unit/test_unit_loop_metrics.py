"""The metrics of an event loop say what prometheus-client's own say."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.loop_metrics import LoopCounter, LoopHistogram

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

BUCKETS = (0.001, 0.0025, 0.5, 1, 80)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def test_given_values_of_all_sizes_when_both_histograms_are_scraped_then_they_agree() -> None:
    registry, theirs_registry = CollectorRegistry(), CollectorRegistry()
    ours = LoopHistogram("latency_seconds", "Help.", BUCKETS, {"model_name": 'a "model"'})
    registry.register(ours)
    theirs = Histogram("latency_seconds", "Help.", ["model_name"], buckets=BUCKETS, registry=theirs_registry)
    child = theirs.labels('a "model"')
    assert samples(registry) == samples(theirs_registry)
    rng = random.Random(1)
    for value in (*BUCKETS, 0.0, 1e-9, 1e9, *(2.0 ** rng.randrange(-12, 8) for _ in range(50))):
        count = rng.randrange(1, 4)
        ours.observe(value, count)
        for _ in range(count):
            child.observe(value)
    assert samples(registry) == pytest.approx(samples(theirs_registry))


@pytest.mark.parametrize("label_names", [[], ["outcome"], ["method", "status"]])
def test_given_counts_when_both_counters_are_scraped_then_they_agree(label_names: list[str]) -> None:
    registry, theirs_registry = CollectorRegistry(), CollectorRegistry()
    ours = LoopCounter("requests", 'Help, "quoted".', label_names)
    registry.register(ours)
    theirs = Counter("requests", 'Help, "quoted".', label_names, registry=theirs_registry)
    assert samples(registry) == samples(theirs_registry)
    rng = random.Random(2)
    for _ in range(50):
        values = [rng.choice(["a", 'with "quotes"', ""]) for _ in label_names]
        amount = rng.randrange(3)
        ours.labels(*values).inc(amount)
        (theirs.labels(*values) if values else theirs).inc(amount)
    assert samples(registry) == samples(theirs_registry)
    assert len(samples(registry)) == 3 ** len(label_names)
