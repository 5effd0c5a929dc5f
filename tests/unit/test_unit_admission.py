"""What a generation holds while it is answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission import Admission, Live, LiveGenerations, Refusals
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.limits import NO_PERMIT, Cost, Limits
from gateway.metrics import GatewayMetrics
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Generations:
    """Stands for a `Generation`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_tokens = 7

    def close(self) -> None:
        self.calls.append("close")

    def expire(self) -> None:
        self.calls.append("expire")


def parts(max_live: int = 1) -> SimpleNamespace:
    limits, metrics = Limits(max_live=max_live), GatewayMetrics("m", ClientView)
    return SimpleNamespace(limits=limits, metrics=metrics, refusals=Refusals(metrics, limits))


def num_rejected(one: SimpleNamespace, reason: str) -> float:
    return float(one.metrics._rejected.labels(reason).value)


def test_given_room_when_held_then_it_is_given_back_at_the_end_and_nothing_is_counted() -> None:
    one, info = parts(), RequestInfo("r")
    with Admission(one.limits, one.refusals, info, Cost()):
        assert one.limits.num_live == 1
        assert info.permit is not NO_PERMIT
    assert one.limits.num_live == 0
    assert not one.limits.is_guarded


def test_given_no_room_when_asked_for_then_the_refusal_is_counted_once_and_the_door_guarded() -> None:
    one = parts()
    with Admission(one.limits, one.refusals, RequestInfo("a"), Cost()):
        refused = RequestInfo("b")
        with pytest.raises(OverloadedError), Admission(one.limits, one.refusals, refused, Cost()):
            raise AssertionError("it was let in")
        assert one.limits.num_live == 1
    assert refused.permit is NO_PERMIT
    assert num_rejected(one, "overloaded") == 1
    assert one.limits.is_guarded


@pytest.mark.parametrize(
    ("error", "reason", "count"),
    [
        (InvalidRequestError("wrong"), "invalid", 1),
        (OverloadedError("full", retry_after=1.0, status=429), "rate_limit", 1),
        (EngineError("broken"), "invalid", 0),
        (asyncio.CancelledError(), "invalid", 0),
    ],
)
def test_given_an_error_inside_when_it_leaves_then_room_is_given_back_and_refusals_are_counted(
    error: BaseException, reason: str, count: int
) -> None:
    one = parts()
    with pytest.raises(type(error)), Admission(one.limits, one.refusals, RequestInfo("r"), Cost()):
        raise error
    assert one.limits.num_live == 0
    assert num_rejected(one, reason) == count


def test_given_generations_of_one_name_when_one_ends_then_the_other_is_still_found() -> None:
    ended: list[Any] = []
    live = LiveGenerations(lambda generation, info: ended.append((generation, info.request_id)))
    first, second = Generations(), Generations()
    info = RequestInfo("same", tenant="t")
    with Live(live, first, "a", info):  # type: ignore[arg-type]
        with Live(live, second, "b", RequestInfo("same", tenant="t")):  # type: ignore[arg-type]
            assert live.find("same", "t") == [first, second]
            assert live.find("b", "t") == [second]
            assert live.find("b", "other") == []
        assert live.find("same", "t") == [first]
        assert (second.calls, ended) == (["close"], [(second, "same")])
    assert len(live) == 0
    assert first.calls == ["close"]


def test_given_a_time_limit_when_it_is_over_then_the_generation_expires_and_not_after_its_end() -> None:
    async def main() -> tuple[list[str], list[str]]:
        live = LiveGenerations(lambda *_: None)
        late, early = Generations(), Generations()
        with Live(live, late, "a", RequestInfo("r", time_limit=0.01)):  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
        with Live(live, early, "a", RequestInfo("r", time_limit=0.01)):  # type: ignore[arg-type]
            pass
        await asyncio.sleep(0.05)
        return late.calls, early.calls

    assert asyncio.run(main()) == (["expire", "close"], ["close"])
