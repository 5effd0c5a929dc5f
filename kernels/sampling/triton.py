# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Sampling in Triton, without a sort of the vocabulary: `kernels.sampling` states the definition.

None of the kernels waits for the host, and which are launched does not depend on the rows:
1. five find which tokens top_k, top_p and min_p may keep (`triton_candidates`);
2. one program per row cuts exactly, and draws if all that is kept was found (`triton_choice`): the usual case;
3. of all other rows many programs add the noise to the kept logits and take the best of their slice;
4. one program per row takes the best of the slices, and says whether the row was bad: whoever read all of it, 1 or 3,
   has noted what it saw on the way.
Rows that ask for no filter leave 1 and 2 at once, those that are done leave 3. All sums are of integers, and the
maximum over (value, lowest id) in any order is the same: so a row's token depends neither on other rows nor on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.sampling.triton_candidates import (
    GROUPS_A_PROGRAM,
    bound_kernel,
    gather_kernel,
    maxima_kernel,
    round_kernel,
)
from kernels.sampling.triton_choice import choice_kernel
from kernels.sampling.triton_numbers import gumbel, key_of, noise_words, scaled, top_of, without_nan
from kernels.triton_launch import INTERPRETED, next_power_of_2

_SLICE = 4096  # ids per program of the kernel that draws from the whole vocabulary
_MOST_GROUPS = 2048  # of a row: one program looks at the maxima of all of them
_LEAST_GROUP = 64  # ids: a program has 32 groups, and is to be worth its start
_CAPACITY = 8192  # candidates of a row
_GATHER_BLOCK = 4096  # ids per iteration
# Ids, and candidates, per iteration: sixteen sums for each of them stay in registers. Any number gives the same bits.
_ROUND_BLOCK, _CHOICE_BLOCK = (4096, 4096) if INTERPRETED else (256, 256)


@triton.jit
def _noise(groups, seed, choice, index):
    """Gumbel noise of ids 4 * groups + (0, 1, 2, 3): [len(groups), 4]."""
    words0, words1, words2, words3 = noise_words(groups, seed, choice, index)
    lane = tl.arange(0, 4)[None, :]
    low = tl.where(lane == 0, words0[:, None], words1[:, None])
    high = tl.where(lane == 2, words2[:, None], words3[:, None])
    return gumbel(tl.where(lane < 2, low, high))


@triton.jit
def _slice_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    seeds,  # [num_rows] int64
    choices,  # [num_rows] int32
    indexes,  # [num_rows] int64
    last_keys,  # [num_rows] int32
    last_ids,  # [num_rows] int32
    largests,  # [num_rows] float32
    tokens,  # [num_rows] int64: rows whose token is not negative are done
    best_values,  # [num_rows, num_slices] float32, written
    best_ids,  # [num_rows, num_slices] int32, written
    tops,  # [num_rows, num_slices] float32, written: see `top_of`
    row_stride,
    vocab_size,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) < 0:
        groups = tl.program_id(1) * (SLICE // 4) + tl.arange(0, SLICE // 4)
        ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
        temperature = tl.load(temperatures + row)
        given = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        if temperature == 0.0:
            values = scaled(without_nan(given), 1.0)
        else:
            values = scaled(without_nan(given), temperature)
            keys = key_of(values)
            last_key = tl.load(last_keys + row)
            kept = (keys > last_key) | ((keys == last_key) & (ids <= tl.load(last_ids + row)))
            min_p = tl.load(min_ps + row)
            if min_p > 0.0:
                kept = kept & (tl.exp(values - tl.load(largests + row)) >= min_p)
            noise = _noise(groups, tl.load(seeds + row), tl.load(choices + row), tl.load(indexes + row))
            values = tl.where(kept, values + noise, float("-inf"))
        best = tl.max(tl.max(values, axis=1), axis=0)
        tied_ids = tl.where((values == best) & (ids < vocab_size), ids, vocab_size)
        slot = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_values + slot, best)
        tl.store(best_ids + slot, tl.min(tl.min(tied_ids, axis=1), axis=0))
        tl.store(tops + slot, top_of(given))


@triton.jit
def _best_kernel(
    best_values,  # [num_rows, num_slices] float32
    best_ids,  # [num_rows, num_slices] int32
    slice_tops,  # [num_rows, num_slices] float32, of rows whose token is negative
    tops,  # [num_rows, num_programs] float32, of the others
    tokens,  # [num_rows] int64, changed where negative
    is_bad,  # [num_rows] bool, written
    num_slices,
    num_programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ZERO: tl.constexpr,  # bad rows get token 0, whatever was drawn
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        slices = tl.arange(0, BLOCK)
        mask = slices < num_slices
        values = tl.load(best_values + row * num_slices + slices, mask=mask, other=float("-inf"))
        ids = tl.load(best_ids + row * num_slices + slices, mask=mask, other=2147483647)
        best = tl.max(values, axis=0)
        token = tl.min(tl.where(values == best, ids, 2147483647), axis=0).to(tl.int64)
        seen = tl.load(slice_tops + row * num_slices + slices, mask=mask, other=float("-inf"))
        top = tl.max(seen, axis=0)
    else:
        programs = tl.arange(0, PROGRAMS)
        places = tops + row * num_programs + programs
        top = tl.max(tl.load(places, mask=programs < num_programs, other=float("-inf")), axis=0)
    bad = (top == float("inf")) | (top == float("-inf"))
    if ZERO:
        token = tl.where(bad, 0, token)
    tl.store(tokens + row, token)
    tl.store(is_bad + row, bad)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a vocabulary is divided; a function of its size alone."""

    group: int  # ids next to each other with one maximum
    num_groups: int
    most_groups: int  # num_groups rounded up to a power of two
    num_programs: int  # of the kernels that find candidates, for each row
    id_bits: int  # of an id in an order

    @classmethod
    def of(cls, vocab_size: int) -> _Shape:
        """For ids 0 ... vocab_size - 1."""
        group = next_power_of_2(triton.cdiv(vocab_size, _MOST_GROUPS), _LEAST_GROUP)
        num_groups = triton.cdiv(vocab_size, group)
        return cls(
            group=group,
            num_groups=num_groups,
            most_groups=next_power_of_2(num_groups, GROUPS_A_PROGRAM),
            num_programs=triton.cdiv(num_groups, GROUPS_A_PROGRAM),
            id_bits=next_power_of_2(vocab_size).bit_length() - 1,
        )


class _Cuts(NamedTuple):
    """Where the kept of each row end. `tokens` are final where they are not negative."""

    last_keys: Tensor  # [B] int32
    last_ids: Tensor  # [B] int32
    largests: Tensor  # [B] float32, not written where no filter is
    tokens: Tensor  # [B] int64


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [B, V] float32 -> [B] int64 token ids."""
    return _draw(logits, params, bad_is_zero=False)[0]


def choose(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The same, and which rows are bad [B] bool: see `KernelBackend.choose`. No launch more than `sample` has."""
    return _draw(logits, params, bad_is_zero=True)


def _draw(logits: Tensor, params: SamplingTensors, *, bad_is_zero: bool) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    is_bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device), is_bad
    num_programs, num_slices = _Shape.of(vocab_size).num_programs, triton.cdiv(vocab_size, _SLICE)
    tops = torch.empty(num_rows, num_programs, dtype=torch.float32, device=logits.device)
    cuts = _filter(logits, params, tops)
    best_values = torch.empty(num_rows, num_slices, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_slices, dtype=torch.int32, device=logits.device)
    slice_tops = torch.empty(num_rows, num_slices, dtype=torch.float32, device=logits.device)
    _slice_kernel[(num_rows, num_slices)](
        logits,
        params.temperature,
        params.min_p,
        params.seed,
        params.choice,
        params.index,
        *cuts,
        best_values,
        best_ids,
        slice_tops,
        logits.stride(0),
        vocab_size,
        SLICE=_SLICE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _best_kernel[(num_rows,)](
        best_values,
        best_ids,
        slice_tops,
        tops,
        cuts.tokens,
        is_bad,
        num_slices,
        num_programs,
        BLOCK=next_power_of_2(num_slices),
        PROGRAMS=next_power_of_2(num_programs),
        ZERO=bad_is_zero,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return cuts.tokens, is_bad


def _filter(logits: Tensor, params: SamplingTensors, tops: Tensor) -> _Cuts:
    """What top_k and top_p leave, and the tokens of rows that could be drawn from few candidates.

    tops [B, num_programs] float32 is written for rows that have a filter.
    """
    num_rows, vocab_size = logits.shape
    shape = _Shape.of(vocab_size)
    group, most_groups, num_programs = shape.group, shape.most_groups, shape.num_programs

    def scratch(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=logits.device)

    maxima = scratch(torch.float32, num_rows, shape.num_groups)
    front_groups = scratch(torch.int64, num_rows, most_groups)
    lows, largests = scratch(torch.float32, num_rows), scratch(torch.float32, num_rows)
    masses = scratch(torch.int64, 2, num_rows, num_programs, 16)
    counts = scratch(torch.int32, 2, num_rows, num_programs, 16)
    lists, lengths = scratch(torch.int64, num_rows, _CAPACITY), scratch(torch.int32, num_rows)
    cuts = _Cuts(
        scratch(torch.int32, num_rows), scratch(torch.int32, num_rows), largests, scratch(torch.int64, num_rows)
    )
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    sizes = (logits.stride(0), vocab_size)
    rounds: dict[str, Any] = {"PROGRAMS": next_power_of_2(num_programs), "CAPACITY": _CAPACITY}
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}

    grid, block = (num_rows, num_programs), max(group, min(_GATHER_BLOCK, GROUPS_A_PROGRAM * group))
    maxima_kernel[grid](logits, *filters, maxima, tops, *sizes, shape.num_groups, GROUP=group, **options)
    bound_kernel[(num_rows,)](
        *filters, maxima, front_groups, lows, largests, lengths, vocab_size, shape.num_groups,
        MOST_GROUPS=most_groups, **options,
    )  # fmt: skip
    found = (front_groups, lows, largests, masses, counts)
    for number in range(2):
        round_kernel[grid](
            logits, *filters, *found, *sizes, number,
            MOST_GROUPS=most_groups, GROUP=group, BLOCK=max(group, min(_ROUND_BLOCK, block)), **rounds,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    gather_kernel[grid](
        logits, *filters, *found, lists, lengths, *sizes,
        MOST_GROUPS=most_groups, GROUP=group, ID_BITS=shape.id_bits, BLOCK=block, **rounds, **options,
    )  # fmt: skip
    choice_kernel[(num_rows,)](
        logits, *filters, params.seed, params.choice, params.index, lows, largests, masses, counts, lists, lengths,
        cuts.last_keys, cuts.last_ids, cuts.tokens, *sizes, num_programs,
        ID_BITS=shape.id_bits, BLOCK=_CHOICE_BLOCK, **rounds, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return cuts
