"""`LLM.embed`: its interface, and that a vector depends on its text alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from novainfer import LLM, SamplingParams
from novainfer.errors import InvalidRequestError
from tests.parity.builders import build_checkpoint

pytestmark = pytest.mark.stage1

PROMPTS = [[3 + (7 * i + j * j) % 90 for j in range(1 + 9 * i)] for i in range(8)]
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 16},
    "single tokens": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "little memory": {"num_blocks": 6, "block_size": 16, "max_model_len": 96, "max_num_seqs": 8},
    "no cache": {"enable_prefix_caching": False},
    "large blocks": {"block_size": 64, "num_blocks": 32},
    "drafts": {"speculation": "prompt-lookup"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_blocks=128, max_num_seqs=16) as model:
        yield model


def vectors(results: list[dict[str, Any]]) -> list[list[float]]:
    assert all(result["error"] is None for result in results)
    return [result["embedding"] for result in results]


@pytest.fixture(scope="module")
def solo(llm: LLM) -> list[list[float]]:
    """Each prompt alone."""
    return [vectors(llm.embed([prompt], use_tqdm=False))[0] for prompt in PROMPTS]


def test_given_text_or_ids_when_embedded_then_always_a_list_of_dicts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    one, many, by_ids = (llm.embed(prompts, use_tqdm=False) for prompts in ("hello", ["hello", "you"], [ids]))
    assert one[0]["embedding"] == many[0]["embedding"] == by_ids[0]["embedding"] != many[1]["embedding"]
    assert [list(result) for result in (*one, *by_ids)] == [[*one[0]]] * 2
    assert set(one[0]) == {"request_id", "prompt_token_ids", "embedding", "error", "usage"}
    assert one[0]["prompt_token_ids"] == ids
    assert one[0]["usage"]["total_tokens"] == one[0]["usage"]["prompt_tokens"] == len(ids)
    assert math.hypot(*one[0]["embedding"]) == pytest.approx(1.0, abs=1e-6)


def test_given_prompts_in_company_when_embedded_then_each_bit_is_as_alone(llm: LLM, solo: list[list[float]]) -> None:
    assert vectors(llm.embed(PROMPTS, use_tqdm=False)) == solo
    assert vectors(llm.embed(PROMPTS[::-1], use_tqdm=False)) == solo[::-1]


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_given_other_chunks_blocks_and_caches_when_embedded_twice_then_each_bit_is_the_same(
    name: str, checkpoint: Path, solo: list[list[float]]
) -> None:
    options = {"num_blocks": 128, "max_num_seqs": 16, **CIRCUMSTANCES[name]}
    with LLM(str(checkpoint), **options) as other:
        for _ in range(2):
            assert vectors(other.embed(PROMPTS, use_tqdm=False)) == solo


def test_given_generations_beside_them_when_embedded_then_both_are_as_alone(llm: LLM, solo: list[list[float]]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    wanted = [result["token_ids"] for result in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    ids = [llm.add_request(prompt, greedy) for prompt in PROMPTS]
    assert vectors(llm.embed(PROMPTS, use_tqdm=False)) == solo
    found = {}
    while not llm.is_finished():
        found |= {result["request_id"]: result["token_ids"] for result in llm.step()}
    assert [found[request_id] for request_id in ids] == wanted


def test_given_dimensions_when_embedded_then_the_vector_is_cut_and_normalised_again(llm: LLM) -> None:
    (whole,) = vectors(llm.embed("hello", use_tqdm=False, normalize=False))
    for count in (1, 7, len(whole)):
        (cut,) = vectors(llm.embed("hello", use_tqdm=False, dimensions=count))
        norm = math.hypot(*whole[:count])
        assert cut == pytest.approx([value / norm for value in whole[:count]], rel=1e-6)
    for count in (0, len(whole) + 1, -1, True):
        with pytest.raises(InvalidRequestError, match="dimensions must be between"):
            llm.embed("hello", use_tqdm=False, dimensions=count)


def test_given_one_wrong_prompt_when_embedded_then_it_is_refused_and_nothing_is_left(llm: LLM) -> None:
    longest = llm._executor.info.max_model_len
    for wrong in ([], [-1], [10**6], [True], "\ud800", 5, [1] * (longest + 1)):
        with pytest.raises(InvalidRequestError):
            llm.embed([PROMPTS[1], wrong], use_tqdm=False)  # type: ignore[list-item]
        assert llm.is_finished()
    assert llm.embed([], use_tqdm=False) == []
    assert vectors(llm.embed([[1] * longest], use_tqdm=False))


def test_given_a_step_that_is_broken_off_when_embedded_again_then_it_is_the_same(
    llm: LLM, solo: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = llm._executor.submit
    asked = []

    def interrupted(plan: Any) -> None:
        submit(plan)
        asked.append(plan)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.embed(PROMPTS, use_tqdm=False)
    assert asked
    assert vectors(llm.embed(PROMPTS, use_tqdm=False)) == solo
