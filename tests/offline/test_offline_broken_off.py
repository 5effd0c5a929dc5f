"""The offline `LLM` after a step that was broken off: by Ctrl-C, or by an error of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from novainfer import LLM, SamplingParams
from novainfer.client.output import ChoiceDelta
from novainfer.errors import EngineError
from novainfer.scheduler.scheduler import Scheduler
from tests.parity.builders import build_checkpoint
from workers.model_runner import ModelRunner, PendingStep

pytestmark = pytest.mark.stage1

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(5 + 9 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12),
    SamplingParams(temperature=0.8, top_k=5, seed=2, max_tokens=12, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.7, seed=4, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = build_checkpoint("qwen3", tmp_path_factory.mktemp("llm") / "model")
    with LLM(str(checkpoint), num_blocks=128, max_num_seqs=16) as model:
        yield model


def without_ids(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that is told of each, but for what depends on the calls before."""
    return [{key: value for key, value in result.items() if key not in ("request_id", "usage")} for result in results]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[dict[str, Any]]:
    return without_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


MOST_STEPS = 1000  # of one test below: who needs more of them would go on for ever
CALLS: list[tuple[type, str]] = [
    (ModelRunner, "launch"),
    (PendingStep, "finish"),
    (Scheduler, "schedule"),
    (Scheduler, "update"),
]
BREAKS = [
    pytest.param(owner, name, is_done, id=f"{'after' if is_done else 'before'} {name}")
    for owner, name in CALLS
    for is_done in (False, True)
]


def break_off(patch: pytest.MonkeyPatch, owner: type, name: str, is_done: bool) -> None:
    """Ctrl-C in the third call of a method, before or after what it does, once; and no more than so many steps."""
    original, step = getattr(owner, name), LLM.step
    calls, steps = count(1), count(1)

    def broken_off(*args: Any) -> Any:
        is_third = next(calls) == 3
        if is_third and not is_done:
            raise KeyboardInterrupt
        result = original(*args)
        if is_third:
            raise KeyboardInterrupt
        return result

    def counted(llm: LLM) -> list[dict[str, Any]]:
        assert next(steps) <= MOST_STEPS
        return step(llm)

    patch.setattr(owner, name, broken_off)
    patch.setattr(LLM, "step", counted)


@pytest.mark.parametrize(("owner", "name", "is_done"), BREAKS)
def test_given_ctrl_c_in_a_step_when_generating_then_no_prompt_is_left_and_the_next_call_is_answered(
    llm: LLM, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_done: bool
) -> None:
    break_off(monkeypatch, owner, name, is_done)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.is_finished()
    assert without_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


@pytest.mark.parametrize(("owner", "name", "is_done"), BREAKS)
def test_given_ctrl_c_in_a_step_when_stepping_on_then_every_request_goes_on_from_its_tokens(
    llm: LLM, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_done: bool
) -> None:
    stop = llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False)[0]["text"][:1]
    break_off(monkeypatch, owner, name, is_done)
    told: dict[str, list[list[int]]] = {}
    results: dict[str, dict[str, Any]] = {}

    def listen(request_id: str, delta: ChoiceDelta) -> None:
        told[request_id][delta.choice] += delta.token_ids

    ids = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        ids.append(llm.add_request(prompt, params, listen))
        told[ids[-1]] = [[] for _ in range(params.n)]
    short = llm.add_request(PROMPTS[0], replace(PARAMS[0], stop=(stop,)))
    num_broken = 0
    while not llm.is_finished():
        try:
            results |= {result["request_id"]: result for result in llm.step()}
        except KeyboardInterrupt:
            num_broken += 1
    assert num_broken == 1
    assert results.keys() == {*ids, short}
    assert without_ids([results[request_id] for request_id in ids]) == expected
    assert [told[i] for i in ids] == [[choice["token_ids"] for choice in result["choices"]] for result in expected]
    assert (results[short]["text"], results[short]["stop_reason"]) == ("", stop)


def test_given_a_closed_engine_when_a_step_is_out_then_error_and_no_waiting_for_ever() -> None:
    model = LLM("demo", num_blocks=16)
    model.add_request(PROMPTS[0], SamplingParams(max_tokens=4))
    assert model._engine.submit() > 0
    model.exit()
    for words in ("none to answer", "closed"):
        with pytest.raises(EngineError, match=words):
            model.generate("hello", use_tqdm=False)
