"""Steps of a real model on the CPU: a row's tokens depend on its history and parameters, not on the schedule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.backend import KernelBackend, select_backend
from novainfer.config import ModelConfig
from novainfer.protocol.columns import column
from novainfer.protocol.messages import Logprobs
from tests.builders import CPU, PlanWriter, execute, generate, make_runner
from tests.parity.builders import build_checkpoint
from workers.models.base import CausalLM
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(37)]
OTHER = [(5 * i + 11) % 251 for i in range(50)]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 12345}


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return select_backend(CPU)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, kernels: KernelBackend, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = build_checkpoint("qwen3", tmp_path_factory.mktemp("runner") / "qwen3", request.param)
    config = ModelConfig(model=str(folder))
    return load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


def solo(model: CausalLM, kernels: KernelBackend, prompt: list[int], count: int, **fields: object) -> list[int]:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, prompt, **fields)
    return generate(runner, writer, 0, count)


def test_row_when_decoded_then_tokens_equal_prefills_of_the_whole_history(
    model: CausalLM, kernels: KernelBackend
) -> None:
    tokens = solo(model, kernels, PROMPT, 8, **SAMPLED)
    for done in range(1, 8):
        history = PROMPT + tokens[:done]
        assert solo(model, kernels, history, 1, prompt_len=len(PROMPT), **SAMPLED) == [tokens[done]]


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompt_when_chunked_then_tokens_are_the_same(model: CausalLM, kernels: KernelBackend, chunk: int) -> None:
    whole = solo(model, kernels, PROMPT, 4, **SAMPLED)
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(2, PROMPT, **SAMPLED)
    assert generate(runner, writer, 2, 4, chunk=chunk) == whole


def test_mixed_batch_when_run_then_every_row_equals_its_solo_run(model: CausalLM, kernels: KernelBackend) -> None:
    penalised = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "top_k": 20}
    runner, writer = make_runner(model, kernels), PlanWriter()
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    writer.add(0, PROMPT, **SAMPLED)
    writer.add(1, OTHER[:5])
    work = [
        {0: 37, 1: 5},
        {0: 1, 1: 1},
        {0: 1, 1: 1, 2: 20},
        {1: 1, 2: 20, 0: 1},
        {0: 1, 2: 10, 1: 1},
        {0: 1, 1: 1, 2: 1},
    ]
    for i, step in enumerate(work):
        if i == 2:
            writer.add(2, OTHER, choice=1, **penalised)
        result = execute(runner, writer.plan(step))
        for row, token_id in zip(result.rows, result.token_ids, strict=True):
            got[row].append(token_id)
    assert got[0] == solo(model, kernels, PROMPT, 6, **SAMPLED)
    assert got[1] == solo(model, kernels, OTHER[:5], 6)
    assert got[2] == solo(model, kernels, OTHER, 2, choice=1, **penalised)


def test_two_steps_when_second_is_launched_before_first_is_read_then_tokens_are_the_same(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, **SAMPLED)
    pending = [runner.launch(writer.plan({0: count})) for count in (37, 1, 1)]
    results = [step.finish() for step in pending if step is not None]
    assert [result.step for result in results] == [0, 1, 2]
    assert [token for result in results for token in result.token_ids] == solo(model, kernels, PROMPT, 3, **SAMPLED)


def test_cached_prefix_when_row_starts_after_it_then_tokens_are_the_same(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter(first_block=10)
    writer.add(0, PROMPT, **SAMPLED)
    generate(runner, writer, 0, 1)
    writer.free(0)
    writer.add(1, PROMPT, num_computed_tokens=32, block_ids=[10, 11], **SAMPLED)
    assert generate(runner, writer, 1, 4) == solo(model, kernels, PROMPT, 4, **SAMPLED)


def test_copied_block_when_a_choice_continues_in_the_copy_then_the_original_is_intact(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, **SAMPLED)
    tokens = generate(runner, writer, 0, 2)
    writer.add(1, PROMPT, num_computed_tokens=36, block_ids=[0, 1, 50], choice=1, **SAMPLED)
    result = execute(runner, writer.plan({0: 1, 1: 1}, copy_src=[2], copy_dst=[50]))
    assert result.token_ids[0] == solo(model, kernels, PROMPT, 3, **SAMPLED)[2]
    assert result.token_ids[1] == solo(model, kernels, PROMPT, 1, choice=1, **SAMPLED)[0]
    assert generate(runner, writer, 1, 3) == solo(model, kernels, PROMPT, 4, choice=1, **SAMPLED)[1:]
    assert tokens == solo(model, kernels, PROMPT, 2, **SAMPLED)


def test_poisoned_block_when_one_row_reads_it_then_only_that_row_is_bad(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, logprobs=1)
    writer.add(1, OTHER, logprobs=1)
    execute(runner, writer.plan({0: 37, 1: 50}))
    blocks = runner.states.block_table[0, :3].long()
    for key_cache, _ in runner.cache.layers:
        key_cache[blocks] = math.nan
    result = execute(runner, writer.plan({0: 1, 1: 1}))
    assert result.bad_rows == [0]
    assert result.token_ids[result.rows.index(0)] == 0
    assert result.logprobs[result.rows.index(0)] is None
    assert result.token_ids[result.rows.index(1)] == solo(model, kernels, OTHER, 2)[1]


def test_poisoned_blocks_when_freed_and_reused_then_new_owner_is_clean(model: CausalLM, kernels: KernelBackend) -> None:
    runner = make_runner(model, kernels)
    for key_cache, value_cache in runner.cache.layers:
        key_cache.fill_(math.nan)
        value_cache.fill_(math.nan)
    writer = PlanWriter()
    writer.add(0, PROMPT, **SAMPLED)
    assert generate(runner, writer, 0, 4, chunk=11) == solo(model, kernels, PROMPT, 4, **SAMPLED)


def test_rows_when_reused_many_times_then_no_state_is_left_behind(model: CausalLM, kernels: KernelBackend) -> None:
    runner, writer = make_runner(model, kernels, max_num_seqs=1), PlanWriter()
    writer.add(0, OTHER, temperature=1.5, seed=1, presence_penalty=1.0, banned_token_ids=(1, 2), logprobs=2)
    generate(runner, writer, 0, 3)
    writer.free(0)
    writer.add(0, PROMPT, **SAMPLED)
    result_tokens = generate(runner, writer, 0, 3)
    assert result_tokens == solo(model, kernels, PROMPT, 3, **SAMPLED)
    assert execute(runner, writer.plan({0: 1})).logprobs == []


def test_resumed_row_when_it_has_outputs_then_stream_goes_on_as_if_never_stopped(
    model: CausalLM, kernels: KernelBackend
) -> None:
    fields = {"temperature": 0.9, "seed": 77, "repetition_penalty": 1.3, "presence_penalty": 0.5, "choice": 2}
    tokens = solo(model, kernels, PROMPT, 8, **fields)
    resumed = solo(model, kernels, PROMPT + tokens[:3], 5, prompt_len=len(PROMPT), **fields)
    assert resumed == tokens[3:]


def test_empty_plan_when_run_then_result_is_empty(model: CausalLM, kernels: KernelBackend) -> None:
    result = execute(make_runner(model, kernels), PlanWriter().plan({}))
    assert (result.rows, result.token_ids, result.bad_rows) == (column(), column(), [])


def prompt_logprobs(model: CausalLM, kernels: KernelBackend, chunks: list[int]) -> list[Logprobs]:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, prompt_logprobs=2, logprobs=2)
    entries: list[Logprobs] = []
    for chunk in chunks:
        for part in execute(runner, writer.plan({0: chunk})).prompt_logprobs:
            assert (part.row, part.start) == (0, len(entries) + 1)
            entries += part.entries
    return entries


def test_prompt_logprobs_when_chunked_then_equal_and_about_every_token_but_the_first(
    model: CausalLM, kernels: KernelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prompt_logprobs(model, kernels, [37])
    assert [entry.token_id for entry in whole] == PROMPT[1:]
    assert all(len(entry.top_ids) == 2 and entry.logprob <= entry.top_logprobs[0] <= 0 for entry in whole)
    assert prompt_logprobs(model, kernels, [16, 20, 1]) == whole
    monkeypatch.setattr("workers.logprobs._MAX_SLICE", 3 * model.spec.vocab_size)
    assert prompt_logprobs(model, kernels, [37]) == whole


def test_logprobs_when_sampled_then_equal_to_the_prompt_logprob_of_the_same_token(
    model: CausalLM, kernels: KernelBackend
) -> None:
    runner, writer = make_runner(model, kernels), PlanWriter()
    writer.add(0, PROMPT, logprobs=3, temperature=1.0, seed=5)
    result = execute(runner, writer.plan({0: 37}))
    (sampled,) = result.logprobs
    writer.add(1, [*PROMPT, *result.token_ids], prompt_logprobs=3)
    (prompt,) = execute(runner, writer.plan({1: 38})).prompt_logprobs
    assert sampled == prompt.entries[-1]


def test_256_rows_when_decoding_then_each_gets_its_own_token(model: CausalLM, kernels: KernelBackend) -> None:
    runner = make_runner(model, kernels, max_num_seqs=256, num_blocks=256, max_num_batched_tokens=4096)
    writer = PlanWriter()
    for row in range(256):
        writer.add(row, [row % 250, 3, 5], **SAMPLED)
    first = execute(runner, writer.plan(dict.fromkeys(range(256), 3)))
    second = execute(runner, writer.plan(dict.fromkeys(range(256), 1)))
    for row in (0, 101, 255):
        assert [first.token_ids[row], second.token_ids[row]] == solo(model, kernels, [row % 250, 3, 5], 2, **SAMPLED)
    assert torch.equal(torch.from_numpy(runner.states.num_tokens), torch.full((256,), 5))
    assert np.unique(runner.states.num_computed_tokens).tolist() == [4]
