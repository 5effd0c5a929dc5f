"""Where full steps take long, prompts that come together do not all wait for the same one. On the oracle."""

from __future__ import annotations

import random

import pytest

from novainfer.protocol.step import StepPlan
from novainfer.sampling.params import SamplingParams
from tests.engine.engine_driver import Driver
from tests.oracle import OracleExecutor, oracle_stream

pytestmark = pytest.mark.stage1

BUDGET = 64


def driver_with(seconds_per_token: float, budget: int = BUDGET) -> Driver:
    """One that has seen steps that took so long."""
    num_seqs = min(16, budget)
    driver = Driver(
        OracleExecutor(num_blocks=400, max_num_seqs=num_seqs),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        steps_in_flight=1,
        prefix_caching=False,
    )
    pace = driver.engine.scheduler._drafting.pace
    for tokens in range(1, 50):
        pace.observe(seconds_per_token * tokens, tokens, 100)
    return driver


def prompt_of(length: int, start: int) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(length)]


def plans_of(driver: Driver, lengths: list[int]) -> list[list[int]]:
    """The tokens of each step's prompt chunks, until all have begun to decode."""
    for number, length in enumerate(lengths):
        driver.add(f"r{number}", prompt_of(length, number), max_tokens=60)
    chunks = []
    while any(not driver.streams[f"r{number}", 0] for number in range(len(lengths))):
        assert driver.engine.submit() == 1
        plan: StepPlan = driver.executor._queue[0]
        assert sum(plan.num_new_tokens) <= BUDGET
        chunks.append([count for count in plan.num_new_tokens if count > 1])
        driver.step()
    return chunks


def test_given_long_steps_when_prompts_come_together_then_a_step_with_the_end_of_one_is_a_quarter_full() -> None:
    assert plans_of(driver_with(0.005), [4] * 12) == [[4] * 4] * 3


def test_given_long_steps_when_a_prompt_is_alone_then_its_steps_are_full() -> None:
    assert plans_of(driver_with(0.01), [3 * BUDGET]) == [[BUDGET]] * 3


def test_given_long_steps_when_a_prompt_ends_then_the_next_one_gets_the_rest_of_a_quarter() -> None:
    chunks = plans_of(driver_with(0.005), [BUDGET + 10, BUDGET // 2])
    assert chunks == [[BUDGET], [10, BUDGET // 4 - 10], [BUDGET // 4 + 10]]


def test_given_long_steps_when_one_prompt_is_more_than_a_quarter_of_a_step_then_it_is_not_cut() -> None:
    assert plans_of(driver_with(0.005), [BUDGET - 34, BUDGET - 34]) == [[BUDGET - 34], [BUDGET - 34]]


@pytest.mark.parametrize(
    ("seconds_per_token", "beside"),
    [(0.0001, BUDGET - 1), (0.01, 0.2 / 0.01 - 1), (0.1, BUDGET // 8)],
    ids=["short", "long", "so long that nothing is short enough"],
)
def test_given_a_stream_when_a_prompt_comes_then_its_chunks_do_not_make_the_stream_pause_for_long(
    seconds_per_token: float, beside: float
) -> None:
    driver = driver_with(seconds_per_token)
    driver.add("stream", prompt_of(4, 1), max_tokens=60)
    while not driver.streams["stream", 0]:
        driver.step()
    chunks = [sum(step) for step in plans_of(driver, [3 * BUDGET])]
    assert sum(chunks) == 3 * BUDGET
    assert chunks[:-1] == [pytest.approx(beside, abs=1)] * (len(chunks) - 1), "but for what is learnt inexactly"


def test_given_many_streams_with_long_steps_when_a_prompt_comes_then_a_step_is_three_times_as_long_at_most() -> None:
    driver = driver_with(0.01)
    for number in range(10):
        driver.add(f"s{number}", prompt_of(4, number), max_tokens=60)
    while not all(driver.streams[f"s{number}", 0] for number in range(10)):
        driver.step()
    (first, *_) = plans_of(driver, [3 * BUDGET])
    assert sum(first) == pytest.approx(3 * 10 - 10, abs=2), "but for what makes the step's blocks whole"


@pytest.mark.parametrize("num_streams", range(1, 9))
def test_given_streams_with_long_steps_when_a_prompt_comes_then_its_chunks_fill_the_blocks_of_kernels(
    num_streams: int,
) -> None:
    driver = driver_with(0.007)
    for number in range(num_streams):
        driver.add(f"s{number}", prompt_of(4, number), max_tokens=60)
    while not all(driver.streams[f"s{number}", 0] for number in range(num_streams)):
        driver.step()
    totals = [num_streams + sum(chunks) for chunks in plans_of(driver, [2 * BUDGET])[:-1]]
    assert len(totals) > 1
    assert all(total % 4 == 0 for total in totals)


@pytest.mark.parametrize("special", [None, 0])
def test_given_long_contexts_when_a_prompt_comes_then_each_counts_once_whatever_its_stream_is_told(
    special: int | None,
) -> None:
    driver = driver_with(0.004)
    scheduler, rng = driver.engine.scheduler, random.Random(7)
    for _ in range(400):
        tokens, context = rng.randrange(1, 50), rng.randrange(1, 600)
        scheduler._drafting.pace.observe(0.004 * tokens + 0.00015 * context, tokens, context)
    for number in range(4):
        driver.add(f"s{number}", prompt_of(40, number), max_tokens=60, logprobs=special if number == 3 else None)
    while not all(driver.streams[f"s{number}", 0] for number in range(4)):
        driver.step()
    context = sum(scheduler._rows.cohort.num_computed(sequence) for sequence in scheduler.running)
    ((chunk,), *_) = plans_of(driver, [BUDGET])
    assert chunk == pytest.approx((0.2 - 0.00015 * (context + 4) - 0.004 * 4) / 0.004, abs=2)


def test_given_a_stream_and_slow_small_steps_when_a_prompt_comes_then_it_gets_on() -> None:
    driver = driver_with(0.1, budget=4)
    driver.add("stream", prompt_of(4, 1), max_tokens=60)
    while not driver.streams["stream", 0]:
        driver.step()
    driver.add("prompt", prompt_of(10, 2), max_tokens=1)
    for _ in range(12):
        driver.step()
    assert driver.streams["prompt", 0], "an eighth of so few tokens is less than one"


def test_given_short_steps_when_prompts_come_together_then_they_share_one() -> None:
    assert plans_of(driver_with(0.0001), [8] * 8) == [[8] * 8]


def test_given_long_steps_when_all_are_done_then_every_stream_is_what_it_is_alone() -> None:
    driver = driver_with(0.01)
    lengths = [8, 70, 8, 33, 64, 20, 150]
    plans_of(driver, lengths)
    driver.run()
    for number, length in enumerate(lengths):
        want = oracle_stream(prompt_of(length, number), SamplingParams(seed=0, max_tokens=60), 0, set(), 50)
        assert driver.streams[f"r{number}", 0] == want


def test_given_a_step_that_nobody_needed_when_its_result_is_taken_much_later_then_steps_do_not_count_as_long() -> None:
    driver = Driver(OracleExecutor(num_blocks=400, max_num_seqs=16), max_num_seqs=16, steps_in_flight=2)
    scheduler, left = driver.engine.scheduler, 0
    scheduler.now = 0.0
    for number in range(12):
        driver.add(f"r{number}", prompt_of(20, number), max_tokens=10, stop_token_ids=list(range(15)))
        while f"r{number}" in scheduler.requests:
            scheduler.now += 0.001
            driver.step()
        left += scheduler.num_in_flight
        scheduler.now += 100.0  # nobody asks until the next request
    assert left > 4, "a stop token is seen when the next step is out"
    assert 0 < scheduler._drafting.pace.step_seconds(1, 30) < 0.01
