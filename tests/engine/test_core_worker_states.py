"""The persistent rows, what a batch reads from them, and the plans that they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from novainfer.errors import EngineError
from novainfer.protocol.columns import column
from novainfer.protocol.step import StepPlan
from tests.builders import CPU, VOCAB_SIZE, PlanWriter, limits, new_row
from workers.input_batch import InputBatch, StepRows
from workers.request_states import RequestStates

pytestmark = pytest.mark.stage0


def plan(rows: list[int], counts: list[int], **fields: Any) -> StepPlan:
    return StepPlan(epoch=1, step=0, rows=column(rows), num_new_tokens=column(counts), **fields)


def states_with(*rows: Any, **values: int) -> RequestStates:
    states = RequestStates(limits(**values), CPU)
    states.apply(plan([], [], new_rows=list(rows)))
    return states


def built(states: RequestStates, step: StepPlan) -> tuple[StepRows, InputBatch]:
    rows = StepRows.of(states, step)
    return rows, InputBatch.build(states, rows)


def run(states: RequestStates, step: StepPlan, token: int) -> tuple[StepRows, InputBatch]:
    """What a step does to the rows, with `token` sampled everywhere."""
    states.apply(step)
    rows, batch = built(states, step)
    sampled = torch.full((len(rows.sample_rows),), token)
    states.append(rows.sample_rows, sampled)
    states.advance(rows.rows, rows.num_new_tokens)
    return rows, batch


def test_mixed_plan_when_built_then_batch_has_every_index() -> None:
    prompt = list(range(20))
    states = states_with(new_row(5, prompt, [7, 3]), new_row(2, [40, 41], [9]))
    run(states, plan([2, 5], [2, 3][:2]), 50)
    rows, batch = built(states, plan([2, 5], [1, 17]))
    metadata = batch.forward.metadata
    assert batch.input_ids.tolist() == [50, *prompt[3:]]
    assert batch.positions.tolist() == [2, *range(3, 20)]
    assert batch.forward.slot_mapping.tolist() == [9 * 16 + 2, *range(7 * 16 + 3, 8 * 16), *range(3 * 16, 3 * 16 + 4)]
    assert metadata.query_start_loc.tolist() == [0, 1, 18]
    assert metadata.seq_lens.tolist() == [3, 20]
    assert metadata.block_table.tolist() == [[9, 0], [7, 3]]
    assert (metadata.num_decodes, metadata.max_query_len, metadata.max_seq_len) == (1, 17, 20)
    assert rows.sample_rows.tolist() == [2, 5]
    kept = batch.forward.kept
    assert kept is not None
    assert kept.index.tolist() == [0, 17]
    assert kept.metadata.query_start_loc.tolist() == [0, 1, 2]
    assert kept.metadata.seq_lens.tolist() == [3, 20]
    assert kept.metadata.block_table.tolist() == [[9, 0], [7, 3]]
    assert (kept.metadata.num_decodes, kept.metadata.max_query_len, kept.metadata.max_seq_len) == (2, 1, 20)
    assert batch.sample_hidden is None  # all


def test_unfinished_prompt_when_built_then_only_complete_rows_sample() -> None:
    states = states_with(new_row(0, list(range(9)), [0]), new_row(1, [1, 2, 3], [1]))
    rows, batch = built(states, plan([0, 1], [5, 3]))
    assert rows.sample_rows.tolist() == [1]
    kept = batch.forward.kept
    assert kept is not None
    assert kept.index.tolist() == [7]
    assert kept.metadata.block_table.tolist() == [[1]]
    assert batch.sample_hidden is None


def test_nothing_sampled_when_built_then_no_token_is_kept() -> None:
    states = states_with(new_row(0, list(range(9)), [0]))
    kept = built(states, plan([0], [5]))[1].forward.kept
    assert kept is not None
    assert kept.index.tolist() == []
    assert (kept.metadata.num_decodes, kept.metadata.max_seq_len) == (0, 0)


def test_decodes_alone_when_built_then_all_tokens_are_kept() -> None:
    states = states_with(new_row(0, [1, 2, 3], [4]))
    run(states, plan([0], [3]), 33)
    assert built(states, plan([0], [1]))[1].forward.kept is None


def test_sampled_token_when_next_step_is_built_then_it_is_read_from_the_row() -> None:
    states = states_with(new_row(0, [1, 2, 3], [4]))
    run(states, plan([0], [3]), 33)
    _, batch = run(states, plan([0], [1]), 34)
    assert batch.input_ids.tolist() == [33]
    assert states.token_ids[0, :5].tolist() == [1, 2, 3, 33, 34]
    assert states.output_len(np.array([0])).tolist() == [2]


def test_resumed_row_when_taken_then_output_continues_after_the_boundary() -> None:
    states = states_with(new_row(3, [1, 2, 3, 4, 5], [0], prompt_len=2, num_computed_tokens=4))
    _, batch = built(states, plan([3], [1]))
    assert batch.input_ids.tolist() == [5]
    assert batch.forward.metadata.seq_lens.tolist() == [5]
    assert states.output_len(np.array([3])).tolist() == [3]


def test_freed_row_when_taken_again_then_nothing_of_the_former_owner_is_left() -> None:
    first = new_row(
        0,
        [1] * 40,
        [1, 2, 3],
        temperature=0.5,
        top_k=3,
        seed=9,
        logprobs=2,
        banned_token_ids=(4,),
        frequency_penalty=1.0,
    )
    reused, fresh = states_with(first), RequestStates(limits(), CPU)
    second = new_row(0, [5, 6], [8])
    reused.apply(plan([], [], freed_rows=[0], new_rows=[second]))
    fresh.apply(plan([], [], new_rows=[second]))
    for name in ("num_tokens", "num_computed_tokens", "prompt_len", "num_row_blocks", "in_use"):
        assert getattr(reused, name).tolist() == getattr(fresh, name).tolist(), name
    for name, value in vars(fresh.sampling).items():
        if isinstance(value, np.ndarray):
            assert getattr(reused.sampling, name).tolist() == value.tolist(), name
    assert reused.sampling.rules[0] is None
    assert reused.token_ids[0, :2].tolist() == [5, 6]


def test_prompt_logprobs_when_chunked_then_spans_tile_the_prompt_after_its_first_token() -> None:
    states = states_with(new_row(0, list(range(10)), [0], prompt_logprobs=2))
    spans = [run(states, plan([0], [count]), 1)[0].prompt_spans for count in (4, 5, 1, 1)]
    assert [(s.start, s.count, s.first_hidden, s.num_top) for chunk in spans for s in chunk] == [
        (1, 4, 0, 2),
        (5, 5, 0, 2),
    ]


def test_prompt_logprobs_when_prefix_is_cached_then_entries_start_after_it() -> None:
    states = states_with(new_row(0, list(range(20)), [0, 1], prompt_logprobs=0, num_computed_tokens=16))
    (span,) = StepRows.of(states, plan([0], [4])).prompt_spans
    assert (span.start, span.count) == (17, 3)


@pytest.mark.parametrize(
    "bad",
    [
        plan([1], [1]),
        plan([0], [4]),
        plan([0], [0]),
        plan([0, 0], [1, 1]),
        plan([0], [1, 1]),
        plan([8], [1]),
        plan([-1], [1]),
        plan([2, 0], [2, 1]),
        plan([3], [17]),
        plan([], [], freed_rows=[1]),
        plan([], [], freed_rows=[0, 0]),
        plan([], [], new_rows=[new_row(0, [1], [3])]),
        plan([], [], new_rows=[new_row(9, [1], [3])]),
        plan([], [], new_rows=[new_row(1, [], [3])]),
        plan([], [], new_rows=[new_row(1, [1] * 129, [3])]),
        plan([], [], new_rows=[new_row(1, [VOCAB_SIZE], [3])]),
        plan([], [], new_rows=[new_row(1, [-1], [3])]),
        plan([], [], new_rows=[new_row(1, [1], [64])]),
        plan([], [], new_rows=[new_row(1, [1], [-1])]),
        plan([], [], new_rows=[new_row(1, [1, 2], [3], num_computed_tokens=2)]),
        plan([], [], new_rows=[new_row(1, [1, 2], [3], prompt_len=3)]),
        plan([], [], new_rows=[new_row(1, [1, 2], [3], prompt_len=0)]),
        plan([], [], new_rows=[new_row(1, [1, 2], list(range(9)))]),
        plan([], [], new_rows=[new_row(1, [1], [3], seed=None)]),
        plan([], [], grown_rows=column([1]), grown_blocks=column([5])),
        plan([], [], grown_rows=column([0]), grown_blocks=column([64])),
        plan([], [], grown_rows=column([0, 2]), grown_blocks=column([5])),
        plan([], [], copy_src=[1], copy_dst=[]),
        plan([], [], copy_src=[1, 2], copy_dst=[3, 3]),
        plan([], [], copy_src=[1], copy_dst=[64]),
    ],
)
def test_impossible_plan_when_applied_then_engine_error(bad: StepPlan) -> None:
    states = states_with(new_row(0, [1, 2, 3], [0]), new_row(2, [1, 2], [1]), new_row(3, list(range(20)), [2]))
    with pytest.raises(EngineError):
        states.apply(bad)


def test_step_above_the_token_budget_when_applied_then_engine_error() -> None:
    states = states_with(new_row(0, [1, 2, 3], [0]), max_num_batched_tokens=2)
    with pytest.raises(EngineError, match="at most 2"):
        states.apply(plan([0], [3]))


def test_row_at_max_model_len_when_sampled_again_then_engine_error() -> None:
    states = states_with(new_row(0, [1] * 31, [0, 1]), max_model_len=32)
    run(states, plan([0], [31]), 1)
    with pytest.raises(EngineError, match="max_model_len"):
        states.apply(plan([0], [1]))


def test_writer_when_rows_grow_then_every_plan_is_accepted() -> None:
    writer, states = PlanWriter(), RequestStates(limits(), CPU)
    writer.add(1, [1] * 15)
    writer.add(0, [2])
    for step in (writer.plan({1: 15, 0: 1}), writer.plan({1: 1, 0: 1}), replace(writer.plan({0: 1, 1: 1}), epoch=7)):
        assert run(states, step, 5)[0].sample_rows.tolist() == step.rows.tolist()
    assert states.num_row_blocks[:2].tolist() == [1, 2]
