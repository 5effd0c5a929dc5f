"""A short exactness matrix over Triton's kernels, interpreted: sums that are split, chunks that are merged."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

pytest.importorskip("triton")

from bench.make_checkpoint import SHAPES, make_checkpoint
from kernels.attention_input.reference import attention_input as torch_attention_input
from kernels.backend import AttentionInput
from kernels.linear.triton import CHUNK as COLUMNS
from kernels.paged_attention.triton_decode import CHUNK as TOKENS
from kernels.reference_backend import ReferenceBackend
from kernels.triton_backend import TritonBackend
from kernels.triton_launch import INTERPRETED
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams
from tests.exactness.matrix import Circumstance, Runner, compare
from workers import worker

pytestmark = [
    pytest.mark.stage1,
    pytest.mark.skipif(not INTERPRETED, reason="`python -m tests.exactness.matrix --device cuda` does this on a GPU"),
]

SHAPE = SHAPES["tiny-wide"]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=2, logprobs=3, ignore_eos=True)


def attention_input(backend: TritonBackend, heads: Tensor, given: AttentionInput) -> Tensor:
    """The kernel's work, row by row as well, by torch: interpreted, its programs would take half of the time."""
    size = given.key_cache.shape[2]
    blocks, slots = given.slot_mapping // size, given.slot_mapping % size

    class Kernels(ReferenceBackend):
        def store_kv(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
            keys[blocks, :, slots], values[blocks, :, slots] = key, value

    return torch_attention_input(Kernels(), heads, given)


def test_given_sums_in_parts_and_an_odd_vocabulary_when_company_and_chunks_vary_then_every_bit_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonBackend, "attention_input", attention_input)
    monkeypatch.setattr(worker, "_WARM_UP_TOKENS", 1)
    assert SHAPE.hidden > COLUMNS
    assert SHAPE.vocab % 2
    make_checkpoint(SHAPE, tmp_path)
    runner = Runner(str(tmp_path), "float32", kernel_backend="triton")
    rng = random.Random(1)
    long = [rng.randrange(SHAPE.vocab) for _ in range(TOKENS + 1)]
    cases = [
        AddRequest("long", long, PARAMS),
        AddRequest("short", long[:3], replace(PARAMS, temperature=0.0)),
    ]
    references = runner.references(cases)
    how = Circumstance(max_num_seqs=2, max_num_batched_tokens=200, block_size=32, steps_in_flight=2)
    differences = list(compare(runner, cases, references, how, rng))
    assert not differences, differences[0]
