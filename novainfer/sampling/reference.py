"""How a token is chosen, in pure Python: the executable definition that every kernel backend is tested against.

Imports nothing but the standard library and is never on a hot path. It serves tests, and whoever wants to check a
stream by hand: a token is a function of (logits, parameters, seed, choice, index) and of nothing else.

Arithmetic that decides anything rounds to float32 as the kernels do; sums of masses are taken in float64. Sources:
Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Gumbel-max, Gumbel 1954.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_MASK = 0xFFFFFFFF
_LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
_LARGEST_UNIFORM = 1.0 - 2.0**-24

Words = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """What one draw depends on besides the logits. The floats are rounded to float32 before use."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    seed: int = 0  # any integer; its low 64 bits count
    choice: int = 0
    index: int = 0  # of the token in the output, 0 = first sampled; its low 32 bits count


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Random123's Philox4x32 with ten rounds: four unsigned 32-bit words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & _MASK, first >> 32 ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def token_bits(token_id: int, params: DrawParams) -> int:
    """The 32 random bits that belong to one token id in this draw."""
    key = (params.seed & _MASK, params.seed >> 32 & _MASK)
    counter = (token_id >> 2, params.index & _MASK, params.choice & _MASK, 0)
    return philox4x32_10(counter, key)[token_id & 3]


def uniform(bits: int) -> float:
    """32 bits -> a float32 in (0, 1), with the finest steps near 0, which is where large Gumbel noise comes from."""
    return min(_float32(_float32(bits) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


def gumbel(bits: int) -> float:
    """32 bits -> standard Gumbel noise, rounded to float32."""
    return _float32(-math.log(_float32(-math.log1p(-uniform(bits)))))


def sample(logits: Sequence[float], params: DrawParams) -> int:
    """The token id that is drawn from `logits` (read as float32, NaN as -inf). Ties go to the lowest id."""
    logits = [-math.inf if math.isnan(value) else _float32(value) for value in logits]
    temperature = _float32(params.temperature)
    if temperature == 0.0:
        return _first_argmax(logits)
    x = [min(_float32(value / temperature), _LARGEST_FLOAT32) for value in logits]
    noisy = [-math.inf] * len(x)
    for token_id in kept_ids(x, params):
        noisy[token_id] = _float32(x[token_id] + gumbel(token_bits(token_id, params)))
    return _first_argmax(noisy)


def kept_ids(x: Sequence[float], params: DrawParams) -> list[int]:
    """The ids that top_k, top_p and min_p leave of the scaled logits, in the order x descending, id ascending."""
    order = sorted(range(len(x)), key=lambda token_id: (-x[token_id], token_id))
    largest = x[order[0]]
    if largest == -math.inf:
        return order
    if params.top_k > 0:
        order = order[: params.top_k]
    masses = [math.exp(_float32(x[token_id] - largest)) for token_id in order]
    length = _prefix_length(masses, _float32(params.top_p))
    min_p = _float32(params.min_p)
    return [token_id for token_id, mass in zip(order[:length], masses, strict=False) if mass >= min_p]


def _prefix_length(masses: Sequence[float], top_p: float) -> int:
    """The length of the shortest prefix, at least 1, whose sum reaches top_p times the sum of all."""
    if top_p >= 1.0:
        return len(masses)
    total = 0.0
    for mass in masses:
        total += mass
    prefix = 0.0
    for length, mass in enumerate(masses, start=1):
        prefix += mass
        if prefix >= top_p * total:
            return length
    return len(masses)


def _first_argmax(values: Sequence[float]) -> int:
    """The lowest id of the largest value."""
    return max(range(len(values)), key=lambda token_id: (values[token_id], -token_id))


def _float32(value: float) -> float:
    """`value` rounded to the nearest float32; beyond the largest one, infinity."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
