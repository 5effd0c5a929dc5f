"""`bench.kernels`: two builds of the kernels in turns."""

from __future__ import annotations

import pytest

from bench import kernels as bench
from bench.kernels import Case
from kernels.cpu_backend import CpuBackend
from kernels.native.build import library_path
from kernels.native.library import NativeLibrary

pytestmark = pytest.mark.stage0


def test_given_two_builds_when_compared_then_they_take_turns_and_each_case_has_both_rates() -> None:
    order: list[str] = []

    def cases(name: str) -> list[Case]:
        return [
            Case("one", [lambda: order.append(name)] * 2, 1.0, "GB/s"),
            Case("two", [lambda: order.append("two")], 3.0, "M/s"),
        ]

    results = bench.compare(cases("ours"), cases("other"), rounds=2)
    assert order[:4] == ["ours", "ours", "other", "other"]  # once each, not counted
    turns = ["ours", "ours", "other", "other", "other", "other", "ours", "ours"]
    assert order[4:12] == turns
    assert [(entry["case"], entry["unit"]) for entry in results] == [("one", "GB/s"), ("two", "M/s")]
    assert all(entry["ratio"] == pytest.approx(entry["ours"] / entry["other"], abs=1e-3) for entry in results)


def test_given_another_file_of_the_same_kernels_when_all_cases_run_then_each_has_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_COLD_BYTES", 13_000_000)
    isa = CpuBackend().isa
    assert isa is not None
    other = CpuBackend(library=NativeLibrary(isa, library_path(isa)))
    for case in bench.cases(other):
        assert case.calls
        assert case.rate() > 0
