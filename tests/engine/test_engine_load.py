"""Retry-After that is true, and time limits: on the oracle, with a clock that the steps move."""

from __future__ import annotations

import random

import pytest

from novainfer.errors import OverloadedError
from novainfer.protocol.messages import FINISH_ERROR
from novainfer.scheduler.load import LoadMeter
from tests.engine.engine_driver import Driver, make_message
from tests.engine.traffic import STEP_SECONDS, TOKEN_SECONDS, FastOracle
from tests.oracle import OracleExecutor

pytestmark = pytest.mark.stage1


class Clocked(Driver):
    """A driver whose steps take time."""

    def __init__(self, executor: OracleExecutor, **scheduler: float) -> None:
        super().__init__(executor, **scheduler)  # type: ignore[arg-type]
        self.now = 100.0

    def turn(self) -> bool:
        self.record(self.engine.scheduler.expire(self.now))
        self.engine.submit()
        if not self.executor._queue:
            return False
        self.now += STEP_SECONDS + TOKEN_SECONDS * sum(self.executor._queue[0].num_new_tokens)
        outputs = self.engine.collect(None)
        assert outputs is not None
        self.record(outputs.outputs)
        return True


def waiting_seconds(driver: Clocked) -> float:
    """How long it takes until all that waits now has started."""
    waiting = [s for r in driver.engine.scheduler.requests.values() for s in r.sequences if not s.is_running]
    began = driver.now
    while any(not sequence.is_running and not sequence.finished for sequence in waiting):
        assert driver.turn()
    return driver.now - began


def overloaded(seed: int) -> list[tuple[float, float]]:
    """(Retry-After, truth) of refusals under one kind of traffic."""
    rng = random.Random(seed)
    rows = rng.choice([4, 16, 32])
    executor = FastOracle(num_blocks=4000, block_size=16, max_model_len=4096, max_num_seqs=rows)
    limits = {"max_num_seqs": rows, "max_waiting": rng.choice([20, 60]), "max_num_batched_tokens": 1024}
    driver = Clocked(executor, **limits)
    lengths = rng.choice([(20, 100), (400, 30), (200, 200)])
    stops = rng.choice([(), (0, 1)])  # one token in 25 ends an answer, long before its max_tokens
    found: list[tuple[float, float]] = []
    number = 0
    while len(found) < 12:
        try:
            prompt = [(number * 31 + 7 * i) % 50 for i in range(rng.randrange(10, 2 * lengths[0]))]
            prompt[:3] = [number % 50, number // 50 % 50, 3]
            message = make_message(
                str(number), prompt, max_tokens=rng.randrange(10, 2 * lengths[1]), stop_token_ids=stops
            )
            number += 1
            driver.engine.add(message, driver.now)
        except OverloadedError as error:
            if number > 200:
                found.append((error.retry_after, waiting_seconds(driver)))
            else:
                driver.turn()
    return found


def test_given_a_full_queue_when_refused_then_retry_after_is_within_twice_the_truth_in_nine_of_ten_cases() -> None:
    pairs = [pair for seed in range(6) for pair in overloaded(seed)]
    assert len(pairs) == 72
    true = sum(truth / 2 <= told <= truth * 2 for told, truth in pairs)
    assert true >= 0.9 * len(pairs), sorted(round(told / truth, 2) for told, truth in pairs)


def test_given_idle_time_when_the_rate_is_measured_then_it_does_not_count() -> None:
    load = LoadMeter()
    assert load.seconds_for(100) is None
    load.tick(0.0, busy=False)
    for second in range(1, 4):
        load.tick(float(second), busy=True)
        load.done(100)
    rate = load.seconds_for(100)
    load.tick(1000.0, busy=False)
    assert load.seconds_for(100) == rate == pytest.approx(1.0, rel=0.2)
    for _ in range(400):
        load.ended(10, 100)
    assert load.seconds_for(100) == pytest.approx(0.1, rel=0.3)


def test_given_a_queue_timeout_when_a_request_has_no_step_then_it_is_refused_and_forgotten() -> None:
    driver = Clocked(OracleExecutor(max_num_seqs=1), max_num_seqs=1, queue_timeout=5.0)
    for name, at in (("runs", 0.0), ("late", 1.0), ("later", 3.0)):
        driver.engine.add(make_message(name, [1, 2, 3], max_tokens=100, n=1 + (name == "late")), at)
    driver.turn()
    scheduler = driver.engine.scheduler
    assert scheduler.give_up_waiting(5.9) == []
    (refused,) = scheduler.give_up_waiting(6.0)
    assert (refused.request_id, refused.status) == ("late", 503)
    assert refused.retry_after > 0
    assert "queue" in refused.message
    assert set(scheduler.requests) == {"runs", "later"}
    assert [r.request_id for r in scheduler.give_up_waiting(1000.0)] == ["later"]
    driver.run()
    assert driver.ends == {("runs", 0): "length"}
    assert not scheduler._not_begun


def test_given_no_queue_timeout_when_a_request_waits_for_hours_then_it_stays() -> None:
    driver = Driver(OracleExecutor(max_num_seqs=1), max_num_seqs=1, queue_timeout=0)
    for i in range(2):
        driver.add(str(i), [1, 2, 3])
    driver.step()
    assert driver.engine.scheduler.give_up_waiting(1e9) == []
    driver.run()
    assert len(driver.ends) == 2


def test_given_deadlines_when_they_pass_then_the_message_names_the_stage() -> None:
    driver = Driver(OracleExecutor(max_num_seqs=1), max_num_seqs=1)
    for i in range(2):
        driver.add(str(i), [1, 2, 3], max_tokens=100, deadline=4.0)
    driver.step()
    ends = driver.engine.scheduler.expire(4.0)
    driver.record(ends)
    assert [end.finish_reason for end in ends] == [FINISH_ERROR] * 2
    assert ["queue" in (end.error or "") for end in ends] == [False, True]
    assert all("time limit passed" in (end.error or "") for end in ends)
