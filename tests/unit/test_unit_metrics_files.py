"""Figures of several gateways as one: added up, going on after a death, never going back."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.foreign_names import renamed
from gateway.metrics_files import MetricsFiles
from novainfer.transport.addresses import RunDir

pytestmark = pytest.mark.unit


class Gateway:
    """Some metrics, and the files."""

    def __init__(self, run_dir: RunDir, index: int, *, is_successor: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.asked = Counter("novainfer_asked", "Help.", ["who"], registry=self.registry)
        self.live = Gauge("novainfer_live", "Help.", registry=self.registry)
        self.times = Histogram("novainfer_times", "Help.", buckets=(1, 2), registry=self.registry)
        self.files = MetricsFiles(run_dir, index, is_successor=is_successor)

    def publish(self) -> None:
        self.files.publish(self.registry.collect())

    def said(self) -> dict[str, float]:
        """What its exposition says, by sample with labels."""
        merged = self.files.merged(self.registry.collect())
        return {f"{s.name}{sorted(s.labels.items())}": s.value for family in merged for s in family.samples}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path / "run"))


def asked(who: str) -> str:
    return f"novainfer_asked_total[('who', '{who}')]"


def test_two_gateways_when_either_is_asked_then_it_tells_of_both(run_dir: RunDir) -> None:
    first, second = Gateway(run_dir, 0), Gateway(run_dir, 1)
    first.asked.labels("a").inc(2)
    second.asked.labels("a").inc(3)
    second.asked.labels("b").inc()
    first.live.set(4)
    second.live.set(1)
    first.times.observe(0.5)
    second.times.observe(1.5)
    for gateway in (first, second):
        gateway.publish()
    assert first.said() == second.said()
    said = first.said()
    assert (said[asked("a")], said[asked("b")], said["novainfer_live[]"]) == (5, 1, 5)
    assert said["novainfer_times_bucket[('le', '1.0')]"] == 1
    assert said["novainfer_times_bucket[('le', '2.0')]"] == said["novainfer_times_count[]"] == 2
    assert not [name for name in said if "created" in name]


def test_a_gateway_when_it_takes_over_from_one_that_died_then_no_counter_goes_back_and_what_was_live_is_not(
    run_dir: RunDir,
) -> None:
    old = Gateway(run_dir, 0)
    old.asked.labels("a").inc(7)
    old.live.set(3)
    old.times.observe(5)
    old.publish()
    new, other = Gateway(run_dir, 0, is_successor=True), Gateway(run_dir, 1)
    new.asked.labels("a").inc()
    new.publish()
    for said in (new.said(), other.said()):
        assert (said[asked("a")], said["novainfer_live[]"], said["novainfer_times_count[]"]) == (8, 0, 1)
    third = Gateway(run_dir, 0, is_successor=True)
    third.publish()
    assert third.said()[asked("a")] == 8


def test_a_gateway_when_it_dies_after_it_was_asked_then_its_successor_does_not_tell_less(run_dir: RunDir) -> None:
    old, other = Gateway(run_dir, 0), Gateway(run_dir, 1)
    other.asked.labels("a").inc(5)
    other.publish()
    old.asked.labels("a").inc(7)
    assert old.said()[asked("a")] == 12
    new = Gateway(run_dir, 0, is_successor=True)
    assert new.said()[asked("a")] == other.said()[asked("a")] == 12


def test_figures_when_they_cannot_be_written_then_they_are_told_and_written_once_they_can_be(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, other = Gateway(run_dir, 0), Gateway(run_dir, 1)
    gateway.asked.labels("a").inc(7)
    in_the_way = run_dir.metrics_file(0).with_suffix(".new")
    for _ in range(2):
        in_the_way.mkdir()
        for _ in range(3):
            gateway.publish()
            gateway.asked.labels("a").inc()
        gateway.publish()
        told = gateway.said()[asked("a")]
        in_the_way.rmdir()
        gateway.publish()
        assert other.said()[asked("a")] == told
    assert told == 13
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "once for each time it fails"


def test_the_first_gateway_of_a_server_when_a_file_lies_there_then_it_is_not_its_own(run_dir: RunDir) -> None:
    old = Gateway(run_dir, 0)
    old.asked.labels("a").inc(7)
    old.publish()
    assert asked("a") not in Gateway(run_dir, 0).said()


def test_figures_when_nothing_has_changed_then_they_are_not_written_again(run_dir: RunDir) -> None:
    gateway = Gateway(run_dir, 0)
    gateway.publish()
    before = run_dir.metrics_file(0).stat().st_mtime_ns
    gateway.publish()
    assert run_dir.metrics_file(0).stat().st_mtime_ns == before
    gateway.live.set(1)
    gateway.publish()
    assert run_dir.metrics_file(0).stat().st_mtime_ns > before


def test_merged_figures_when_written_as_text_then_prometheus_reads_them(run_dir: RunDir) -> None:
    gateway = Gateway(run_dir, 0)
    gateway.times.observe(1.5)

    class Merged(CollectorRegistry):
        def collect(self) -> object:  # type: ignore[override]
            return gateway.files.merged(gateway.registry.collect())

    assert generate_latest(Merged()).count(b"novainfer_times_bucket") == 3


def test_vllms_names_when_wanted_then_of_the_same_figures_with_their_labels() -> None:
    registry = CollectorRegistry()
    Counter("novainfer_choices_finished", "Help.", ["finish_reason"], registry=registry).labels("stop").inc(3)
    Gauge("novainfer_kv_cache_usage_ratio", "Help.", registry=registry).set(0.5)
    Gauge("novainfer_engine_ready", "Help.", registry=registry).set(1)
    found = {s.name: (s.labels, s.value) for family in renamed(registry.collect()) for s in family.samples}
    assert found["vllm:request_success_total"] == ({"finished_reason": "stop"}, 3)
    assert found["vllm:kv_cache_usage_perc"] == ({}, 0.5)
    assert not [name for name in found if "engine_ready" in name]
