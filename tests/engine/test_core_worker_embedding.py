"""Rows that give their hidden state in place of a token: the same vector in every company."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import KernelBackend, select_backend
from novainfer.config import ModelConfig
from novainfer.embedding import numbers_of
from novainfer.errors import EngineError
from tests.builders import CPU, PlanWriter, execute, generate, make_runner
from tests.parity.builders import build_checkpoint
from workers.models.base import CausalLM, ForwardBatch, KvCaches
from workers.models.loader import load_model
from workers.null_runner import NullRunner
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(37)]
OTHER = [(5 * i + 11) % 251 for i in range(50)]
PLAIN = {"logprobs": None}
WITH_LOGPROBS = {"logprobs": 2}


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return select_backend(CPU)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, kernels: KernelBackend, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = build_checkpoint("qwen3", tmp_path_factory.mktemp("embedding") / "qwen3", request.param)
    config = ModelConfig(model=str(folder))
    return load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


def embed(model: CausalLM, kernels: KernelBackend, prompt: list[int], chunk: int = 512) -> bytes:
    """The vector of a prompt alone."""
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, prompt, embed=True)
    for start in range(0, len(prompt), chunk):
        result = execute(runner, writer.plan({0: min(chunk, len(prompt) - start)}))
        is_last = start + chunk >= len(prompt)
        assert (list(result.rows), list(result.token_ids)) == (([0], [0]) if is_last else ([], []))
    assert int(runner.states.num_tokens[0]) == len(prompt)
    return result.embeddings[0]


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompt_when_embedded_in_chunks_then_the_vector_is_the_same(
    model: CausalLM, kernels: KernelBackend, chunk: int
) -> None:
    whole = embed(model, kernels, PROMPT)
    assert len(numbers_of(whole)) == model.spec.hidden_size
    assert embed(model, kernels, PROMPT, chunk) == whole


@pytest.mark.parametrize("fields", [PLAIN, WITH_LOGPROBS])
def test_embedding_among_rows_that_sample_when_run_then_each_is_as_it_is_alone(
    model: CausalLM, kernels: KernelBackend, fields: dict[str, object]
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    for row, prompt, embeds in ((0, PROMPT, False), (1, OTHER, True), (2, OTHER[:9], False), (3, PROMPT[:9], True)):
        writer.add(row, prompt, embed=embeds, **({} if embeds else fields))
    result = execute(runner, writer.plan({0: 37, 1: 50, 2: 9, 3: 8}))
    assert list(result.rows) == [0, 1, 2]
    assert result.embeddings == {1: embed(model, kernels, OTHER)}
    assert [entry is not None for entry in result.logprobs] == ([] if fields is PLAIN else [True, False, True])
    tokens = {0: [result.token_ids[0]], 2: [result.token_ids[2]]}
    result = execute(runner, writer.plan({3: 1, 0: 1, 2: 1}))  # of the embedding one token was left: a decode
    assert result.embeddings == {3: embed(model, kernels, PROMPT[:9])}
    for row, token_id in zip(result.rows, result.token_ids, strict=True):
        if row in tokens:
            tokens[row].append(token_id)
    for row, prompt in ((0, PROMPT), (2, OTHER[:9])):
        alone, its = make_runner(model, kernels), PlanWriter()
        its.add(0, prompt, **fields)
        assert generate(alone, its, 0, 2) == tokens[row]


def test_embedding_beside_decodes_with_drafts_when_run_then_both_are_as_they_are_alone(
    model: CausalLM, kernels: KernelBackend
) -> None:
    text = OTHER[:8] * 4
    alone, its = make_runner(model, kernels), PlanWriter()
    its.add(0, text)
    wanted = generate(alone, its, 0, 6)
    runner, writer = make_runner(model, kernels), PlanWriter(first_block=8)
    writer.add(0, text, block_ids=[0, 1, 2, 3])
    execute(runner, writer.plan({0: len(text) - 1}))
    writer.add(1, PROMPT, embed=True)
    result = execute(runner, writer.plan({0: 1, 1: 37}, num_drafts=[4]))
    assert result.num_drafted[0] > 0
    assert result.embeddings == {1: embed(model, kernels, PROMPT)}
    assert list(result.rows)[-1] == 1
    tokens = list(result.token_ids)[:-1]
    assert tokens == wanted[: len(tokens)] != []


def test_cached_prefix_when_an_embedding_starts_after_it_then_the_vector_is_the_same(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter(first_block=10)
    writer.add(0, PROMPT)
    generate(runner, writer, 0, 1)
    writer.free(0)
    writer.add(1, PROMPT, num_computed_tokens=32, block_ids=[10, 11], embed=True)
    assert execute(runner, writer.plan({1: 5})).embeddings == {1: embed(model, kernels, PROMPT)}


def test_row_that_is_freed_when_it_is_taken_again_then_it_samples(model: CausalLM, kernels: KernelBackend) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, embed=True)
    execute(runner, writer.plan({0: 37}))
    writer.free(0)
    writer.add(0, PROMPT)
    result = execute(runner, writer.plan({0: 37}))
    assert (list(result.rows), result.embeddings) == ([0], {})
    runner.drop_rows()
    assert not runner.states.embedding


def test_prompt_of_the_longest_length_when_embedded_then_it_runs_and_a_row_that_samples_does_not(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels, max_model_len=37), PlanWriter()
    writer.add(0, PROMPT, embed=True)
    writer.add(1, PROMPT)
    assert execute(runner, writer.plan({0: 37})).embeddings == {0: embed(model, kernels, PROMPT)}
    with pytest.raises(EngineError, match="beyond max_model_len"):
        runner.execute(writer.plan({1: 37}))


class BadLastLayer:
    """A model whose hidden states are not finite where a token's id is odd."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, kv_caches: KvCaches
    ) -> torch.Tensor:
        hidden = self._model.forward(input_ids, positions, batch, kv_caches)
        kept = input_ids if batch.kept is None else input_ids[batch.kept.index]
        return hidden.masked_fill((kept % 2 == 1)[:, None], float("nan"))


def test_hidden_state_that_is_not_finite_when_told_then_its_row_is_bad_and_no_other(
    model: CausalLM, kernels: KernelBackend
) -> None:
    bad: CausalLM = BadLastLayer(model)  # type: ignore[assignment]
    runner, writer = make_runner(bad, kernels), PlanWriter()
    writer.add(0, [2, 4, 7], embed=True)
    writer.add(1, [2, 4, 6], embed=True)
    writer.add(2, [3, 5, 8])
    result = execute(runner, writer.plan({0: 3, 1: 3, 2: 3}))
    assert list(result.rows) == [0, 1, 2]
    assert result.bad_rows == [0]
    assert result.embeddings == {1: embed(model, kernels, [2, 4, 6])}


def test_rank_that_computes_nothing_when_it_embeds_then_it_answers_all_the_same() -> None:
    runner = NullRunner(4, 100, is_first=True, hidden_size=3)
    writer = PlanWriter()
    writer.add(0, [1, 2, 3], embed=True)
    writer.add(1, [1, 2])
    pending = runner.launch(writer.plan({0: 2, 1: 2}))
    assert pending is not None
    assert (list(pending.finish().rows), pending.finish().embeddings) == ([1], {})
    pending = runner.launch(writer.plan({0: 1, 1: 1}))
    assert pending is not None
    result = pending.finish()
    assert (list(result.rows), numbers_of(result.embeddings[0]), list(result.embeddings)) == ([0, 1], (1.0,) * 3, [0])
