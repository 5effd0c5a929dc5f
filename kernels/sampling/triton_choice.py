# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Among the candidates of a row: where top_k and top_p end, exactly, and the draw if all that is kept is in the list.

One program a row. Where the list is not all that is kept (a flat distribution) the end is handed on, and the draw goes
over the whole vocabulary. Where there was no room for the candidates (more equal logits than that, or a top_k larger
than the number of groups) the program searches the whole row: slow, and rare.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton_candidates import LISTED, PLAIN, ROUNDS, at_lane, interval, kind_of
from kernels.sampling.triton_numbers import (
    LEAST_ORDER,
    first_order,
    id_of_order,
    key_of,
    key_of_order,
    load_x,
    mass_of,
    noise_of,
    order_of,
    share_of,
    x_of_key,
)


@triton.jit
def _orders(
    list_row, length, logits_row, vocab_size, temperature, is_listed, start, ID_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK orders from the list, or of the whole row; LEAST_ORDER behind the end."""
    places = start + tl.arange(0, BLOCK)
    if is_listed:
        orders = tl.load(list_row + places, mask=places < length, other=LEAST_ORDER)
    else:
        x = load_x(logits_row, places, places < vocab_size, temperature)
        orders = order_of(x, places, ID_BITS)
    return orders


@triton.jit
def _weights(orders, least, largest, by_mass, ID_BITS: tl.constexpr):
    """int64: the mass, or 1, of orders that are not below `least`; else 0."""
    weights = (orders > LEAST_ORDER).to(tl.int64)
    if by_mass:
        weights = mass_of(x_of_key(key_of_order(orders, ID_BITS)), largest)
    return tl.where(orders >= least, weights, 0)


@triton.jit
def _last_order(
    list_row, length, logits_row, vocab_size, temperature, is_listed, largest, by_mass,
    least, low, high, above, target, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A number c in [low, high) such that orders >= c are the fewest, from the front, with above + their weights >=
    target; low if there are none. Found four bits at a time, until one order is left between what is too little and
    what is enough. Orders below `least` count for nothing; `above` is the weight of what is not looked at."""
    size = tl.where(is_listed, length, vocab_size)
    lane = tl.arange(0, 16)
    count_low = tl.full([], 2147483647, tl.int32)
    count_high = tl.full([], 0, tl.int32)
    while (high - low > 1) & (count_low - count_high > 1):
        step = (high - low + 15) // 16
        thresholds = low + step * lane
        weight_sums = tl.zeros([16, BLOCK], tl.int64)
        count_sums = tl.zeros([16, BLOCK], tl.int32)
        for start in range(0, size, BLOCK):
            orders = _orders(list_row, length, logits_row, vocab_size, temperature, is_listed, start, ID_BITS, BLOCK)
            weights = _weights(orders, least, largest, by_mass, ID_BITS)
            reaches = orders[None, :] >= tl.maximum(thresholds, least)[:, None]
            weight_sums += tl.where(reaches, weights[None, :], 0)
            count_sums += reaches.to(tl.int32)
        sums = tl.sum(weight_sums, axis=1)
        counts = tl.sum(count_sums, axis=1)
        reached = tl.sum(((above + sums >= target) & (lane > 0) & (thresholds < high)).to(tl.int32), axis=0)
        low += step * reached
        count_low = at_lane(counts, reached)
        if low + step < high:
            high = low + step
            count_high = at_lane(counts, reached + 1)
    return low


@triton.jit
def _draw(list_row, length, least, largest, min_p, seed, choice, index, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The id with the most x + noise of those in the list that are kept; the lowest of equal ones, 0 of none."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        orders = tl.load(list_row + places, mask=places < length, other=LEAST_ORDER)
        x = x_of_key(key_of_order(orders, ID_BITS))
        kept = (orders >= least) & (orders > LEAST_ORDER)
        if min_p > 0.0:
            kept = kept & (tl.exp(x - largest) >= min_p)
        ids = id_of_order(orders, ID_BITS)
        values = tl.where(kept, x + noise_of(ids, seed, choice, index), float("-inf"))
        is_better = kept & ((values > best) | ((values == best) & (ids < best_ids)))
        best = tl.where(is_better, values, best)
        best_ids = tl.where(is_better, ids, best_ids)
    found = tl.min(tl.where(best == tl.max(best, axis=0), best_ids, 2147483647), axis=0)
    return tl.where(found == 2147483647, 0, found)


@triton.jit
def _wanted_mass(
    list_row, length, logits_row, vocab_size, temperature, is_listed, largest, cut, top_p, ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What the kept must reach, of all that the cut has left."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, tl.where(is_listed, length, vocab_size), BLOCK):
        orders = _orders(list_row, length, logits_row, vocab_size, temperature, is_listed, start, ID_BITS, BLOCK)
        total += tl.sum(_weights(orders, cut, largest, True, ID_BITS), axis=0)
    return share_of(total, top_p)


@triton.jit
def choice_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    seeds,  # [num_rows] int64
    choices,  # [num_rows] int32
    indexes,  # [num_rows] int64
    lows,  # [num_rows] float32
    largests,  # [num_rows] float32
    masses,  # [2, num_rows, num_programs, 16] int64
    counts,  # [2, num_rows, num_programs, 16] int32
    lists,  # [num_rows, CAPACITY] int64
    list_lengths,  # [num_rows] int32
    last_keys,  # [num_rows] int32, written: key of the last id kept
    last_ids,  # [num_rows] int32, written: the last id kept
    tokens,  # [num_rows] int64, written: -1 where the whole vocabulary has yet to be drawn from
    row_stride,
    vocab_size,
    num_programs,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the kept of a row end, and its token, if the list has them all. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    kind = kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size)
    cut = tl.full([], LEAST_ORDER, tl.int64)
    token = tl.full([], -1, tl.int64)
    if kind != PLAIN:
        largest = tl.load(largests + row)
        if largest == float("-inf"):
            token = tl.full([], 0, tl.int64)
        else:
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            temperature = tl.load(temperatures + row)
            logits_row = logits + row * row_stride
            list_row = lists + row * CAPACITY
            length = tl.load(list_lengths + row)
            low = tl.load(lows + row)
            high = first_order(key_of(largest), ID_BITS) + (1 << ID_BITS)
            above = tl.full([], 0, tl.int64)
            total = tl.full([], 0, tl.int64)
            is_listed = length <= CAPACITY
            is_whole = is_listed
            if kind == ROUNDS:
                round_stride = tl.num_programs(0).to(tl.int64) * num_programs * 16
                low, high_x, mass_above, count_above, count, total = interval(
                    row, low, largest, top_p, masses, counts, round_stride, num_programs, 2, PROGRAMS, CAPACITY
                )
                is_whole = count <= CAPACITY
                is_listed = is_whole | (count - count_above <= CAPACITY)
                if (is_whole == 0) & (high_x < float("inf")):
                    high = first_order(key_of(high_x), ID_BITS)
                    if is_listed:
                        above = mass_above
            first = first_order(key_of(low), ID_BITS)
            if (top_k > 0) & (top_k < vocab_size) & ((length > top_k) | (is_listed == 0)):
                cut = _last_order(
                    list_row, length, logits_row, vocab_size, temperature, is_listed, largest, False,
                    cut, first, high, above, top_k.to(tl.int64), ID_BITS, BLOCK,
                )  # fmt: skip
            if top_p < 1.0:
                if kind == LISTED:
                    total = _wanted_mass(
                        list_row, length, logits_row, vocab_size, temperature, is_listed, largest, cut, top_p,
                        ID_BITS, BLOCK,
                    )  # fmt: skip
                    first = tl.maximum(first, cut)
                cut = _last_order(
                    list_row, length, logits_row, vocab_size, temperature, is_listed, largest, True,
                    cut, first, high, above, total, ID_BITS, BLOCK,
                )  # fmt: skip
            if is_whole:
                min_p = tl.load(min_ps + row)
                seed = tl.load(seeds + row)
                choice = tl.load(choices + row)
                index = tl.load(indexes + row)
                token = _draw(list_row, length, cut, largest, min_p, seed, choice, index, ID_BITS, BLOCK).to(tl.int64)
    tl.store(last_keys + row, key_of_order(cut, ID_BITS))
    tl.store(last_ids + row, tl.where(cut == LEAST_ORDER, vocab_size, id_of_order(cut, ID_BITS)))
    tl.store(tokens + row, token)
