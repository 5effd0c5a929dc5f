# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Numbers that the sampler's kernels share: noise, scaled logits, and integers in whose order tokens are kept.

An order is an int64 for (x descending, id ascending): a key in the order of x, then ID_BITS bits that fall with the id.
So "the first k" and "the shortest prefix" are each one number, ties included. Masses are integers as well: sums of them
are exact, hence the same whoever adds them up in whatever order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(-2139095041)  # of x = -inf
LEAST_ORDER = tl.constexpr(-(1 << 62))  # below the order of every x
_UNIT_MASS = tl.constexpr(1099511627776.0)  # 2**40: 2**22 masses of 1 fit, and what rounding loses of 2**18 is 2**-22


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
def gumbel(bits):
    """uint32 bits -> Gumbel noise in float32."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    # log1p(-u) = log(w) * u / (1 - w) with w = 1 - u cancels the rounding of w (Kahan); for w = 1 it is -u
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * uniform / tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(exponential)


@triton.jit
def noise_words(groups, seed, choice, index):
    """The random words of ids 4 * groups, 4 * groups + 1, ... + 3: four uint32 tensors like `groups`."""
    zero = tl.zeros_like(groups).to(tl.uint32)
    return philox4x32_10(
        groups.to(tl.uint32),
        zero + index.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )


@triton.jit
def noise_of(ids, seed, choice, index):
    """Gumbel noise of ids [N], which need not be neighbours."""
    words0, words1, words2, words3 = noise_words(ids >> 2, seed, choice, index)
    lane = ids & 3
    low = tl.where(lane == 0, words0, words1)
    high = tl.where(lane == 2, words2, words3)
    return gumbel(tl.where(lane < 2, low, high))


@triton.jit
def without_nan(logits):
    """NaN counts as -inf."""
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def top_of(logits):
    """The largest of [N, M], NaN as +inf: an infinity of either sign if, and only if, nothing may be drawn of them."""
    return tl.max(tl.max(tl.where(logits == logits, logits, float("inf")), axis=1), axis=0)


@triton.jit
def scaled(logits, temperature):
    """x = logits / temperature, at most the largest finite number. It never falls where logits grow."""
    return tl.minimum(tl.div_rn(logits, temperature), 3.4028234663852886e38)


@triton.jit
def load_x(logits_row, ids, mask, temperature):
    """x of the ids given; -inf for NaN and where the mask is off."""
    return scaled(without_nan(tl.load(logits_row + ids, mask=mask, other=float("-inf"))), temperature)


@triton.jit
def key_of(x):
    """An int32 in the order of x; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def x_of_key(key):
    """What `key_of` was given, -0.0 as 0.0."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def first_order(key, ID_BITS: tl.constexpr):
    """int64: no order with this key is smaller."""
    return key.to(tl.int64) << ID_BITS


@triton.jit
def order_of(x, ids, ID_BITS: tl.constexpr):
    """The orders of finite x; LEAST_ORDER for -inf, which no filter keeps while anything else is left."""
    order = first_order(key_of(x), ID_BITS) + ((1 << ID_BITS) - 1 - ids)
    return tl.where(x > float("-inf"), order, LEAST_ORDER)


@triton.jit
def key_of_order(order, ID_BITS: tl.constexpr):
    """The key in an order, or LEAST_KEY."""
    return tl.where(order == LEAST_ORDER, LEAST_KEY, order >> ID_BITS).to(tl.int32)


@triton.jit
def id_of_order(order, ID_BITS: tl.constexpr):
    """The id in an order."""
    low = order & ((1 << ID_BITS) - 1)
    return ((1 << ID_BITS) - 1 - low).to(tl.int32)


@triton.jit
def mass_of(x, largest):
    """exp(x - largest) in units of 2**-40, as int64; `largest` is finite."""
    return (tl.exp(x - largest) * _UNIT_MASS).to(tl.int64)


@triton.jit
def share_of(total, top_p):
    """The smallest integer, at least 1, that is not below top_p * total."""
    wanted = top_p.to(tl.float64) * total.to(tl.float64)
    floor = wanted.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < wanted).to(tl.int64), 1)
