"""When rows of a whole scheduler look for drafts: as soon as they come true, and as soon as a row is new."""

from __future__ import annotations

import random

import pytest

from novainfer.protocol.step import StepResult
from novainfer.sim.oracle import OracleRow
from tests.engine.engine_driver import Driver
from tests.oracle import OracleExecutor

pytestmark = pytest.mark.stage1

STEP = 0.0003  # seconds: so short that a row whose looks are in vain hardly looks at all


class Repeating(OracleExecutor):
    """Its texts repeat themselves: all drafts come true."""

    def _draft(self, index: int, row: OracleRow, result: StepResult, most: int) -> int:
        for _ in range(most):
            block, offset = self._slot(row, row.num_computed)
            self.kv[block][offset] = row.hashes[row.num_computed]
            row.num_computed += 1
            self._sample(index, row, result, is_finite=True)
        return most


def driver_with_short_steps() -> Driver:
    """One that has seen many of them, some with drafts."""
    driver = Driver(
        Repeating(num_blocks=600, max_num_seqs=4, max_model_len=2048, can_draft=True), speculation="prompt-lookup"
    )
    rng = random.Random(5)
    for number in range(400):
        rows, drafted = rng.randrange(1, 17), rng.randrange(4, 12) * (number % 10 == 0)
        seconds = STEP * (1.0 + 0.01 * (rows + drafted))
        driver.engine.scheduler._drafting.pace.observe(seconds, rows, rng.randrange(100, 3000), drafted)
    return driver


def steps_with_drafts(driver: Driver, count: int) -> list[int]:
    """Their numbers, of the next steps."""
    first = len(driver.executor.plans)
    for _ in range(count):
        driver.step()
    return [plan.step for plan in driver.executor.plans[first:] if any(plan.num_drafts)]


def test_given_drafts_that_came_true_when_the_result_is_here_then_the_next_step_has_some() -> None:
    driver = driver_with_short_steps()
    driver.add("one", [1, 2, 3], max_tokens=2000)
    first, *others = steps_with_drafts(driver, 24)
    assert first % 4 == 0, "a new row looks in every fourth step"
    assert others[0] == first + 2, "two steps are in flight"


def test_given_nobody_who_may_have_drafts_when_one_comes_who_may_then_it_looks_at_once() -> None:
    driver = driver_with_short_steps()
    driver.add("penalised", [1, 2, 3], max_tokens=500, frequency_penalty=0.5)
    assert steps_with_drafts(driver, 6) == []
    driver.add("one", [4, 5, 6], max_tokens=500)
    assert steps_with_drafts(driver, 8)
