"""Workers die and come back: every stream goes on with the tokens it would have had; the one that kills is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.errors import EngineError
from novainfer.protocol.messages import FINISH_ERROR, FINISH_LENGTH, AddRequest, TokenOutput
from novainfer.protocol.step import StepPlan
from novainfer.sampling.params import SamplingParams
from tests.engine.engine_driver import Driver, make_message
from tests.oracle import OracleExecutor, oracle_stream

pytestmark = pytest.mark.stage1

VOCAB = 50
POISON = 49  # a prompt token at which the executor below dies


class FragileExecutor(OracleExecutor):
    """Dies when it is asked to run a prompt with the poison in it, as a crash in a kernel would."""

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        if any(POISON in self.rows[row].token_ids[: self.rows[row].prompt_len] for row in plan.rows):
            raise EngineError("poisoned")


def replace_workers(driver: Driver, executor: OracleExecutor, *, faulted: bool) -> None:
    driver.record(driver.engine.lose_workers(faulted=faulted))
    assert not driver.step(), "something was scheduled without workers"
    driver.use(executor)


def expected(prompt: list[int], *, max_tokens: int, choice: int = 0) -> list[int]:
    return oracle_stream(prompt, SamplingParams(seed=0, max_tokens=max_tokens), choice, set(), VOCAB)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_given_random_requests_when_workers_die_at_random_then_every_stream_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    size = {
        "num_blocks": rng.choice((24, 40, 90)),
        "block_size": rng.choice((1, 4)),
        "max_num_seqs": rng.choice((2, 6)),
    }
    driver = Driver(OracleExecutor(**size), max_num_batched_tokens=rng.choice((8, 64)), max_num_seqs=6)
    wanted: dict[tuple[str, int], list[int]] = {}
    for i in range(rng.randint(1, 10)):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 12))]
        n, max_tokens = rng.choice((1, 1, 3)), rng.randint(1, 9)
        driver.add(str(i), prompt, n=n, max_tokens=max_tokens)
        wanted |= {(str(i), c): expected(prompt, max_tokens=max_tokens, choice=c) for c in range(n)}
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(0, 6)):
            driver.step()
        driver.engine.submit()
        replace_workers(driver, OracleExecutor(**size), faulted=rng.random() < 0.3)
        for _ in range(rng.randint(1, 3)):  # not so fast that a request which is alone looks guilty
            driver.step()
    driver.run()
    assert {key: tokens for key, tokens in driver.streams.items() if driver.ends[key] != FINISH_ERROR} == {
        key: tokens for key, tokens in wanted.items() if driver.ends[key] != FINISH_ERROR
    }
    assert set(driver.ends) == set(wanted)
    assert driver.engine.scheduler.kv.pool.num_free == size["num_blocks"]


def test_given_deaths_from_outside_when_each_lets_tokens_through_then_nobody_is_blamed() -> None:
    driver = Driver(OracleExecutor())
    for i in range(4):
        driver.add(str(i), [i, 7, 9], max_tokens=12)
    for _ in range(10):
        driver.step()
        driver.step()
        replace_workers(driver, OracleExecutor(), faulted=False)
    driver.run()
    assert set(driver.ends.values()) == {FINISH_LENGTH}
    assert all(driver.streams[str(i), 0] == expected([i, 7, 9], max_tokens=12) for i in range(4))


def run_with_poison(driver: Driver, *, faulted: bool) -> int:
    deaths = 0
    while True:
        try:
            driver.run()
        except EngineError:
            deaths += 1
            assert deaths < 10
            replace_workers(driver, FragileExecutor(), faulted=faulted)
        else:
            return deaths


@pytest.mark.parametrize(("faulted", "deaths"), [(True, 2), (False, 4)])
def test_given_a_request_that_kills_when_it_runs_among_others_then_it_alone_ends_with_an_error(
    faulted: bool, deaths: int
) -> None:
    driver = Driver(FragileExecutor())
    for i in range(5):
        driver.add(str(i), [i, 3, 5], max_tokens=6)
    for _ in range(2):
        driver.step()
    driver.add("poison", [1, POISON, 2], max_tokens=6)
    driver.add("late", [8, 8, 8, 8, 8, 8], max_tokens=3)
    assert run_with_poison(driver, faulted=faulted) == deaths
    assert driver.ends.pop(("poison", 0)) == FINISH_ERROR
    assert driver.outputs[[o.request_id for o in driver.outputs].index("poison")].error
    assert set(driver.ends.values()) == {FINISH_LENGTH}
    assert all(driver.streams[str(i), 0] == expected([i, 3, 5], max_tokens=6) for i in range(5))
    assert driver.streams["late", 0] == expected([8] * 6, max_tokens=3)


@pytest.mark.parametrize(("faulted", "deaths"), [(True, 2), (False, 4)])
def test_given_a_request_that_kills_when_its_link_breaks_after_each_death_then_it_kills_no_more_often(
    faulted: bool, deaths: int
) -> None:
    driver = Driver(FragileExecutor())
    requests = {"0": [0, 3, 5], "poison": [1, POISON, 2], "1": [6, 3, 5]}
    for name, prompt in requests.items():
        driver.add(name, prompt, max_tokens=6)
    num_deaths = 0
    while num_deaths < 10:
        try:
            driver.run()
        except EngineError:
            num_deaths += 1
            replace_workers(driver, FragileExecutor(), faulted=faulted)
        else:
            break
        for name, prompt in requests.items():  # what a gateway does whose link to the scheduler has broken
            if (name, 0) not in driver.ends:
                driver.engine.cancel(name)
                driver.add(name, prompt, max_tokens=6, emitted=[driver.streams[name, 0]])
    assert num_deaths == deaths
    assert driver.ends == {("0", 0): FINISH_LENGTH, ("poison", 0): FINISH_ERROR, ("1", 0): FINISH_LENGTH}


def test_given_a_choice_in_flight_when_its_request_came_again_with_fewer_then_a_death_blames_nobody_for_it() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", [1, 2, 3], n=2, max_tokens=6)
    driver.step()
    driver.engine.submit()
    driver.engine.cancel("a")
    driver.add("a", [1, 2, 3], max_tokens=6)
    replace_workers(driver, OracleExecutor(), faulted=True)
    driver.streams.clear()
    driver.run()
    assert driver.ends == {("a", 0): FINISH_LENGTH}


def send_again(driver: Driver, message: AddRequest) -> None:
    """What a gateway does with a request whose link has broken: choices that have ended say so once more."""
    name = message.request_id
    driver.engine.cancel(name)
    emitted = [list(driver.streams[name, choice]) for choice in range(message.params.n)]
    ends = driver.engine.add(replace(message, emitted=emitted), now=0.0)
    driver.record([end for end in ends if (name, end.choice) not in driver.ends])


def random_requests(rng: random.Random) -> list[AddRequest]:
    """Some with the poison in them."""
    requests = []
    for i in range(rng.randint(2, 5)):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.3:
            prompt.append(POISON)
        requests.append(make_message(str(i), prompt, n=rng.choice((1, 1, 3)), max_tokens=5, priority=rng.randint(0, 1)))
    return requests


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_given_links_that_break_at_any_time_when_some_requests_kill_then_each_does_twice_at_most_and_the_others_get_on(
    seed: int,
) -> None:
    rng = random.Random(seed)
    size = {"num_blocks": rng.choice((30, 60)), "block_size": rng.choice((1, 4)), "max_num_seqs": rng.choice((1, 2, 6))}
    driver = Driver(FragileExecutor(**size), max_num_batched_tokens=rng.choice((8, 64)), max_num_seqs=6)
    requests = random_requests(rng)
    for message in requests:
        driver.record(driver.engine.add(message, now=0.0))
    num_deaths, is_moving = 0, True
    while is_moving:
        try:
            is_moving = driver.step()
        except EngineError:
            num_deaths += 1
            replace_workers(driver, FragileExecutor(**size), faulted=True)
        if rng.random() < 0.3:
            if rng.random() < 0.5:
                driver.engine.submit()
            live = [m for m in requests if any((m.request_id, c) not in driver.ends for c in range(m.params.n))]
            for message in rng.sample(live, rng.randint(0, len(live))):
                send_again(driver, message)
    assert driver.engine.is_idle, "nothing moves but requests are left"
    poisoned = [m for m in requests if POISON in m.prompt_token_ids]
    assert num_deaths <= 2 * sum(m.params.n for m in poisoned)
    for m in requests:
        for choice in range(m.params.n):
            assert driver.ends[m.request_id, choice] == (FINISH_ERROR if m in poisoned else FINISH_LENGTH)
            wanted = expected(m.prompt_token_ids, max_tokens=5, choice=choice)
            assert m in poisoned or driver.streams[m.request_id, choice] == wanted


@pytest.mark.parametrize("faulted", [True, False])
def test_given_a_request_that_was_given_up_when_it_is_sent_again_then_it_ends_at_once_as_before(faulted: bool) -> None:
    driver = Driver(FragileExecutor())
    driver.add("poison", [1, POISON, 2], n=2, max_tokens=6)
    run_with_poison(driver, faulted=faulted)
    first = [(o.choice, o.error) for o in driver.outputs]
    assert {choice for choice, _ in first} == {0, 1}
    driver.outputs.clear()
    driver.ends.clear()
    driver.add("poison", [1, POISON, 2], n=2, max_tokens=6)
    assert run_with_poison(driver, faulted=faulted) == 0
    assert [(o.choice, o.error) for o in driver.outputs] == first
    driver.add("another", [1, 2], max_tokens=3)
    driver.run()
    assert driver.streams["another", 0] == expected([1, 2], max_tokens=3)


def test_given_smaller_workers_when_they_come_back_then_what_cannot_run_any_more_ends_and_the_rest_goes_on() -> None:
    driver = Driver(OracleExecutor(num_blocks=64, max_model_len=256))
    driver.add("large", list(range(40)), max_tokens=20)
    driver.add("small", [1, 2, 3], max_tokens=5)
    driver.step()
    replace_workers(driver, OracleExecutor(num_blocks=8, max_model_len=32), faulted=False)
    driver.run()
    assert driver.ends["large", 0] == FINISH_ERROR
    assert driver.streams["small", 0] == expected([1, 2, 3], max_tokens=5)


def test_given_no_workers_when_requests_come_and_go_then_they_wait_and_run_later() -> None:
    driver = Driver(OracleExecutor())
    driver.add("a", [1, 2], max_tokens=4)
    driver.step()
    driver.record(driver.engine.lose_workers(faulted=False))
    driver.add("b", [3, 4], max_tokens=4)
    driver.add("c", [5, 6], max_tokens=4)
    ended: list[TokenOutput] = driver.engine.cancel("c")
    driver.record(ended)
    driver.use(OracleExecutor())
    driver.run()
    assert driver.streams["a", 0] == expected([1, 2], max_tokens=4)
    assert driver.streams["b", 0] == expected([3, 4], max_tokens=4)
    assert driver.streams["c", 0] == []


def test_given_a_prompt_found_in_the_cache_when_workers_die_then_what_was_found_at_first_is_told_to_the_end() -> None:
    driver = Driver(OracleExecutor())
    driver.add("before", list(range(12)))
    driver.run()
    driver.add("r", [*range(12), 5])
    for _ in range(3):
        driver.step()
    replace_workers(driver, OracleExecutor(), faulted=False)
    driver.run()
    assert {output.num_cached_tokens for output in driver.outputs if output.request_id == "r"} == {12}
