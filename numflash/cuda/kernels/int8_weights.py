"""Weights of the integer pipeline: of 8 bits and of 15, in the blocks' products; in 16 bits and in Q16.16.

A score stays in float32 until it is a byte. x, in Q8.8, becomes its distance below what its row's
weights refer to by one fused multiply-add, u = 1 - `WINDOW` + (reference - x) * 2**-24: from there up to 1 the
floats are 2**-24 apart, so the addition rounds x as the model does, ties to even, and saturation
makes a weight of 0 of whatever lies farther below. The bits of u hold the distance y as an integer;
times -2**15 they are a float32 whose exponent falls by one every 256, with the rest as mantissa: a
straight line in every octave. Two fused multiply-adds make `QUADRATIC` of the mantissa. The
conversion to float16, whose smallest numbers are 2**-24 apart too, rounds two weights to integers
at once. That this is `fixedpoint.exp2_p8` for every distance is a test.

Wider weights are the definition's integers, whose truncations no curve repeats. Those of 15 bits (pv
"int16") become two planes of bytes, high and low, each an operand of a product of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...numerics import fixedpoint as fx
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_softmax import rounded_up

i32, u32, f32 = types.int32, types.uint32, types.float32
P_A, P_B, P_WIDE = int(fx.P_A), int(fx.P_B), int(fx.P_WIDE)
Q_A, Q_B, ONE_Q16 = int(fx.Q_A), int(fx.Q_B), int(fx.ONE_Q16)
STEP = f32(2.0**-24)  # between floats from 1/2 to 1
WINDOW, WIDE_WINDOW = 2.0**-12, 2.0**-11  # 16 octaves, 32
# what multiplies the bits of u, and what is added: a distance of 0 becomes the bits of 1/2
TO_EXPONENT = -(1 << 15) & 0xFFFFFFFF
HALF, ABOVE = (int(np.float32(x).view(np.uint32)) for x in (0.5, 1 - WINDOW))
FROM_HALF = (HALF - ABOVE * TO_EXPONENT) & 0xFFFFFFFF
MANTISSA = u32(0x7FFFFF)
OCTAVE = u32(fx.ONE_Q8)
# of x from 1/2 to 1, in the smallest steps of float16: 255 at 1/2, 510 at 1, within what makes every
# weight the right byte
QUADRATIC = tuple(f32(c * 2.0**-24) for c in (173.3475, -10.0244, 346.692))
BYTE_STEPS = f32(0.75)  # added, it leaves integers of those steps in the low bits
# of prmt: bytes 0, 2, 4 and 6; 1, 3, 5 and 7; 0 and 4; 0, 1, 4 and 5
EVEN_BYTES, ODD_BYTES, FIRST_BYTES, LOW_HALVES = u32(0x6420), u32(0x7531), u32(0x40), u32(0x5410)
PLANES = {"int8": 1, "int16": 2, "fp32": 0}  # pv -> planes of bytes that hold its weights
pack = ptx.pack["float16"]


@device_function
def distance(t, octave):
    """Q8.8 distance of a score below its octave, at most 65535.

    A masked key's distance from every octave.
    """
    return ptx.umin(u32((octave << 8) - t), u32(65535))


@device_function
def quadratic(y, one, a, b):
    """one * 2**(-y / 256) by `fixedpoint`'s quadratic, for a distance y."""
    f = u32(y & u32(255))
    g = u32(u32(f * u32(b)) >> u32(8))
    h = u32(u32(f * u32(u32(a) - g)) >> u32(8))
    return ptx.shift_right(u32(u32(one) - h), u32(y >> u32(8)))


@device_function
def weight_p16(t, octave):
    """The weight before its rounding, 65280 * 2**((t - 256 * octave) / 256).

    `fixedpoint.exp2_p16` in 32-bit arithmetic.

    From 16 octaves on it is 0, there 0 or 1: neither makes a byte. So a masked key has weight 0.
    """
    return quadratic(distance(t, octave), P_WIDE, P_A, P_B)


@device_function
def base_of(reference, window):
    """What `below` needs of a row, 1 - window at a distance of 0.

    Exact: up to `fixedpoint.T_LIMIT` the result is less than 32, where floats are 2**-19 apart, an
    eighth of an octave.
    """
    return ptx.fma(ptx.to_float(reference), STEP, f32(1 - window))


@device_function
def below(x, base):
    """u, a score's distance below the reference in units of 2**-24 from 1 - window on; at most 1.

    A hidden key's score, -inf, becomes 1.
    """
    return ptx.fma_saturate(x, -STEP, base)


@device_function
def weight_steps(u):
    """255 * 2**(-y / 256) in steps of 2**-24, for u = 1 - `WINDOW` + y * 2**-24.

    Rounded to whole steps it is `fixedpoint.exp2_p8`.
    """
    line = ptx.multiply_add(ptx.bits(u), u32(TO_EXPONENT), u32(FROM_HALF))
    # with u's exponent, that of 1/2: one operation, where a constant for it would take two
    mantissa = u32(u32(u32(line ^ ptx.bits(u)) & MANTISSA) ^ ptx.bits(u))
    x = ptx.from_bits(mantissa)
    curve = ptx.fma(ptx.fma(x, QUADRATIC[2], QUADRATIC[1]), x, QUADRATIC[0])
    return ptx.from_bits(u32(u32(ptx.bits(curve) + line) - mantissa))


@device_function
def weight_q16(u):
    """2**(-y / 256) in Q16.16, for u = 1 - `WIDE_WINDOW` + y * 2**-24: `fixedpoint.exp2_quadratic`.

    From 18 octaves on it is 0.
    """
    return quadratic(u32(ptx.bits(u) - ptx.bits(f32(1 - WIDE_WINDOW))), ONE_Q16, Q_A, Q_B)


@device_function
def weight_w15(u):
    """`fixedpoint.exp2_w15`, for u = 1 - `WINDOW` + y * 2**-24: from 16 octaves on 0.

    An octave farther the weight of 16 bits is half of itself, cut to an integer.
    """
    y = u32(ptx.bits(u) - u32(ABOVE))
    return quadratic(u32(y + OCTAVE), P_WIDE, P_A, P_B)


@device_function
def two_planes(u, p, at, stride):
    """The weights of four keys of 15 bits: high bytes in p[at], low ones in p[at + stride]."""
    front = ptx.prmt(weight_w15(u[0]), weight_w15(u[1]), LOW_HALVES)
    back = ptx.prmt(weight_w15(u[2]), weight_w15(u[3]), LOW_HALVES)
    p[at] = ptx.prmt(front, back, ODD_BYTES)
    p[at + stride] = ptx.prmt(front, back, EVEN_BYTES)


@functools.cache
def make_bytes(turing: bool) -> Any:
    """four_bytes(a, b, c, d): weights in steps of 2**-24, rounded, in one register in that order.

    sm_75 has no conversion of two floats at once.
    """

    @device_function
    def four_bytes(a, b, c, d):
        if turing:
            a, b, c, d = (
                ptx.bits(ptx.add(a, BYTE_STEPS)),
                ptx.bits(ptx.add(b, BYTE_STEPS)),
                ptx.bits(ptx.add(c, BYTE_STEPS)),
                ptx.bits(ptx.add(d, BYTE_STEPS)),
            )
            return ptx.prmt(ptx.prmt(a, b, FIRST_BYTES), ptx.prmt(c, d, FIRST_BYTES), LOW_HALVES)
        return ptx.prmt(pack(a, b), pack(c, d), EVEN_BYTES)

    return four_bytes


@functools.cache
def make_weigh(key_tiles: int, pv: str, turing: bool = False) -> Any:
    """weigh(s, p, top): the weights of scores against their block's largest.

    `p` takes four bytes per register as A operands of k32 products (4 registers per 32 keys: tiles
    2 h and 2 h + 1 fill one register of each row). With pv "int16" those of the high bytes and of the
    low ones follow each other for every 32 keys; with "fp32" `s` takes the Q16.16 weights instead.
    """
    pairs, four_bytes = key_tiles // 2, make_bytes(turing)
    wide, planes = pv == "fp32", PLANES[pv]
    window, step = WIDE_WINDOW if wide else WINDOW, fx.REFERENCE_STEP[pv]

    @device_function
    def weigh(s, p, top):
        base, u = cuda.local.array(2, f32), cuda.local.array(4, f32)
        for r in range(2):
            base[r] = base_of(rounded_up(top[r], step), window)
        for n in range(pairs):  # two tiles: four bytes of a row
            for r in range(2):
                at = 8 * n + 2 * r
                for i in range(4):
                    k = at + (i & 1) + 4 * (i >> 1)
                    u[i] = below(ptx.from_bits(u32(s[k])), base[r])
                    if wide:
                        s[k] = i32(weight_q16(u[i]))
                if planes == 2:
                    two_planes(u, p, 8 * (n >> 1) + 2 * (n & 1) + r, 4)
                elif planes == 1:
                    p[2 * n + r] = four_bytes(
                        weight_steps(u[0]),
                        weight_steps(u[1]),
                        weight_steps(u[2]),
                        weight_steps(u[3]),
                    )

    return weigh
