"""Time for what can wait, told by what the processors do."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from novainfer.entrypoints.leisure import Leisure

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("idle_per_second", "expected"),
    [(0.0, 60), (0.7, 60), (0.9, 5), (1.9, 5)],
    ids=["busy", "hardly idle", "one idles", "two idle"],
)
def test_given_processors_that_idle_or_not_when_it_is_asked_then_leisure_comes_and_stays(
    idle_per_second: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leisure, now = Leisure(5.0), 1000.0
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(idle=500.0 + idle_per_second * now))
    answers = []
    for tenth in range(620):
        now = 1000.0 + tenth / 10
        answers.append(leisure.has_come(now))
    assert answers == [tenth >= expected * 10 for tenth in range(620)]


def test_given_a_load_that_ends_when_it_is_asked_then_leisure_comes_a_second_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leisure, now = Leisure(5.0), 0.0
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(idle=max(now - 20.0, 0.0)))
    came = next(second for second in range(60) if leisure.has_come(now := float(second)))
    assert came == 21


def test_given_no_delay_when_it_is_asked_then_it_has_come() -> None:
    assert Leisure(0.0).has_come(7.0)
