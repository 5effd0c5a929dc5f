# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Sampling in Triton, without a sort: `kernels.sampling` states the definition.

Three kernels, none of which waits for the host:
1. one program per row finds the last id that top_k and top_p keep, by a search over the bits of an order-preserving
   integer key (rows that need neither leave at once);
2. many programs per row add the noise to the kept logits and take the best of their slice;
3. one program per row takes the best of the slices.
All sums are taken in one fixed order, and the maximum over (value, lowest id) in any order is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.triton_launch import next_power_of_2, warps_for

_SLICE = 4096  # ids per program of the second kernel
_SEARCH_BLOCK = 4096  # ids per iteration of the first kernel


@triton.jit
def philox4x32_10(c0, c1, c2, c3, k0, k1):
    """Ten Philox rounds over uint32 tensors of one shape (Random123's Philox4x32)."""
    for _round in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        # in 64 bits, since the interpreter's NumPy would warn of the intended overflow
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _gumbel(bits):
    """uint32 bits -> Gumbel noise in float32."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    # log1p(-u) = log(w) * u / (1 - w) with w = 1 - u cancels the rounding of w (Kahan); for w = 1 it is -u
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * uniform / tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(exponential)


@triton.jit
def _scaled(logits_row, ids, vocab_size, temperature):
    """(x, key) of the ids given: x = logits / temperature, -inf for NaN and outside the vocabulary; and an int32 in the
    order of x, where both zeros are one key."""
    logits = tl.load(logits_row + ids, mask=ids < vocab_size, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))
    x = tl.minimum(tl.div_rn(logits, temperature), 3.4028234663852886e38)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _largest(logits_row, vocab_size, temperature, BLOCK: tl.constexpr):
    """max x of the row."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x, _key = _scaled(logits_row, start + tl.arange(0, BLOCK), vocab_size, temperature)
        largest = tl.maximum(largest, x)
    return tl.max(largest, axis=0)


@triton.jit
def _weigh(
    logits_row, start, vocab_size, temperature, largest, last_key, last_id, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """(ids, keys, weights) of one block. The weight is the mass, or 1; it is 0 after (last_key, last_id)."""
    ids = start + tl.arange(0, BLOCK)
    x, key = _scaled(logits_row, ids, vocab_size, temperature)
    kept = (ids < vocab_size) & ((key > last_key) | ((key == last_key) & (ids <= last_id)))
    weight = tl.where(kept, 1.0, 0.0)
    if BY_MASS:
        weight = weight * tl.exp(x - largest)
    return ids, key, weight


@triton.jit
def _find_key(
    logits_row, vocab_size, temperature, largest, last_key, last_id, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key t with sum(weights of keys >= t) >= target, found two bits at a time.

    A sum of non-negative floats in a fixed order never shrinks when an element grows, so rounding cannot mislead
    the search.
    """
    found = tl.full([], -2147483648, tl.int32)
    unit = tl.full([], 1073741824, tl.int32)
    for _step in range(16):
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        key1 = found + unit
        key2 = key1 + unit
        key3 = key2 + unit
        for start in range(0, vocab_size, BLOCK):
            _ids, key, weight = _weigh(
                logits_row, start, vocab_size, temperature, largest, last_key, last_id, BY_MASS, BLOCK
            )
            sum1 += tl.where(key >= key1, weight, 0.0)
            sum2 += tl.where(key >= key2, weight, 0.0)
            sum3 += tl.where(key >= key3, weight, 0.0)
        digit = (
            (tl.sum(sum1, axis=0) >= target).to(tl.int32)
            + (tl.sum(sum2, axis=0) >= target).to(tl.int32)
            + (tl.sum(sum3, axis=0) >= target).to(tl.int32)
        )
        found += digit * unit
        unit = unit // 4
    return found


@triton.jit
def _find_last(
    logits_row, vocab_size, temperature, largest, last_key, last_id, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The (key, id) at which the weights, added in the order from the front, reach `target` > 0."""
    found = _find_key(logits_row, vocab_size, temperature, largest, last_key, last_id, target, BY_MASS, BLOCK)
    above = tl.zeros([BLOCK], tl.float32)
    tied = tl.zeros([BLOCK], tl.float32)
    tied_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        _ids, key, weight = _weigh(
            logits_row, start, vocab_size, temperature, largest, last_key, last_id, BY_MASS, BLOCK
        )
        above += tl.where(key > found, weight, 0.0)
        tied += tl.where((key == found) & (weight > 0.0), 1.0, 0.0)
        tied_weight = tl.maximum(tied_weight, tl.where(key == found, weight, 0.0))
    missing = (target - tl.sum(above, axis=0)) / tl.maximum(tl.max(tied_weight, axis=0), 1e-37)
    needed = tl.maximum(tl.minimum(tl.ceil(missing), tl.sum(tied, axis=0)), 1.0).to(tl.int32)
    before = tl.full([], 0, tl.int32)
    found_id = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids, key, weight = _weigh(
            logits_row, start, vocab_size, temperature, largest, last_key, last_id, BY_MASS, BLOCK
        )
        is_tied = ((key == found) & (weight > 0.0)).to(tl.int32)
        rank = before + tl.cumsum(is_tied, axis=0)
        found_id += tl.sum(tl.where((rank == needed) & (is_tied == 1), ids, 0), axis=0)
        before += tl.sum(is_tied, axis=0)
    return found, found_id


@triton.jit
def _filter_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    last_keys,  # [num_rows] int32, written: order key of the last id kept
    last_ids,  # [num_rows] int32, written: the last id kept
    largests,  # [num_rows] float32, written: max x, where min_p needs it
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    last_key = tl.full([], -2147483648, tl.int32)
    last_id = tl.full([], 0, tl.int32) + vocab_size
    largest = tl.full([], 0.0, tl.float32)
    if (temperature > 0.0) & (has_top_k | has_top_p | (tl.load(min_ps + row) > 0.0)):
        largest = _largest(logits_row, vocab_size, temperature, BLOCK)
        if largest > float("-inf"):
            if has_top_k:
                last_key, last_id = _find_last(
                    logits_row, vocab_size, temperature, largest, last_key, last_id, top_k.to(tl.float32), False, BLOCK
                )
            if has_top_p:
                masses = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab_size, BLOCK):
                    _ids, _key, weight = _weigh(
                        logits_row, start, vocab_size, temperature, largest, last_key, last_id, True, BLOCK
                    )
                    masses += weight
                target = tl.maximum(top_p * tl.sum(masses, axis=0), 1e-30)  # at least one id is kept
                last_key, last_id = _find_last(
                    logits_row, vocab_size, temperature, largest, last_key, last_id, target, True, BLOCK
                )
    tl.store(last_keys + row, last_key)
    tl.store(last_ids + row, last_id)
    tl.store(largests + row, largest)


@triton.jit
def _noise(groups, seed, choice, index):
    """Gumbel noise of ids 4 * groups + (0, 1, 2, 3): [len(groups), 4]."""
    zero = tl.zeros_like(groups).to(tl.uint32)
    words0, words1, words2, words3 = philox4x32_10(
        groups.to(tl.uint32),
        zero + index.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    lane = tl.arange(0, 4)[None, :]
    low = tl.where(lane == 0, words0[:, None], words1[:, None])
    high = tl.where(lane == 2, words2[:, None], words3[:, None])
    return _gumbel(tl.where(lane < 2, low, high))


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
    best_values,  # [num_rows, num_slices] float32, written
    best_ids,  # [num_rows, num_slices] int32, written
    row_stride,
    vocab_size,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * (SLICE // 4) + tl.arange(0, SLICE // 4)
    ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
    temperature = tl.load(temperatures + row)
    logits_row = logits + row * row_stride
    if temperature == 0.0:
        values, _keys = _scaled(logits_row, ids, vocab_size, 1.0)
    else:
        values, keys = _scaled(logits_row, ids, vocab_size, temperature)
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


@triton.jit
def _best_kernel(
    best_values,  # [num_rows, num_slices] float32
    best_ids,  # [num_rows, num_slices] int32
    tokens,  # [num_rows] int64, written
    num_slices,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, BLOCK)
    mask = slices < num_slices
    values = tl.load(best_values + row * num_slices + slices, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + row * num_slices + slices, mask=mask, other=2147483647)
    best = tl.max(values, axis=0)
    tl.store(tokens + row, tl.min(tl.where(values == best, ids, 2147483647), axis=0).to(tl.int64))


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [B, V] float32 -> [B] int64 token ids."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    last_keys = torch.empty(num_rows, dtype=torch.int32, device=device)
    last_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    largests = torch.empty(num_rows, dtype=torch.float32, device=device)
    search_block = min(_SEARCH_BLOCK, next_power_of_2(vocab_size, 32))
    _filter_kernel[(num_rows,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        last_keys,
        last_ids,
        largests,
        logits.stride(0),
        vocab_size,
        BLOCK=search_block,
        num_warps=warps_for(search_block),
        enable_fp_fusion=False,
    )
    num_slices = triton.cdiv(vocab_size, _SLICE)
    best_values = torch.empty(num_rows, num_slices, dtype=torch.float32, device=device)
    best_ids = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    _slice_kernel[(num_rows, num_slices)](
        logits,
        params.temperature,
        params.min_p,
        params.seed,
        params.choice,
        params.index,
        last_keys,
        last_ids,
        largests,
        best_values,
        best_ids,
        logits.stride(0),
        vocab_size,
        SLICE=_SLICE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _best_kernel[(num_rows,)](
        best_values,
        best_ids,
        tokens,
        num_slices,
        BLOCK=next_power_of_2(num_slices),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens
