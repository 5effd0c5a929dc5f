"""Requests that end with a vector in place of tokens, in the scheduler: where they wait, run, are lost and end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.errors import EngineError, InvalidRequestError
from novainfer.protocol.columns import column
from novainfer.protocol.messages import FINISH_ERROR, FINISH_STOP
from novainfer.protocol.step import StepResult
from novainfer.sampling.params import SamplingParams
from novainfer.sim.oracle import hash_tokens, oracle_vector
from tests.engine.engine_driver import Driver
from tests.oracle import OracleExecutor, oracle_stream

pytestmark = pytest.mark.stage1

VOCAB = 50
EMBEDDING = {"embed": True, "max_tokens": 1, "temperature": 0.0}


def vectors(driver: Driver) -> dict[str, bytes]:
    return {output.request_id: output.embedding for output in driver.outputs if output.embedding}


def wanted(prompt: list[int]) -> bytes:
    return oracle_vector(hash_tokens(prompt))


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_given_an_embedding_when_it_runs_then_it_ends_with_its_vector_and_no_token(budget: int) -> None:
    driver = Driver(OracleExecutor(), max_num_batched_tokens=budget, max_num_seqs=1)
    prompt = [*range(9)]
    driver.add("e", prompt, **EMBEDDING)
    driver.run()
    (output,) = driver.outputs
    assert (output.index, output.token_ids, output.finish_reason, output.stop_token_id) == (0, [], FINISH_STOP, None)
    assert output.embedding == wanted(prompt)
    totals = driver.engine.scheduler.totals
    assert (totals.generation_tokens, totals.prompt_tokens, totals.finished) == (0, 9, {FINISH_STOP: 1})


def test_given_a_prompt_that_fills_the_context_and_the_cache_when_it_is_embedded_then_there_is_room() -> None:
    executor = OracleExecutor(num_blocks=4, block_size=4, max_model_len=16)
    driver = Driver(executor, max_num_batched_tokens=5)
    driver.add("e", [*range(16)], **EMBEDDING)
    driver.run()
    assert vectors(driver) == {"e": wanted([*range(16)])}
    with pytest.raises(InvalidRequestError, match="maximum context length is 16 tokens") as caught:
        driver.add("f", [*range(17)], **EMBEDDING)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    "other",
    [{"n": 2}, {"max_tokens": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"emitted": [[1]]}, {"stop": ("a",)}],
)
def test_given_an_embedding_with_parameters_of_a_generation_when_added_then_it_is_refused(
    other: dict[str, object],
) -> None:
    driver = Driver(OracleExecutor())
    with pytest.raises(InvalidRequestError, match="no sampling parameters"):
        driver.add("e", [1, 2], **{**EMBEDDING, **other})
    assert driver.engine.is_idle


def test_given_steps_whose_vectors_fit_no_message_when_an_embedding_is_added_then_it_is_refused() -> None:
    executor = OracleExecutor(max_num_seqs=4)
    executor._info = replace(executor.info, hidden_size=2**22)
    driver = Driver(executor)
    with pytest.raises(InvalidRequestError, match="--max-num-seqs"):
        driver.add("e", [1, 2], **EMBEDDING)


def test_given_the_same_prompt_again_when_it_is_embedded_then_its_prefix_is_found_and_the_vector_is_the_same() -> None:
    driver = Driver(OracleExecutor(block_size=4))
    prompt = [*range(13)]
    for name in ("a", "b"):
        driver.add(name, prompt, **EMBEDDING)
        driver.run()
    assert set(vectors(driver).values()) == {wanted(prompt)}
    assert [output.num_cached_tokens for output in driver.outputs] == [0, 12]


def test_given_a_vector_that_is_not_finite_when_it_comes_then_only_that_request_fails_and_its_cache_is_forgotten() -> (
    None
):
    executor = OracleExecutor(block_size=2)
    driver = Driver(executor, max_num_seqs=4)
    prompt = [*range(8)]
    executor.bad_rows.add(0)
    driver.add("bad", prompt, **EMBEDDING)
    driver.add("good", [*range(20, 25)], **EMBEDDING)
    driver.run()
    assert driver.ends == {("bad", 0): FINISH_ERROR, ("good", 0): FINISH_STOP}
    assert vectors(driver) == {"good": wanted([*range(20, 25)])}
    executor.bad_rows.clear()
    driver.add("again", prompt, **EMBEDDING)
    driver.run()
    assert vectors(driver)["again"] == wanted(prompt)
    assert driver.outputs[-1].num_cached_tokens == 0


def test_given_a_result_without_the_vector_when_it_is_applied_then_the_engine_fails() -> None:
    driver = Driver(OracleExecutor())
    driver.add("e", [1, 2, 3], **EMBEDDING)
    driver.engine.scheduler.schedule()
    with pytest.raises(EngineError, match="no embedding"):
        driver.engine.scheduler.update(StepResult(1, 1, column([0]), column([0])))


def test_given_an_embedding_in_flight_when_it_is_cancelled_then_its_vector_is_not_told() -> None:
    driver = Driver(OracleExecutor(), max_num_batched_tokens=4)
    driver.add("e", [*range(4)], **EMBEDDING)
    assert driver.engine.submit()
    driver.record(driver.engine.cancel("e"))
    driver.run()
    assert driver.ends == {("e", 0): "cancelled"}
    assert not vectors(driver)


@given(seed=st.integers(0, 2**32))
def test_given_embeddings_among_generations_when_memory_is_short_and_workers_die_then_all_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    size = {"num_blocks": rng.choice((24, 40)), "block_size": rng.choice((1, 4)), "max_num_seqs": rng.choice((2, 6))}
    driver = Driver(OracleExecutor(**size), max_num_batched_tokens=rng.choice((8, 64)), max_num_seqs=6)
    prompts = {str(i): [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for i in range(rng.randint(2, 12))}
    embeds = {name for name in prompts if rng.random() < 0.5}
    for name, prompt in prompts.items():
        options = {"tenant": rng.choice(("a", "b")), "priority": rng.choice((0, 1))}
        driver.add(name, prompt, **(EMBEDDING if name in embeds else {"max_tokens": 8}), **options)
    for _ in range(rng.randint(0, 3)):
        for _ in range(rng.randint(1, 8)):
            driver.step()
        driver.record(driver.engine.lose_workers(faulted=False))
        driver.use(OracleExecutor(**size))
    driver.run()
    assert vectors(driver) == {name: wanted(prompts[name]) for name in embeds}
    params = SamplingParams(seed=0, max_tokens=8)
    for name in prompts.keys() - embeds:
        assert driver.streams[name, 0] == oracle_stream(prompts[name], params, 0, set(), VOCAB)
    assert driver.engine.scheduler.kv.pool.num_free == size["num_blocks"]
