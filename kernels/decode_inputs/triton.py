# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""One launch before a step that decodes and one behind it, a program for each place; see `reference`.

A place whose row is negative pads the step: it has no context, stores nothing and is not sampled for anybody.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import DecodeInputs, PersistentRows

_BLOCKS = 128  # entries of a block table that are copied at once


@triton.jit
def _inputs_kernel(
    step,  # [3, size] int64: row, position, index of the token to sample
    token_ids,  # [num_rows, max_model_len] int32
    block_table,  # [num_rows, max_blocks] int32
    floats,  # [3, num_rows] float32: temperature, top_p, min_p
    integers,  # [3, num_rows] int64: top_k, choice, seed
    out_ids,  # [size] int64, as all below but where it says otherwise
    out_positions,
    out_seq_lens,  # int32
    out_slots,
    out_table,  # [size, max_blocks] int32
    temperatures,  # float32
    top_ps,  # float32
    min_ps,  # float32
    top_ks,  # int32
    choices,  # int32
    seeds,
    indexes,
    num_rows,
    token_stride,
    table_stride,
    out_table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    place, size = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row, position = tl.load(step + place), tl.load(step + size + place)
    is_row = row >= 0
    row, position = tl.where(is_row, row, 0), tl.where(is_row, position, 0)
    token = tl.load(token_ids + row * token_stride + position)
    block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(out_ids + place, tl.where(is_row, token, 0).to(tl.int64))
    tl.store(out_positions + place, position)
    tl.store(out_seq_lens + place, tl.where(is_row, position + 1, 0).to(tl.int32))
    tl.store(out_slots + place, tl.where(is_row, slot, -1))
    num_blocks = tl.where(is_row, position // BLOCK_SIZE + 1, 0).to(tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        held = tl.load(block_table + row * table_stride + blocks, mask=blocks < num_blocks, other=0)
        tl.store(out_table + place * out_table_stride + blocks, held, mask=blocks < num_blocks)
    tl.store(temperatures + place, tl.where(is_row, tl.load(floats + row), 0.0))
    tl.store(top_ps + place, tl.where(is_row, tl.load(floats + num_rows + row), 0.0))
    tl.store(min_ps + place, tl.where(is_row, tl.load(floats + 2 * num_rows + row), 0.0))
    tl.store(top_ks + place, tl.where(is_row, tl.load(integers + row), 0).to(tl.int32))
    tl.store(choices + place, tl.where(is_row, tl.load(integers + num_rows + row), 0).to(tl.int32))
    tl.store(seeds + place, tl.where(is_row, tl.load(integers + 2 * num_rows + row), 0))
    tl.store(indexes + place, tl.load(step + 2 * size + place))


@triton.jit
def _append_kernel(
    step,  # [3, size] int64
    tokens,  # [size] int64
    token_ids,  # [num_rows, max_model_len] int32
    token_stride,
):
    place, size = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row, position = tl.load(step + place), tl.load(step + size + place)
    tl.store(token_ids + row * token_stride + position + 1, tl.load(tokens + place).to(tl.int32), mask=row >= 0)


def prepare_decodes(step: Tensor, rows: PersistentRows, block_size: int, out: DecodeInputs) -> None:
    """See `KernelBackend`; of a block table the entries behind a row's context stay as they were."""
    sampling = out.sampling
    _inputs_kernel[(step.shape[1],)](
        *(step, rows.token_ids, rows.block_table, rows.floats, rows.integers),
        *(out.input_ids, out.positions, out.seq_lens, out.slot_mapping, out.block_table),
        *(sampling.temperature, sampling.top_p, sampling.min_p),
        *(sampling.top_k, sampling.choice, sampling.seed, sampling.index),
        rows.floats.shape[1],
        rows.token_ids.stride(0),
        rows.block_table.stride(0),
        out.block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCKS=_BLOCKS,
        num_warps=1,
        enable_fp_fusion=False,
    )


def append_tokens(step: Tensor, tokens: Tensor, token_ids: Tensor) -> None:
    """See `KernelBackend`."""
    _append_kernel[(step.shape[1],)](step, tokens, token_ids, token_ids.stride(0), num_warps=1, enable_fp_fusion=False)
