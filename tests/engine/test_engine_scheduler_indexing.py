"""Full blocks in the prefix index: a prompt's at once, output's a few at a time, and all when a sequence gives way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from novainfer.executor.held_blocks import HeldBlocks
from novainfer.kv.manager import BlockTable
from novainfer.kv.prefix_index import chain_key, root_key
from novainfer.protocol.columns import column
from novainfer.scheduler.indexing import IndexPace
from novainfer.scheduler.request import Sequence
from tests.engine.engine_driver import Driver
from tests.oracle import OracleExecutor

pytestmark = pytest.mark.stage1

SIZE = 4
PROMPT = list(range(1, 11))  # two full blocks and a half
ROOT = root_key("", "")


def driver_with(*, in_flight: int = 1, **options: int) -> Driver:
    return Driver(OracleExecutor(block_size=SIZE, **options), steps_in_flight=in_flight)


def choices_of(driver: Driver, request_id: str = "a") -> list[Sequence]:
    """With all the tokens that they have got."""
    request = driver.engine.scheduler.requests[request_id]
    driver.engine.scheduler.settle(request)
    return request.sequences


def run_until(driver: Driver, num_confirmed: int) -> Sequence:
    for _ in range(200):
        sequence = choices_of(driver)[0]
        if sequence.num_confirmed_tokens >= num_confirmed:
            return sequence
        driver.step()
    raise AssertionError("it does not get on")


def num_found(driver: Driver, sequence: Sequence) -> int:
    """Blocks that a request finds which goes on where this one is."""
    kv, table = driver.engine.scheduler.kv, BlockTable(ROOT, use_prefix_cache=True)
    num_tokens = kv.attach_prefix(table, sequence.token_ids + column([0]))
    kv.release(table)
    return num_tokens // SIZE


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}, {"ref": 7}])
def test_given_a_stream_when_it_is_generated_then_its_prompt_is_found_at_once_and_its_output_by_fours(
    options: dict[str, int],
) -> None:
    """Whether or not it may be a member of the cohort: without a number at its gateway it may not."""
    driver = driver_with()
    driver.add("a", PROMPT, max_tokens=40, **options)
    found = {}
    for num_confirmed in range(10, 48):
        sequence = run_until(driver, num_confirmed)
        found[sequence.num_confirmed_tokens] = num_found(driver, sequence)
    assert found == {n: 2 if n < 16 else n // 16 * 4 for n in range(10, 48)}


def end(driver: Driver) -> None:
    sequence = choices_of(driver)[0]
    sequence.end_len = len(sequence.token_ids) + 1
    driver.engine.scheduler._rows.cohort.dissolve()
    driver.step()


def cancel(driver: Driver) -> None:
    driver.engine.cancel("a")


def pass_its_deadline(driver: Driver) -> None:
    driver.engine.scheduler.expire(1e9)


def preempt(driver: Driver) -> None:
    driver.engine.scheduler._placement._preempt(choices_of(driver)[0])


@pytest.mark.parametrize("ref", [-1, 7])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("give_way", [end, cancel, pass_its_deadline, preempt])
def test_given_full_blocks_that_were_not_offered_when_the_sequence_gives_way_then_the_next_request_finds_them(
    give_way: Callable[[Driver], None], in_flight: int, ref: int
) -> None:
    driver = driver_with(in_flight=in_flight)
    driver.add("a", PROMPT, max_tokens=100, ref=ref, deadline=1e6)
    sequence = run_until(driver, 30)
    assert num_found(driver, sequence) == 4
    give_way(driver)
    assert not sequence.is_running
    assert num_found(driver, sequence) == 7


def test_given_choices_when_each_ends_then_all_that_it_has_filled_is_found() -> None:
    driver = driver_with()
    driver.add("a", PROMPT, n=3, max_tokens=21, seed=1, ref=0)
    sequences = choices_of(driver)
    driver.step()
    assert num_found(driver, sequences[0]) == 2
    while driver.step():
        pass
    assert [len(sequence.token_ids) for sequence in sequences] == [31, 31, 31]
    assert len({tuple(sequence.token_ids) for sequence in sequences}) > 1
    assert [num_found(driver, sequence) for sequence in sequences] == [7, 7, 7]


def test_given_a_stream_that_is_no_member_any_more_when_its_turn_comes_then_its_blocks_are_offered() -> None:
    driver = driver_with()
    driver.add("a", PROMPT, max_tokens=100, ref=7)
    assert run_until(driver, 26).joined
    driver.engine.scheduler._rows.cohort.dissolve()
    assert num_found(driver, run_until(driver, 31)) == 4
    assert num_found(driver, run_until(driver, 32)) == 8


def test_given_streams_that_come_and_go_when_their_blocks_are_told_then_a_parent_comes_before_its_child() -> None:
    driver, held = driver_with(num_blocks=40), HeldBlocks()
    for i in range(6):
        driver.add(f"r{i}", [i + 1, *PROMPT], max_tokens=30 + 7 * i, ref=i)
    while driver.step():
        for plan in driver.executor.plans:
            held.apply(plan)
            keys = [chain_key(entry.parent, entry.token_ids) for entry in held.tell()]
            for i, entry in enumerate(held.tell()):
                assert entry.parent not in keys[i:]
        driver.executor.plans.clear()
    assert driver.engine.scheduler.totals.preemptions > 0
    index = driver.engine.scheduler.kv.index
    driver.add("last", [49], max_tokens=1)  # whose plan tells of the last ones
    driver.step()
    held.apply(driver.executor.plans[0])
    assert {entry.block for entry in held.tell()} == set(index._by_block)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64, 256])
def test_given_rows_that_begin_together_when_they_have_their_turns_then_often_enough_and_not_all_at_once(
    block_size: int,
) -> None:
    pace = IndexPace(block_size)
    assert pace.num_tokens <= max(64, block_size)
    turns: dict[int, list[int]] = {}
    for row in range(64):
        due = [n for n in range(101, 101 + 3 * pace.num_tokens) if pace.is_due(row, n, 1, prompt_len=100)]
        assert all(n % block_size == 0 for n in due)
        assert [later - n for n, later in pairwise(due)] == [pace.num_tokens] * 2
        turns.setdefault(due[0], []).append(row)
    assert len(turns) == pace.num_blocks
    assert all(row // 8 * 8 + 7 in rows for rows in turns.values() for row in rows)
    assert all(pace.is_due(row, 2 * block_size, 1, 2 * block_size) for row in range(64))  # a prompt's end
    assert all(pace.is_due(row, 2 * block_size + 1, 2, 2) for row in range(64))
