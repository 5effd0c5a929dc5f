"""A recorded program tells how far it is while it runs, for whoever watches that a rank still gets on."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import AttentionMetadata
from kernels.cpu_backend import CpuBackend

pytestmark = [pytest.mark.unit, pytest.mark.stage0]

CAPACITY, HEADS, DIM, LONGEST = 4, 2, 8, 30


def metadata(num_tokens: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )


def test_a_program_when_it_stops_in_the_middle_then_it_has_told_of_what_ended_before() -> None:
    program = CpuBackend().program(CAPACITY, torch.float32)
    assert program is not None
    x, weight = program.buffer("x", HEADS * DIM), torch.ones(HEADS * DIM)
    query, key = (program.buffer(name, HEADS * DIM).view(CAPACITY, HEADS, DIM) for name in ("query", "key"))
    x.normal_()
    for _ in range(2):
        program.rms_norm(x, weight, program.buffer("y", HEADS * DIM), 1e-6, 0.0)
    program.rotary(query, key, torch.randn(LONGEST, 2, DIM // 2))
    program.rms_norm(x, weight, program.buffer("y", HEADS * DIM), 1e-6, 0.0)
    slots = torch.zeros(2, dtype=torch.int64)
    program.run(torch.tensor([0, LONGEST - 1]), slots, metadata(2))
    assert program.num_done == 4
    with pytest.raises(IndexError, match="operation 2"):
        program.run(torch.tensor([0, LONGEST]), slots, metadata(2))
    assert program.num_done == 4 + 2
