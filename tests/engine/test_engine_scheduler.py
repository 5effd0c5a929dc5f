"""The scheduler on the oracle executor: what clients get, who runs when, and that nothing is left behind."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.errors import EngineError, InvalidRequestError, OverloadedError
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.protocol.columns import column
from novainfer.protocol.messages import Logprobs, TokenOutput
from novainfer.protocol.step import GIVEN_UP, NOT_FOLLOWED, RULED_OUT, WORKER_SCHEMA, RowPromptLogprobs, StepResult
from novainfer.sampling.params import SamplingParams
from novainfer.scheduler.batch import StepOutputs
from novainfer.scheduler.request import Request, Sequence
from tests.engine.engine_driver import Driver, make_message
from tests.oracle import OracleExecutor, oracle_stream

pytestmark = pytest.mark.stage1


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(length)]


def expected(prompt: list[int], choice: int = 0, stops: tuple[int, ...] = (), **options: object) -> list[int]:
    params = SamplingParams(**{"seed": 0, "max_tokens": 8, **options})  # type: ignore[arg-type]
    return oracle_stream(prompt, params, choice, set(stops), 50)


def assert_clean(driver: Driver) -> None:
    scheduler = driver.engine.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not scheduler.requests
    assert not scheduler.running
    assert len(scheduler.waiting) == 0


def test_given_one_request_when_run_then_its_tokens_are_the_oracle_s() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(11))
    driver.run()
    assert driver.streams["a", 0] == expected(prompt_of(11))
    assert driver.ends["a", 0] == "length"
    assert_clean(driver)


def test_given_many_grammars_when_they_start_then_each_step_begins_few_of_them_but_any_number_of_rows() -> None:
    driver = Driver(OracleExecutor(max_num_seqs=16))
    for name, grammar in {"a": "start: A", "b": "start: B", "c": "start: C", "d": "start: D", "e": "start: A"}.items():
        driver.add(name, prompt_of(3), n=2, grammar=grammar)
    driver.add("f", prompt_of(3))
    driver.run()
    started = [[(row.params.grammar, row.choice) for row in plan.new_rows] for plan in driver.executor.plans]
    # The second choices start behind the first ones' prompt: their grammars are there, and count no more.
    assert started[0] == [("start: A", 0), ("start: B", 0)]
    assert started[1] == [*((f"start: {x}", i) for x, i in (("A", 1), ("B", 1), ("C", 0), ("D", 0), ("A", 0))), ("", 0)]
    assert started[2] == [("start: C", 1), ("start: D", 1), ("start: A", 1)]
    assert set(driver.ends) == {(name, choice) for name in "abcde" for choice in range(2)} | {("f", 0)}
    assert_clean(driver)


def test_given_two_steps_in_flight_when_decoding_then_plans_are_empty_deltas() -> None:
    driver = Driver(OracleExecutor(block_size=16))
    driver.add("a", prompt_of(3))
    driver.run()
    steady = driver.executor.plans[2]
    assert (steady.rows, steady.num_new_tokens) == (column([0]), column([1]))
    assert [steady.new_rows, steady.freed_rows, steady.copy_src] == [[], [], []]
    assert [steady.grown_rows, steady.grown_blocks, steady.indexed] == [column()] * 3


def test_given_a_stop_token_when_sampled_then_the_choice_ends_with_it() -> None:
    stream = expected(prompt_of(5), max_tokens=30)
    stop = stream[4]
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(5), max_tokens=30, stop_token_ids=(stop,))
    driver.run()
    first = stream.index(stop)
    assert driver.streams["a", 0] == stream[: first + 1]
    assert driver.ends["a", 0] == "stop"
    assert driver.outputs[-1].stop_token_id == stop
    assert_clean(driver)


def test_given_eos_when_ignored_then_generation_goes_on() -> None:
    stream = expected(prompt_of(5))
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(5), ignore_eos=True, eos_token_ids=[stream[2]])
    driver.add("b", prompt_of(5), eos_token_ids=[stream[2]])
    driver.run()
    assert driver.streams["a", 0] == stream
    assert driver.streams["b", 0] == stream[: stream.index(stream[2]) + 1]


@pytest.mark.parametrize("budget", [8, 9, 16, 64])
def test_given_any_token_budget_when_run_then_the_same_tokens(budget: int) -> None:
    driver = Driver(OracleExecutor(), max_num_batched_tokens=budget, max_num_seqs=8)
    prompts = {f"r{i}": prompt_of(5 * i + 1, i) for i in range(6)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.run()
    assert all(sum(plan.num_new_tokens) <= budget for plan in driver.executor.plans)
    for name, prompt in prompts.items():
        assert driver.streams[name, 0] == expected(prompt)
    assert_clean(driver)


def test_given_a_long_prompt_when_others_decode_then_every_step_holds_their_tokens() -> None:
    driver = Driver(OracleExecutor(), max_num_batched_tokens=8, max_num_seqs=4)
    driver.add("short", prompt_of(2), max_tokens=12)
    driver.step()
    driver.add("long", prompt_of(60, 3))
    driver.run()
    chunks = [plan for plan in driver.executor.plans if max(plan.num_new_tokens) > 1 and plan.step > 1]
    assert chunks[1].rows == column([0, 1])
    assert chunks[1].num_new_tokens == column([1, 7])


def test_given_n_choices_when_run_then_prompt_blocks_are_shared_and_each_choice_is_its_own_stream() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(10), n=3)
    driver.step()
    driver.step()
    blocks = {s.choice: s.table.blocks for s in driver.engine.scheduler.running}
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
    assert len({blocks[c][2] for c in range(3)}) == 3
    driver.run()
    for choice in range(3):
        assert driver.streams["a", choice] == expected(prompt_of(10), choice)
    computed = sum(sum(plan.num_new_tokens) for plan in driver.executor.plans)
    assert computed == 10 + 2 + 3 * 7  # the prompt once, its last token for each fork, then decodes
    assert_clean(driver)


def test_given_a_leader_that_ends_at_once_when_n_is_three_then_the_others_still_run() -> None:
    first = expected(prompt_of(9))[0]
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(9), n=3, stop_token_ids=(first,))
    driver.run()
    for choice in range(3):
        assert driver.streams["a", choice] == expected(prompt_of(9), choice, stops=(first,))
    assert_clean(driver)


def test_given_an_equal_prompt_when_cached_then_only_the_rest_is_computed() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(12))
    driver.run()
    driver.add("b", [*prompt_of(12), 5])
    driver.run()
    new_row = next(row for plan in driver.executor.plans for row in plan.new_rows if len(row.token_ids) == 13)
    assert new_row.num_computed_tokens == 12
    assert [o.num_cached_tokens for o in driver.outputs if o.request_id == "b"][-1] == 12
    assert driver.streams["b", 0] == expected([*prompt_of(12), 5])


def test_given_a_prompt_of_whole_blocks_when_cached_then_the_last_block_is_computed() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(12))
    driver.run()
    driver.add("b", prompt_of(12))
    driver.run()
    rows = [row for plan in driver.executor.plans for row in plan.new_rows]
    assert rows[1].num_computed_tokens == 8
    assert driver.streams["b", 0] == driver.streams["a", 0]


@pytest.mark.parametrize(
    "options", [{"use_prefix_cache": False}, {"cache_salt": "x"}, {"tenant": "t2"}, {"prompt_logprobs": 0}]
)
def test_given_another_salt_or_the_switch_off_when_prompts_are_equal_then_nothing_is_shared(
    options: dict[str, object],
) -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(12))
    driver.run()
    driver.add("b", prompt_of(12), **options)
    driver.run()
    rows = [row for plan in driver.executor.plans for row in plan.new_rows]
    assert rows[1].num_computed_tokens == 0
    assert driver.streams["b", 0] == expected(prompt_of(12))


def test_given_too_few_blocks_when_all_grow_then_the_youngest_is_preempted_and_tokens_are_the_same() -> None:
    driver = Driver(OracleExecutor(num_blocks=9, block_size=4), max_num_seqs=4)
    for i in range(3):
        driver.add(f"r{i}", prompt_of(6, i), max_tokens=20)
    driver.run()
    for i in range(3):
        assert driver.streams[f"r{i}", 0] == expected(prompt_of(6, i), max_tokens=20)
    assert driver.engine.scheduler.totals.preemptions > 0
    assert_clean(driver)


def test_given_preemption_when_someone_must_go_then_never_the_oldest() -> None:
    driver = Driver(OracleExecutor(num_blocks=8, block_size=4), max_num_seqs=4)
    for i in range(4):
        driver.add(f"r{i}", prompt_of(4, i), max_tokens=24)
    preempted = []
    while driver.step():
        for request in driver.engine.scheduler.requests.values():
            if request.sequences[0].num_preemptions:
                preempted.append(request.request_id)
    assert preempted
    assert "r0" not in preempted
    ends = [o.request_id for o in driver.outputs if o.finish_reason]
    assert ends[0] == "r0"


def test_given_a_cancel_when_steps_are_in_flight_then_blocks_are_free_at_once() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(9), n=2, max_tokens=50)
    driver.add("b", prompt_of(7, 2), max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.engine.submit()
    driver.record(driver.engine.cancel("a"))
    driver.check_invariants()
    assert {driver.ends["a", c] for c in range(2)} == {"cancelled"}
    driver.run()
    assert driver.streams["b", 0] == expected(prompt_of(7, 2), max_tokens=20)
    assert_clean(driver)


def test_given_a_choice_that_met_a_stop_string_when_cancelled_then_it_counts_as_stopped() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(9), n=3, max_tokens=6)
    driver.step()
    driver.record(driver.engine.cancel("a", 0, complete=True))
    driver.record(driver.engine.cancel("a", 1))
    driver.run()
    assert driver.engine.scheduler.totals.by_reason == {"stop": 1, "cancelled": 1, "length": 1}


def test_given_one_choice_cancelled_when_the_others_run_then_they_are_untouched() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(9), n=3)
    driver.step()
    driver.record(driver.engine.cancel("a", 0))
    driver.run()
    for choice in (1, 2):
        assert driver.streams["a", choice] == expected(prompt_of(9), choice)
    assert_clean(driver)


def test_given_a_row_that_is_not_finite_when_sampled_then_only_its_choice_ends() -> None:
    driver = Driver(OracleExecutor())
    driver.add("bad", prompt_of(3))
    driver.add("good", prompt_of(4))
    driver.executor.bad_rows = {0}
    driver.run()
    assert driver.ends == {("bad", 0): "error", ("good", 0): "length"}
    assert driver.streams["good", 0] == expected(prompt_of(4))
    assert_clean(driver)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (RULED_OUT, "leave no token"),
        (GIVEN_UP, "too complex"),
        (NOT_FOLLOWED, "cannot follow the request's grammar"),
        ("else", "finite"),
    ],
)
def test_given_a_row_without_a_token_when_its_request_is_to_blame_then_it_is_refused_and_no_other(
    why: str, words: str
) -> None:
    driver = Driver(OracleExecutor())
    scheduler, ends = driver.engine.scheduler, list[TokenOutput]()
    update = scheduler.update

    def blame(result: StepResult) -> StepOutputs:
        result.refused = dict.fromkeys(result.bad_rows[:1], why)
        outputs = update(result)
        ends.extend(output for output in outputs.others if output.finish_reason)
        return outputs

    scheduler.update = blame  # type: ignore[method-assign]
    for name, length in (("refused", 3), ("bad", 4), ("good", 5)):
        driver.add(name, prompt_of(length))
    driver.executor.bad_rows = {0, 1}
    driver.run()
    reason = "error" if why in (NOT_FOLLOWED, "else") else "refused"
    assert driver.ends == {("refused", 0): reason, ("bad", 0): "error", ("good", 0): "length"}
    assert words in str(ends[0].error)
    assert "not finite" in str(ends[1].error)
    assert scheduler.totals.by_reason == (
        {"error": 2, "length": 1} if reason == "error" else {"refused": 1, "error": 1, "length": 1}
    )
    assert driver.streams["good", 0] == expected(prompt_of(5))
    assert_clean(driver)
    driver.executor.bad_rows = set(range(8))
    for name in ("long", "again"):
        driver.add(name, prompt_of(12, 5))
        driver.run()
    rows = [row for plan in driver.executor.plans for row in plan.new_rows]
    assert (rows[-1].num_computed_tokens > 0) == (why != "else")  # its numbers were right: they may be reused


def test_given_a_row_that_is_not_finite_when_its_prompt_comes_again_then_nothing_of_it_is_reused() -> None:
    driver = Driver(OracleExecutor())
    driver.executor.bad_rows = {0}
    driver.add("bad", prompt_of(12))
    driver.run()
    driver.executor.bad_rows = set()
    driver.add("again", prompt_of(12))
    driver.run()
    rows = [row for plan in driver.executor.plans for row in plan.new_rows]
    assert [row.num_computed_tokens for row in rows] == [0, 0]
    assert driver.streams["again", 0] == expected(prompt_of(12))


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_given_emitted_tokens_when_resumed_then_the_stream_goes_on_at_their_index(kept: int) -> None:
    stream = expected(prompt_of(10))
    driver = Driver(OracleExecutor())
    driver.engine.add(make_message("a", prompt_of(10), emitted=[stream[:kept]]), 0.0)
    if kept == 8:
        assert driver.engine.is_idle
        return
    driver.run()
    assert driver.outputs[0].index == kept
    assert driver.streams["a", 0] == stream[kept:]
    assert_clean(driver)


def test_given_a_resumed_request_that_had_ended_when_added_then_its_end_is_said_again() -> None:
    stream = expected(prompt_of(10))
    driver = Driver(OracleExecutor())
    ends = driver.engine.add(make_message("a", prompt_of(10), n=2, emitted=[stream, []]), 0.0)
    assert [(e.choice, e.index, e.finish_reason) for e in ends] == [(0, 8, "length")]
    driver.run()
    assert driver.streams["a", 1] == expected(prompt_of(10), 1)
    assert_clean(driver)


def num_kept() -> int:
    return sum(type(thing) in (Request, Sequence) for thing in gc.get_objects())


@pytest.mark.usefixtures("_no_collection")
def test_given_requests_with_far_deadlines_when_they_have_ended_then_the_scheduler_does_not_keep_them() -> None:
    scheduler = Driver(OracleExecutor()).engine.scheduler
    before = num_kept()
    for number in range(1000):
        scheduler.add(make_message(str(number), [1, 2, 3], deadline=1e9), 0.0)
        scheduler.cancel(str(number))
    assert num_kept() - before <= 2 * 64  # void entries of the queue
    assert len(scheduler._deadlines) < 100


@pytest.mark.usefixtures("_no_collection")
def test_given_no_garbage_collection_when_choices_of_a_request_have_ended_then_nothing_of_it_is_kept() -> None:
    driver = Driver(OracleExecutor())
    before = num_kept()
    for number in range(10):
        driver.add(f"a{number}", prompt_of(11), n=3)
        driver.add(f"b{number}", prompt_of(11), n=2, max_tokens=1)
        driver.add(f"c{number}", prompt_of(11), n=2, max_tokens=30, ref=10 * number)
        driver.run()
    assert_clean(driver)
    assert num_kept() == before


def test_given_a_request_id_that_comes_again_when_the_deadline_of_the_first_passes_then_the_second_lives() -> None:
    scheduler = Driver(OracleExecutor()).engine.scheduler
    scheduler.add(make_message("a", [1, 2, 3], deadline=5.0), 0.0)
    scheduler.cancel("a")
    scheduler.add(make_message("a", [1, 2, 3], deadline=50.0), 1.0)
    assert scheduler.expire(6.0) == []
    assert [output.finish_reason for output in scheduler.expire(51.0)] == ["error"]


def test_given_a_deadline_when_it_passes_then_the_request_ends_with_an_error() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(3), deadline=5.0, max_tokens=100)
    driver.step()
    assert driver.engine.scheduler.expire(4.9) == []
    driver.record(driver.engine.scheduler.expire(5.0))
    assert driver.ends["a", 0] == "error"
    driver.run()
    assert_clean(driver)


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([50], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"max_tokens": 256}, "max_tokens"),
        ([1], {"seed": None}, "seed"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": True}, "temperature"),
        ([1], {"temperature": 1e-9}, "temperature"),
        ([1], {"top_p": -0.1}, "top_p"),
        ([1], {"n": 0}, "n"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {5: float("inf")}}, "logit_bias"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids"),
        ([1], {"banned_token_ids": tuple(range(50))}, "banned_token_ids"),
        ([1], {"min_tokens": 9}, "min_tokens"),
        ([1], {"min_tokens": 1, "banned_token_ids": tuple(range(49)), "stop_token_ids": (49,)}, "min_tokens"),
        ([1], {"banned_token_ids": (1,) * 5000}, "banned_token_ids"),
        ([1], {"n": 120}, "n"),
        ([1], {"emitted": [[1], [2]]}, "n"),
        ([1], {"emitted": [[60]]}, "emitted"),
        ([1], {"ref": 2**63 - 1}, None),
        ([1], {"ref": -2}, None),
    ],
)
def test_given_a_bad_request_when_added_then_it_is_refused_and_nothing_changes(
    prompt: list[int], options: dict[str, object], param: str | None
) -> None:
    driver = Driver(OracleExecutor(), max_waiting=100)
    with pytest.raises(InvalidRequestError) as caught:
        driver.add("a", prompt, **options)
    assert caught.value.param == param
    assert driver.engine.is_idle


def test_given_a_request_larger_than_the_cache_when_added_then_it_is_refused_at_once() -> None:
    driver = Driver(OracleExecutor(num_blocks=4, block_size=4))
    with pytest.raises(InvalidRequestError, match="room for 16"):
        driver.add("a", prompt_of(10), max_tokens=10)


def test_given_a_full_queue_when_added_then_overloaded_with_retry_after() -> None:
    driver = Driver(OracleExecutor(max_num_seqs=1), max_waiting=2, max_num_seqs=1)
    for i in range(3):
        driver.add(f"r{i}", prompt_of(3))
    with pytest.raises(OverloadedError) as caught:
        driver.add("late", prompt_of(3))
    assert caught.value.status == 503
    assert caught.value.retry_after > 0
    driver.run()
    assert len(driver.ends) == 3


def test_given_choices_that_wait_for_their_leader_when_more_come_then_they_count_as_queued() -> None:
    driver = Driver(OracleExecutor(max_num_seqs=2), max_waiting=6, max_num_seqs=2)
    driver.add("a", prompt_of(3), n=8)
    with pytest.raises(OverloadedError):
        driver.add("b", prompt_of(3), n=1)
    driver.run()
    assert len(driver.ends) == 8
    assert_clean(driver)


def test_given_a_younger_request_of_higher_priority_when_memory_is_short_then_the_oldest_is_not_preempted() -> None:
    driver = Driver(OracleExecutor(num_blocks=8, block_size=4), max_num_seqs=4)
    driver.add("old", prompt_of(4), max_tokens=24)
    driver.step()
    for i in range(3):
        driver.add(f"young{i}", prompt_of(4, i), max_tokens=24, priority=-5)
    preempted = set()
    while driver.step():
        live = driver.engine.scheduler.requests.values()
        preempted |= {r.request_id for r in live if r.sequences[0].num_preemptions}
    assert preempted
    assert "old" not in preempted
    assert driver.streams["old", 0] == expected(prompt_of(4), max_tokens=24)


def test_given_many_choices_with_long_lists_when_admitted_then_no_plan_outgrows_a_message() -> None:
    executor = OracleExecutor(num_blocks=8000, block_size=16, vocab_size=5000, max_model_len=20_000, max_num_seqs=128)
    driver = Driver(executor, max_num_seqs=128)
    driver.add("a", [1] * 10_000, n=128, max_tokens=2, allowed_token_ids=tuple(range(4096)))
    for _ in range(9):
        driver.step()
    sizes = [len(WORKER_SCHEMA.encode(plan)) for plan in executor.plans]
    assert max(sizes) < MAX_MESSAGE_BYTES // 8
    assert sum(len(plan.new_rows) for plan in executor.plans) > 40


def test_given_prompt_logprobs_when_the_request_ends_with_the_same_step_then_they_are_not_lost() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(3), max_tokens=1, prompt_logprobs=0)
    driver.engine.submit()
    entry = Logprobs(8, -1.0, 1)
    outputs = driver.engine.scheduler.update(
        StepResult(1, 1, column([0]), column([5]), prompt_logprobs=[RowPromptLogprobs(0, 1, [entry, entry])])
    )
    assert outputs.outputs[0].finish_reason == "length"
    assert [(p.request_id, p.start, len(p.entries)) for p in outputs.prompt_logprobs] == [("a", 1, 2)]


def test_given_a_result_of_another_step_when_applied_then_it_is_an_engine_error() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", prompt_of(3))
    driver.engine.submit()
    with pytest.raises(EngineError, match="does not answer"):
        driver.engine.scheduler.update(StepResult(1, 99, column([0]), column([1])))


def test_given_a_result_with_too_few_logprobs_when_applied_then_it_is_an_engine_error() -> None:
    driver = Driver(OracleExecutor())
    for name in ("a", "b"):
        driver.add(name, prompt_of(3), logprobs=1)
    driver.engine.submit()
    with pytest.raises(EngineError, match="has 1 log-prob"):
        driver.engine.scheduler.update(
            StepResult(1, 1, column([0, 1]), column([5, 5]), logprobs=[Logprobs(5, -1.0, 1)])
        )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2]), caching=st.booleans(), drafts=st.booleans())
def test_given_random_traffic_when_memory_is_scarce_then_every_stream_is_exact_and_nothing_leaks(
    seed: int, depth: int, caching: bool, drafts: bool
) -> None:
    rng = random.Random(seed)
    executor = OracleExecutor(
        num_blocks=rng.choice([12, 20, 40]), block_size=4, max_num_seqs=rng.choice([2, 5]), can_draft=drafts
    )
    driver = Driver(
        executor,
        prefix_caching=caching,
        steps_in_flight=depth,
        max_num_batched_tokens=rng.choice([5, 11, 64]),
        max_num_seqs=5,
        speculation="prompt-lookup" if drafts else "none",
    )
    stems = [prompt_of(rng.randrange(1, 20), i) for i in range(3)]
    jobs: dict[str, tuple[list[int], dict[str, object]]] = {}
    for i in range(rng.randrange(1, 14)):
        prompt = rng.choice(stems) + prompt_of(rng.randrange(0, 6), i)
        options: dict[str, object] = {"n": rng.choice([1, 1, 2, 3]), "max_tokens": rng.randrange(1, 20), "seed": i}
        options["stop_token_ids"] = tuple(rng.sample(range(50), 3))
        jobs[f"r{i}"] = (prompt, options)
    waiting = list(jobs)
    cancelled = set()
    while waiting or not driver.engine.is_idle:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            driver.add(name, jobs[name][0], **jobs[name][1])
        if rng.random() < 0.05 and driver.engine.scheduler.requests:
            name = rng.choice(sorted(driver.engine.scheduler.requests))
            cancelled.add(name)
            driver.record(driver.engine.cancel(name))
        driver.step()
    for name, (prompt, options) in jobs.items():
        stops = set(options["stop_token_ids"])  # type: ignore[call-overload]
        params = SamplingParams(**options)  # type: ignore[arg-type]
        for choice in range(params.n):
            want = oracle_stream(prompt, params, choice, stops, 50)
            got = driver.streams[name, choice]
            assert got == (want[: len(got)] if name in cancelled else want)
    assert_clean(driver)
