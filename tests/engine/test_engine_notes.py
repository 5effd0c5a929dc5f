"""What a scheduler notes of a request that asks why it takes its time, with a clock that the test moves."""

from __future__ import annotations

import pytest

from novainfer.protocol.messages import Notes
from novainfer.scheduler.batch import StepOutputs
from tests.engine.engine_driver import Driver, make_message
from tests.oracle import OracleExecutor

pytestmark = pytest.mark.stage1


class Clocked(Driver):
    """A driver that moves its clock by a second with each step; `told` are the notes that came with steps."""

    def __init__(self, executor: OracleExecutor, **scheduler: object) -> None:
        super().__init__(executor, **scheduler)
        self.now = 0.0
        self.told: list[Notes] = []

    def ask(self, request_id: str, prompt: list[int], **options: object) -> None:
        self.record(self.engine.add(make_message(request_id, prompt, explain=True, **options), now=self.now))

    def step(self) -> bool:
        self.now += 1.0
        self.engine.scheduler.expire(self.now)
        self.engine.submit()
        outputs = self.engine.collect(None)
        if outputs is not None:
            self.take(outputs)
        return outputs is not None

    def take(self, outputs: StepOutputs) -> None:
        self.told += outputs.notes
        self.record(outputs.outputs)

    def notes(self, request_id: str, choice: int = 0) -> Notes:
        """Those that came with the end of a choice."""
        (found,) = [
            o.notes for o in self.outputs if (o.request_id, o.choice) == (request_id, choice) and o.finish_reason
        ]
        assert found is not None
        return found


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(length)]


def test_given_a_free_engine_when_asked_then_it_waits_for_nothing_and_its_prompt_takes_one_step() -> None:
    driver = Clocked(OracleExecutor())
    driver.ask("a", prompt_of(11))
    driver.run()
    assert driver.notes("a") == Notes("a", 0, queue_seconds=1.0, prefill_steps=1)
    assert driver.told == [Notes("a", 0, queue_seconds=1.0, prefill_steps=1)]


def test_given_a_request_that_does_not_ask_when_run_then_nothing_is_noted_or_watched() -> None:
    driver = Clocked(OracleExecutor(max_num_seqs=1))
    for name in ("a", "b"):
        driver.add(name, prompt_of(5))
    driver.step()
    assert not driver.engine.scheduler.waiting.waits
    driver.run()
    assert driver.told == []
    assert [output.notes for output in driver.outputs] == [None] * len(driver.outputs)


def test_given_a_long_prompt_when_computed_in_chunks_then_each_step_of_it_counts_and_is_told() -> None:
    driver = Clocked(OracleExecutor(), max_num_batched_tokens=8)
    driver.ask("a", prompt_of(21), max_tokens=4)
    driver.run()
    assert driver.notes("a").prefill_steps == 3
    assert len(driver.told) == 3


def test_given_several_choices_when_run_then_each_has_notes_of_its_own() -> None:
    driver = Clocked(OracleExecutor())
    driver.ask("a", prompt_of(9), n=2)
    driver.run()
    first, second = driver.notes("a", 0), driver.notes("a", 1)
    assert (first.prefill_steps, second.prefill_steps) == (1, 1)
    assert first.queue_seconds <= second.queue_seconds


def test_given_no_free_row_when_asked_then_it_waited_for_rows_as_long_as_the_other_ran() -> None:
    driver = Clocked(OracleExecutor(max_num_seqs=1))
    driver.add("a", prompt_of(5), max_tokens=12)
    driver.step()
    driver.ask("b", prompt_of(6))
    driver.ask("c", prompt_of(7))  # nobody looks at it before it starts
    driver.run()
    assert driver.notes("b").waited_for == driver.notes("c").waited_for == "rows"
    assert 10 <= driver.notes("b").queue_seconds < driver.notes("c").queue_seconds


def test_given_too_few_free_blocks_when_asked_then_it_waited_for_them() -> None:
    driver = Clocked(OracleExecutor(num_blocks=8, block_size=4, max_num_seqs=4))
    driver.add("a", prompt_of(20), max_tokens=10)
    driver.step()
    driver.ask("b", prompt_of(16, 3))
    driver.run()
    assert driver.notes("b").waited_for == "kv_blocks"


def test_given_a_prompt_that_fills_the_steps_when_asked_then_it_waited_for_tokens() -> None:
    driver = Clocked(OracleExecutor(num_blocks=64, block_size=4), max_num_batched_tokens=8)
    driver.add("a", prompt_of(100), max_tokens=2)
    driver.ask("b", prompt_of(6, 3))
    driver.run()
    assert driver.notes("b").waited_for == "tokens"


def test_given_many_grammars_when_they_begin_then_the_last_one_waited_for_its_turn() -> None:
    driver = Clocked(OracleExecutor())
    for name in "abcde":
        driver.ask(name, prompt_of(3), grammar=f"start: {name.upper()}")
    driver.run()
    assert [driver.notes(name).waited_for for name in "abcde"] == ["", "", "", "", "grammar"]  # two steps begin at once


def test_given_a_tenant_with_its_share_of_the_rows_when_asked_then_it_waited_for_its_share_and_others_did_not() -> None:
    driver = Clocked(OracleExecutor(max_num_seqs=2))
    driver.add("b", prompt_of(4), tenant="two", max_tokens=1)
    driver.add("a", prompt_of(5), tenant="one", max_tokens=12)
    for _ in range(3):
        driver.step()
    driver.ask("c", prompt_of(6), tenant="one")
    driver.run()
    assert driver.notes("c").waited_for == "share"


def test_given_preemptions_when_told_then_they_count_with_the_tokens_that_were_computed_again() -> None:
    driver = Clocked(OracleExecutor(num_blocks=9, block_size=4), prefix_caching=False, max_num_seqs=4)
    for i in range(3):
        driver.ask(f"r{i}", prompt_of(6, i), max_tokens=20)
    driver.run()
    computed = sum(sum(plan.num_new_tokens) for plan in driver.executor.plans)
    notes = [driver.notes(f"r{i}") for i in range(3)]
    assert sum(one.preemptions for one in notes) == driver.engine.scheduler.totals.preemptions > 0
    assert (notes[0].preemptions, notes[0].recomputed_tokens) == (0, 0)
    assert sum(one.recomputed_tokens for one in notes) == computed - 3 * (6 + 19) > 0
    assert all(one.prefill_steps == 1 for one in notes)


def test_given_workers_that_are_lost_when_others_come_then_what_they_compute_again_counts() -> None:
    driver = Clocked(OracleExecutor(), prefix_caching=False)
    driver.ask("a", prompt_of(10), max_tokens=12)
    for _ in range(5):
        driver.step()
    lost = driver.engine.scheduler.running[0]
    driver.record(driver.engine.lose_workers(faulted=False))
    known = len(lost.token_ids)
    driver.use(OracleExecutor())
    driver.run()
    notes = driver.notes("a")
    assert known <= notes.recomputed_tokens <= known + 2  # what was in flight counts, too
    assert (notes.queue_seconds, notes.prefill_steps, notes.preemptions) == (1.0, 1, 0)


def test_given_workers_that_are_lost_when_requests_wait_then_they_waited_for_workers_and_not_for_what_was_before() -> (
    None
):
    driver = Clocked(OracleExecutor(max_num_seqs=1))
    driver.add("a", prompt_of(5), max_tokens=30)
    driver.step()
    driver.ask("b", prompt_of(6))
    driver.step()
    driver.record(driver.engine.lose_workers(faulted=False))
    driver.now += 100.0
    driver.engine.scheduler.expire(driver.now)
    driver.use(OracleExecutor())
    driver.run()
    assert driver.notes("b").waited_for == "workers"
    assert driver.notes("b").queue_seconds > 100


def test_given_no_workers_when_a_request_comes_then_it_waited_for_them() -> None:
    driver = Clocked(OracleExecutor())
    driver.record(driver.engine.lose_workers(faulted=False))
    driver.ask("a", prompt_of(6))
    for _ in range(2):
        driver.now += 5.0
        driver.engine.scheduler.expire(driver.now)
    driver.use(OracleExecutor())
    driver.run()
    assert driver.notes("a").waited_for == "workers"


def test_given_a_request_that_goes_on_here_when_told_then_what_was_known_of_it_was_computed_again() -> None:
    driver = Clocked(OracleExecutor())
    whole = Driver(OracleExecutor())
    whole.add("a", prompt_of(10), max_tokens=12)
    whole.run()
    driver.ask("a", prompt_of(10), max_tokens=12, emitted=[whole.streams["a", 0][:5]])
    driver.run()
    assert driver.notes("a").recomputed_tokens == 10 + 5 - 1
    assert driver.notes("a").prefill_steps == 0


def test_given_a_choice_that_is_cancelled_while_it_waits_when_told_then_it_had_no_step_and_is_watched_no_more() -> None:
    driver = Clocked(OracleExecutor(max_num_seqs=1))
    driver.add("a", prompt_of(5), max_tokens=12)
    driver.step()
    driver.ask("b", prompt_of(6))
    for _ in range(3):
        driver.step()
    assert driver.engine.scheduler.waiting.waits
    driver.record(driver.engine.cancel("b"))
    assert not driver.engine.scheduler.waiting.waits
    assert driver.notes("b") == Notes("b", 0, waited_for="rows")
