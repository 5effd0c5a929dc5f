# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Which tokens may be kept by top_k, top_p and min_p: a list for each row, nearly always short, found by many programs.

The vocabulary is divided into groups of neighbours. If k groups have a maximum of t or more, so have at least k tokens,
so top_k keeps none below the k-th largest group maximum (the idea of Dr. Top-k, Gaihre et al., SC 2021). Only groups
whose maximum reaches a bound are read again. For top_p without top_k the bound is found in two rounds: masses and
counts above 16 thresholds, then above 16 more between two of those.

1. `maxima_kernel` reads the row once;
2. `bound_kernel` finds the bound among the maxima and puts the groups that reach it in front of the others;
3. `round_kernel` twice, of which the second has work only where the first left too many tokens;
4. `gather_kernel` writes the list. Its order depends on which program comes first; nothing that reads it cares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton_numbers import (
    LEAST_KEY,
    key_of,
    load_x,
    mass_of,
    order_of,
    scaled,
    share_of,
    top_of,
    without_nan,
    x_of_key,
)

PLAIN = tl.constexpr(0)  # nothing to search: greedy, or no filter
LISTED = tl.constexpr(1)  # the bound is known: top_k, or min_p alone
ROUNDS = tl.constexpr(2)  # top_p without top_k

COUNTED = tl.constexpr(1 << 52)  # one token in a sum that counts and weighs: it is of fewer than 2**11 tokens
GROUPS_A_PROGRAM = 32
_PROGRAM_GROUPS = tl.constexpr(GROUPS_A_PROGRAM)


@triton.jit
def kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size):
    """PLAIN, LISTED or ROUNDS."""
    top_k = tl.load(top_ks + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = tl.load(top_ps + row) < 1.0
    is_filtered = has_top_k | has_top_p | (tl.load(min_ps + row) > 0.0)
    kind = tl.where(has_top_p & (has_top_k == 0), ROUNDS, LISTED)
    return tl.where((tl.load(temperatures + row) > 0.0) & is_filtered, kind, PLAIN)


@triton.jit
def _packed(x, groups):
    """int64 in the order of x, which is the largest of each of the groups."""
    return key_of(x).to(tl.int64) * 65536 + groups


@triton.jit
def _x_of(packed):
    """The largest x of a group."""
    return x_of_key((packed >> 16).to(tl.int32))


@triton.jit
def _group_of(packed):
    """A group's number."""
    return (packed & 0xFFFF).to(tl.int32)


@triton.jit
def maxima_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    maxima,  # [num_rows, num_groups] float32, written: the largest x of each group
    tops,  # [num_rows, num_programs] float32, written: see `top_of`
    row_stride,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
):
    """The largest x of each group of a row. GROUPS_A_PROGRAM groups a program."""
    row = tl.program_id(0).to(tl.int64)
    if kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size) != PLAIN:
        groups = tl.program_id(1) * _PROGRAM_GROUPS + tl.arange(0, _PROGRAM_GROUPS)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        given = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        largest = scaled(tl.max(without_nan(given), axis=1), tl.load(temperatures + row))
        tl.store(maxima + row * num_groups + groups, largest, mask=groups < num_groups)
        tl.store(tops + row * tl.num_programs(1) + tl.program_id(1), top_of(given))


@triton.jit
def at_lane(values, lane):
    """values [16] -> the one of the lane, 0 for lane 16."""
    return tl.sum(tl.where(tl.arange(0, 16) == lane, values, 0), axis=0)


@triton.jit
def _reached_by(x, largest, k):
    """A number that k of x reach, and more only where x are equal: found four bits of its key at a time."""
    keys = key_of(x).to(tl.int64)
    low = tl.full([], LEAST_KEY, tl.int64)
    high = key_of(largest).to(tl.int64) + 1
    lane = tl.arange(0, 16)
    count = k + 1
    while (high - low > 1) & (count != k):
        step = (high - low + 15) // 16
        thresholds = low + step * lane
        counts = tl.sum((keys[None, :] >= thresholds[:, None]).to(tl.int32), axis=1)
        reached = tl.sum(((counts >= k) & (lane > 0)).to(tl.int32), axis=0)
        count = at_lane(counts, reached)
        low += step * reached
        high = tl.minimum(high, low + step)
    return x_of_key(low.to(tl.int32))


@triton.jit
def bound_kernel(
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    maxima,  # [num_rows, num_groups] float32
    front_groups,  # [num_rows, MOST_GROUPS] int64, written: (key of the maximum, group), those that reach the low first
    lows,  # [num_rows] float32, written: nothing below it is kept
    largests,  # [num_rows] float32, written
    list_lengths,  # [num_rows] int32, written: 0
    vocab_size,
    num_groups,
    MOST_GROUPS: tl.constexpr,
):
    """The bound of a row, and its groups in the order of who reaches it. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    kind = kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size)
    if kind != PLAIN:
        groups = tl.arange(0, MOST_GROUPS)
        x = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
        largest = tl.max(x, axis=0)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        low = tl.full([], float("-inf"), tl.float32)
        if kind == ROUNDS:
            # all tokens below have a mass of vocab_size * exp(low - largest) at most, less than 1 - top_p
            low = largest - (tl.log(tl.zeros([], tl.float32) + vocab_size) - tl.log(1.0 - top_p) + 1.0)
        elif (top_k > 0) & (top_k < vocab_size):
            if top_k <= num_groups:
                low = _reached_by(x, largest, top_k)
        else:
            # more than exp, log and the sums can be wrong by
            low = largest + tl.log(tl.load(min_ps + row)) - 0.01 - 1e-6 * tl.abs(largest)
        is_front = (x >= low).to(tl.int32)
        rank = tl.cumsum(is_front, axis=0)
        place = tl.where(is_front == 1, rank - 1, tl.sum(is_front, axis=0) + groups - rank)
        tl.store(front_groups + row * MOST_GROUPS + place, _packed(x, groups))
        tl.store(lows + row, low)
        tl.store(largests + row, largest)
        tl.store(list_lengths + row, 0)


@triton.jit
def _thresholds(low, high, largest, number):
    """[16] float32 that never fall: from low on towards high. The first of round 0 is below everything."""
    lane = tl.arange(0, 16)
    values = low + (tl.minimum(high, largest) - low) * (lane * 0.0625)
    # NaN where low is -inf: then nothing is narrowed
    return tl.where((lane + number == 0) | (values != values), float("-inf"), values)


@triton.jit
def _sums(values, row, num_programs, PROGRAMS: tl.constexpr):
    """values [num_rows, num_programs, 16] of a round -> [16], the sums over the programs of the row."""
    programs = tl.arange(0, PROGRAMS)
    places = (row * num_programs + programs)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.sum(tl.load(values + places, mask=programs[:, None] < num_programs, other=0), axis=0)


@triton.jit
def _narrowed(thresholds, masses, counts, target):
    """(low, high, mass and count of high and more, count of low and more): the two neighbours between which the sum
    of masses reaches the target."""
    lane = tl.arange(0, 16)
    # the sums never grow with the threshold; the first one counts as reached
    reached = tl.sum(((masses >= target) & (lane > 0)).to(tl.int32), axis=0)
    low = tl.max(tl.where(lane <= reached, thresholds, float("-inf")), axis=0)
    high = tl.min(tl.where(lane > reached, thresholds, float("inf")), axis=0)
    return low, high, at_lane(masses, reached + 1), at_lane(counts, reached + 1), at_lane(counts, reached)


@triton.jit
def interval(
    row, low, largest, top_p, masses, counts, round_stride, num_programs, NUM: tl.constexpr,
    PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """What NUM rounds have found of a row whose top_p alone cuts: (low, high, mass and count of high and more, count of
    low and more, the mass that the kept must reach). The last token kept is in [low, high)."""
    high = tl.full([], float("inf"), tl.float32)
    above = tl.full([], 0, tl.int64)
    count_above = tl.full([], 0, tl.int32)
    count = tl.full([], CAPACITY + 1, tl.int32)
    target = tl.full([], 0, tl.int64)
    if NUM > 0:
        thresholds = _thresholds(low, high, largest, 0)
        sums = _sums(masses, row, num_programs, PROGRAMS)
        target = share_of(at_lane(sums, 0), top_p)
        low, high, above, count_above, count = _narrowed(
            thresholds, sums, _sums(counts, row, num_programs, PROGRAMS), target
        )
    if NUM > 1:  # noqa: SIM102  one is known to the compiler
        if count > CAPACITY:
            thresholds = _thresholds(low, high, largest, 1)
            sums = _sums(masses + round_stride, row, num_programs, PROGRAMS)
            low, high_inside, above_inside, count_inside, count = _narrowed(
                thresholds, sums, _sums(counts + round_stride, row, num_programs, PROGRAMS), target
            )
            if high_inside < float("inf"):  # else it lies between the last threshold and what was the end before
                high = high_inside
                above = above_inside
                count_above = count_inside
    return low, high, above, count_above, count, target


@triton.jit
def _tile(logits_row, groups_row, start, vocab_size, temperature, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """(x, ids) of BLOCK tokens, `start` tokens after the first of `front_groups`."""
    places = start + tl.arange(0, BLOCK)
    ids = _group_of(tl.load(groups_row + places // GROUP)) * GROUP + places % GROUP
    return load_x(logits_row, ids, ids < vocab_size, temperature), ids


@triton.jit
def _best_of(groups_row, start, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The largest x of the groups of the same tokens as `_tile`."""
    groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
    return tl.max(_x_of(tl.load(groups_row + groups)), axis=0)


@triton.jit(do_not_specialize=["number"])
def round_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    front_groups,  # [num_rows, MOST_GROUPS] int64
    lows,  # [num_rows] float32
    largests,  # [num_rows] float32
    masses,  # [2, num_rows, num_programs, 16] int64; those of this round are written: of all at and above a threshold
    counts,  # [2, num_rows, num_programs, 16] int32, likewise
    row_stride,
    vocab_size,
    number,  # of this round: 0 or 1
    MOST_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Masses and counts above 16 thresholds, of the groups of one program."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(largests + row)  # not written for a plain row, and not used then
    kind = kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size)
    round_stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * 16
    if (kind == ROUNDS) & (largest > float("-inf")):
        low = tl.load(lows + row)
        high = tl.full([], float("inf"), tl.float32)
        has_work = number == 0
        if number > 0:
            top_p = tl.load(top_ps + row)
            low, high, _above, _count_above, count, _target = interval(
                row, low, largest, top_p, masses, counts, round_stride, tl.num_programs(1), 1, PROGRAMS, CAPACITY
            )
            has_work = count > CAPACITY
        if has_work:
            thresholds = _thresholds(low, high, largest, number)
            temperature = tl.load(temperatures + row)
            logits_row = logits + row * row_stride
            groups_row = front_groups + row * MOST_GROUPS
            first = tl.program_id(1) * _PROGRAM_GROUPS * GROUP
            total = tl.zeros([BLOCK], tl.int64)
            packed_sums = tl.zeros([16, BLOCK], tl.int64)
            for start in range(first, first + _PROGRAM_GROUPS * GROUP, BLOCK):
                is_above = _best_of(groups_row, start, GROUP, BLOCK) >= low
                if is_above or number == 0:
                    x, _ids = _tile(logits_row, groups_row, start, vocab_size, temperature, GROUP, BLOCK)
                    mass = mass_of(x, largest)
                    total += mass
                    if is_above:
                        packed = (mass + COUNTED)[None, :]
                        packed_sums += tl.where(x[None, :] >= thresholds[:, None], packed, 0)
            sums = tl.sum(packed_sums % COUNTED, axis=1)
            lane = tl.arange(0, 16)
            place = (row * tl.num_programs(1) + tl.program_id(1)) * 16 + lane + number * round_stride
            tl.store(masses + place, tl.where(lane + number == 0, tl.sum(total, axis=0), sums))
            counted = tl.sum((packed_sums // COUNTED).to(tl.int32), axis=1)
            # below the lowest real threshold not all was counted
            tl.store(counts + place, tl.where(lane + number == 0, CAPACITY + 1, counted))


@triton.jit
def gather_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperatures,  # [num_rows] float32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] float32
    min_ps,  # [num_rows] float32
    front_groups,  # [num_rows, MOST_GROUPS] int64
    lows,  # [num_rows] float32
    largests,  # [num_rows] float32
    masses,  # [2, num_rows, num_programs, 16] int64
    counts,  # [2, num_rows, num_programs, 16] int32
    lists,  # [num_rows, CAPACITY] int64, written: orders of the candidates
    list_lengths,  # [num_rows] int32, changed: how many there are, also where not all found room
    row_stride,
    vocab_size,
    MOST_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The candidates of the groups of one program, behind those of others."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(largests + row)
    kind = kind_of(row, temperatures, top_ks, top_ps, min_ps, vocab_size)
    round_stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * 16
    if (kind != PLAIN) & (largest > float("-inf")):
        low = tl.load(lows + row)
        high = tl.full([], float("inf"), tl.float32)
        fits = tl.full([], 1, tl.int32) == 1
        if kind == ROUNDS:
            top_p = tl.load(top_ps + row)
            low, end, _above, count_above, count, _target = interval(
                row, low, largest, top_p, masses, counts, round_stride, tl.num_programs(1), 2, PROGRAMS, CAPACITY
            )
            if count > CAPACITY:  # those above stay in whatever is chosen here
                high = end
                fits = count - count_above <= CAPACITY
        if fits:
            groups_row = front_groups + row * MOST_GROUPS
            temperature = tl.load(temperatures + row)
            first = tl.program_id(1) * _PROGRAM_GROUPS * GROUP
            for start in range(first, first + _PROGRAM_GROUPS * GROUP, BLOCK):
                if _best_of(groups_row, start, GROUP, BLOCK) >= low:
                    places = start + tl.arange(0, BLOCK)
                    packed = tl.load(groups_row + places // GROUP)
                    ids = _group_of(packed) * GROUP + places % GROUP
                    wanted = (_x_of(packed) >= low) & (ids < vocab_size)
                    x = load_x(logits + row * row_stride, ids, wanted, temperature)
                    is_in = ((x >= low) & (x < high) & (x > float("-inf"))).to(tl.int32)
                    base = tl.atomic_add(list_lengths + row, tl.sum(is_in, axis=0))
                    place = base + tl.cumsum(is_in, axis=0) - 1
                    order = order_of(x, ids, ID_BITS)
                    tl.store(lists + row * CAPACITY + place, order, mask=(is_in == 1) & (place < CAPACITY))
