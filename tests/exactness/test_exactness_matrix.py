"""A token depends on weights, history, parameters, seed and position alone: a short run of the matrix."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.exactness.matrix import Circumstance, Runner, compare, draw_circumstance, main, make_cases, run_pairs

pytestmark = pytest.mark.stage1

SEED = 1
NUM_CASES = 12
NUM_CIRCUMSTANCES = 8


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype"),
    [
        ("float32", "none", "auto"),
        ("bfloat16", "none", "auto"),
        ("float32", "int8", "auto"),
        ("bfloat16", "int8", "auto"),
        ("bfloat16", "int4", "auto"),
        ("bfloat16", "w8a8", "auto"),
        ("float32", "none", "int8"),
        ("bfloat16", "int8", "int8"),
    ],
)
def test_given_requests_over_all_features_when_circumstances_vary_then_every_bit_is_the_same(
    dtype: str, quantization: str, kv_cache_dtype: str
) -> None:
    runner = Runner("demo", dtype, quantization, kv_cache_dtype)
    cases = make_cases(NUM_CASES, runner.vocab_size(), SEED)
    references = runner.references(cases)
    rng = random.Random(SEED)
    crowded = Circumstance(max_num_seqs=16, num_blocks=32, prefix_caching=True, steps_in_flight=2, losses=2)
    hows = [crowded, replace(crowded, max_num_batched_tokens=16, threads=2)]
    hows += [draw_circumstance(rng) for _ in range(NUM_CIRCUMSTANCES)]
    differences = [line for how in hows for line in compare(runner, cases, references, how, rng)]
    assert not differences, differences[0]


def test_given_another_seed_when_compared_then_the_matrix_sees_it() -> None:
    runner = Runner("demo", "float32")
    cases = [case for case in make_cases(30, runner.vocab_size(), SEED) if case.params.temperature >= 1.0][:2]
    references = runner.references(cases)
    others = [replace(case, params=replace(case.params, seed=(case.params.seed or 0) ^ 1)) for case in cases]
    assert list(compare(runner, others, references, Circumstance(max_num_seqs=4), random.Random(0)))


def test_given_a_time_limit_when_it_is_over_then_the_pairs_so_far_are_told_and_none_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner = Runner("demo", "float32")
    cases = make_cases(4, runner.vocab_size(), SEED)
    asked: list[float] = []

    def is_over(share: float) -> bool:  # in the middle of the references, and after two circumstances
        asked.append(share)
        return asked.count(share) > 2 if share == 1.0 else len(asked) > 1

    assert run_pairs(runner, cases, 1000, SEED, is_over) == (2, 4, 0)
    assert capsys.readouterr().out.splitlines() == ["2 pairs so far", "4 pairs so far"]
    assert main(["--cases", "2", "--seconds", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 pairs, 0 differences")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_given_requests_over_all_features_when_two_ranks_compute_them_then_the_tokens_are_those_of_one(
    quantization: str,
) -> None:
    options = ["--cases", "60", "--quantization", quantization]
    command = [sys.executable, "-m", "tests.exactness.ranks", *options]  # Ray belongs to a process
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("60 cases, ")
