"""A scheduler dies and another one takes the same workers over: with their KV blocks, and every stream goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.config import CacheConfig, SchedulerConfig, ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.errors import ProtocolError
from novainfer.executor.held_blocks import HeldBlocks
from novainfer.kv.manager import KVCacheManager
from novainfer.kv.prefix_index import IndexChanges, chain_key, root_key
from novainfer.protocol.columns import column
from novainfer.protocol.step import IndexedBlock, StepPlan
from novainfer.sampling.params import SamplingParams
from tests.engine.engine_driver import Driver, make_message
from tests.oracle import OracleExecutor, oracle_stream

pytestmark = pytest.mark.stage1

VOCAB = 50


class HoldingExecutor(OracleExecutor):
    """Keeps the account that rank 0 keeps."""

    def __init__(self, **size: int) -> None:
        super().__init__(**size)
        self.held = HeldBlocks()

    def _apply(self, plan: StepPlan) -> None:
        self.held.apply(plan)
        super()._apply(plan)

    def adopt(self, num_plans: int) -> list[IndexedBlock]:
        """Run so many of the plans that the old scheduler had sent; the others never came."""
        for _ in range(min(num_plans, len(self._queue))):
            self._execute(self._queue.popleft())
        self._queue.clear()
        self.rows.clear()
        return self.held.tell()


class Journals:
    """Drives an engine as gateways do: what was asked for is sent again, with what has come, to each new scheduler."""

    def __init__(self, executor: HoldingExecutor, **scheduler: int) -> None:
        self.executor = executor
        self.driver = Driver(executor, **scheduler)
        self._config = ServeConfig(scheduler=SchedulerConfig(**scheduler), cache=CacheConfig())
        self._asked: dict[str, tuple[list[int], dict[str, int]]] = {}

    def add(self, request_id: str, prompt: list[int], **options: int) -> None:
        self._asked[request_id] = prompt, options
        self.driver.add(request_id, prompt, **options)

    def replace_scheduler(self, num_plans: int) -> None:
        driver = self.driver
        driver.engine = EngineCore(self.executor, self._config, self.executor.adopt(num_plans))
        driver.check_invariants()
        for request_id, (prompt, options) in self._asked.items():
            choices = range(options.get("n", 1))
            if all((request_id, c) in driver.ends for c in choices):
                continue
            emitted = [list(driver.streams[request_id, c]) for c in choices]
            outputs = driver.engine.add(make_message(request_id, prompt, emitted=emitted, **options), now=0.0)
            driver.record([output for output in outputs if (request_id, output.choice) not in driver.ends])
            for c in choices:
                if (request_id, c) in driver.ends:
                    driver.engine.cancel(request_id, c)


def expected(prompt: list[int], *, max_tokens: int, choice: int = 0) -> list[int]:
    return oracle_stream(prompt, SamplingParams(seed=0, max_tokens=max_tokens), choice, set(), VOCAB)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_given_random_requests_when_schedulers_die_at_random_then_every_stream_is_exact(seed: int) -> None:
    """The executor checks each block that is read: a wrong word of the account would show at once."""
    rng = random.Random(seed)
    num_blocks = rng.choice((24, 40, 90))
    executor = HoldingExecutor(
        num_blocks=num_blocks, block_size=rng.choice((1, 4)), max_num_seqs=rng.choice((2, 6)), vocab_size=VOCAB
    )
    journals = Journals(executor, max_num_batched_tokens=rng.choice((8, 64)), max_num_seqs=6)
    wanted: dict[tuple[str, int], list[int]] = {}
    shared = [rng.randrange(VOCAB) for _ in range(8)]
    for death in range(rng.randint(1, 6)):
        for i in range(rng.randint(0, 4)):
            name = f"{death}-{i}"
            prompt = shared[: rng.randint(0, 8)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
            n, max_tokens = rng.choice((1, 1, 3)), rng.randint(1, 9)
            journals.add(name, prompt, n=n, max_tokens=max_tokens)
            wanted |= {(name, c): expected(prompt, max_tokens=max_tokens, choice=c) for c in range(n)}
        for _ in range(rng.randint(0, 9)):
            journals.driver.step()
        journals.driver.engine.submit()
        journals.replace_scheduler(rng.randint(0, 2))
    journals.driver.run()
    assert {key: tokens for key, tokens in journals.driver.streams.items() if tokens} == wanted
    assert journals.driver.engine.scheduler.kv.pool.num_free == num_blocks


def test_given_a_prompt_that_was_computed_when_the_scheduler_is_replaced_then_it_is_not_computed_again() -> None:
    journals = Journals(HoldingExecutor())
    prompt = list(range(21))
    journals.add("a", prompt, max_tokens=12)
    for _ in range(5):
        journals.driver.step()
    emitted = len(journals.driver.streams["a", 0])
    assert emitted > 0
    journals.replace_scheduler(2)
    plan = journals.driver.engine.scheduler.schedule()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens >= 20
    assert sum(plan.num_new_tokens) <= 1 + emitted


def test_given_many_to_send_again_when_the_queue_is_short_then_none_that_was_accepted_is_refused() -> None:
    journals = Journals(HoldingExecutor(), max_num_seqs=2, max_waiting=3)
    for i in range(5):
        journals.add(str(i), [i, 1], max_tokens=3)
    journals.driver.engine = EngineCore(journals.executor, ServeConfig(scheduler=SchedulerConfig(max_waiting=1)))
    engine = journals.driver.engine
    for i in range(5):
        engine.add(make_message(str(i), [i, 1], emitted=[[]], max_tokens=3), now=0.0)
    assert set(engine.scheduler.requests) == {"0", "1", "2", "3", "4"}


def test_given_held_blocks_when_adopted_then_free_ones_are_taken_first_then_the_oldest_chain_from_its_end() -> None:
    root = root_key("tenant")
    first, second = chain_key(root, column([1, 2])), chain_key(root, column([5, 6]))
    held = [
        IndexedBlock(4, root, column([1, 2])),
        IndexedBlock(0, root, column([5, 6])),
        IndexedBlock(3, first, column([3, 4])),
        IndexedBlock(5, second, column([7, 8])),
        IndexedBlock(1, chain_key(first, column([3, 4])), column([9, 9])),
        IndexedBlock(2, root, column([1, 2])),  # the same content twice: the second is of no use
        IndexedBlock(99, root, column([8, 8])),  # more than this scheduler has
    ]
    manager = KVCacheManager(7, 2)
    manager.adopt(held)
    assert len(manager.index) == 5
    # What was not taken over must be forgotten by the ranks as well.
    assert manager.index.take_changes() == IndexChanges([2])
    assert [manager.pool.allocate() for _ in range(7)] == [2, 6, 5, 0, 1, 3, 4]


def plan_with(step: int, **fields: Any) -> StepPlan:
    return StepPlan(1, step, column(), column(), **fields)


def test_given_a_plan_when_what_it_says_of_indexed_blocks_is_not_for_each_then_it_is_refused() -> None:
    key = root_key()
    for indexed, parents, ids in (
        ([1], b"", [5]),
        ([1], key, []),
        ([1, 2], key * 2, [5, 6, 7]),
        ([], key, []),
        ([], b"", [5]),
    ):
        bad = plan_with(1, indexed=column(indexed), indexed_parents=parents, indexed_ids=column(ids))
        with pytest.raises(ProtocolError, match="indexed blocks"):
            bad.indexed_blocks()


def test_given_an_account_when_blocks_leave_and_enter_then_it_is_what_the_index_holds() -> None:
    account = HeldBlocks()
    first, second = root_key("1"), root_key("2")
    one, two = IndexedBlock(1, first, column([1, 2])), IndexedBlock(2, second, column([3, 4]))
    account.apply(
        plan_with(1, indexed=column([1, 2]), indexed_parents=first + second, indexed_ids=column([1, 2, 3, 4]))
    )
    assert account.tell() == [one, two]
    again = IndexedBlock(1, second, column([5, 6]))
    account.apply(plan_with(2, indexed=column([1]), indexed_parents=second, indexed_ids=column([5, 6]), unindexed=[7]))
    assert account.tell() == [two, again]
    account.apply(plan_with(3, unindexed=[2]))
    assert account.tell() == [again]
