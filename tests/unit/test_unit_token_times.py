"""When tokens came: counted by the stream's task, and by choices that count for themselves for a while."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.metrics import GatewayMetrics
from gateway.token_times import TokenTimes

pytestmark = pytest.mark.unit


def made() -> tuple[TokenTimes, Any]:
    times = TokenTimes(1, RequestInfo("r"), GatewayMetrics("m", ClientView))
    plain: Any = SimpleNamespace(choice=0, last_at=0.0)
    times.came(0, 1)
    times.begin([plain])
    return times, plain


def test_given_a_choice_that_counts_for_itself_when_settled_then_its_last_token_is_known() -> None:
    times, plain = made()
    before = times.figures()
    plain.last_at = time.perf_counter() + 1.0
    times.settle([plain])
    after = times.figures()
    assert after["first_token_ms"] == before["first_token_ms"]
    assert after["last_token_ms"] == pytest.approx(before["last_token_ms"] + 1000, abs=200)


def test_given_tokens_behind_those_that_it_counted_when_settled_again_then_the_later_ones_stay() -> None:
    times, plain = made()
    times.came(0, 3)
    told = times.figures()
    times.settle([plain])
    assert times.figures() == told


def test_given_no_token_when_figures_are_asked_for_then_they_are_0() -> None:
    times = TokenTimes(2, RequestInfo("r"), GatewayMetrics("m", ClientView))
    times.came(1, 0)
    assert times.figures() == {"first_token_ms": 0.0, "last_token_ms": 0}
