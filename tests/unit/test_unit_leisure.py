"""Time for what can wait, told by what the processors do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from novainfer.entrypoints.leisure import Leisure

pytestmark = pytest.mark.unit

Processors = Callable[[Callable[[], list[float]]], None]


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Processors:
    """Gives the machine processors whose idle seconds a function tells; this process may use all but the last."""

    def give(idle: Callable[[], list[float]]) -> None:
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(idle=seconds) for seconds in idle()])
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(len(idle()) - 1)))

    return give


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([0.0, 0.0, 1.0], 60), ([0.7, 0.0, 1.0], 60), ([0.1] * 64, 60), ([0.9, 0.0, 0.0], 5), ([0.9] * 65, 5)],
    ids=["busy", "hardly idle", "many that are busy", "one idles", "many idle"],
)
def test_given_processors_that_idle_or_not_when_it_is_asked_then_leisure_comes_and_stays(
    shares: list[float], expected: int, processors: Processors
) -> None:
    leisure, now = Leisure(5.0), 1000.0
    processors(lambda: [500.0 + share * now for share in shares])
    answers = []
    for tenth in range(620):
        now = 1000.0 + tenth / 10
        answers.append(leisure.has_come(now))
    assert answers == [tenth >= expected * 10 for tenth in range(620)]


def test_given_a_load_that_ends_when_it_is_asked_then_leisure_comes_a_second_later(processors: Processors) -> None:
    leisure, now = Leisure(5.0), 100.0
    processors(lambda: [max(now - 120.0, 0.0), 0.0])
    came = next(second for second in range(100, 160) if leisure.has_come(now := float(second)))
    assert came == 121


def test_given_nobody_who_knows_the_processors_when_it_is_asked_then_it_comes_with_the_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(percpu: bool) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "cpu_times", unreadable)
    leisure = Leisure(5.0)
    assert next(second for second in range(100, 160) if leisure.has_come(float(second))) == 105


def test_given_no_delay_when_it_is_asked_then_it_has_come() -> None:
    assert Leisure(0.0).has_come(7.0)
