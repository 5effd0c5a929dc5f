# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Eight-bit floating point (e4m3) in Triton.

Numbers are rounded by integer arithmetic, in the interpreter as on every GPU: no instruction's treatment of ties, small
numbers or overflow matters.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float8_bits(value):
    """The e4m3 number next to each float32 within 448, of two the even one: its bits, uint8."""
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 20 bits are dropped, and the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are multiples of 2 ** -9, which is one bit of a float32 of 2 ** 14 and some.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(magnitude < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def float8_value(number):
    """float8 -> float32, for the interpreter, which has no such products."""
    bits = number.to(tl.uint8, bitcast=True).to(tl.int32)
    value = (((bits & 127) << 20) | ((bits & 128) << 24)).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36  # 2 ** 120
    return tl.where((bits & 127) == 127, float("nan"), value)


@triton.jit
def to_float8(value):
    """float32 -> e4m3, to the nearest number within 448; what is not finite becomes NaN."""
    bits = float8_bits(tl.minimum(tl.maximum(value, -448.0), 448.0))
    return tl.where(tl.abs(value) < float("inf"), bits, 127).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
