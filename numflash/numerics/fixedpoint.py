"""Fixed-point numbers of the integer pipeline.

Q-formats and the exp2 variants, as plain scalar functions.

Formats (Fused FlashAttention V2, "Fixed-Point Arithmetic"):

* **Q8.8** int16: a score in units of log2, 8 fraction bits; one octave is 256.
* **Q16.16** uint32: an exponential, 65536 is 1.0.
* **P8** uint8: a softmax weight, 255 is 1.0 at the row's own octave in its key block.

One source serves four readers: called on NumPy scalars or arrays by the integer model, compiled by
Numba for the CPU, compiled for CUDA, and run in the interpreter. So every operation is followed by
a cast (docs/pitfalls.md, "Small integers become 64-bit"), and only operations that are exact or
exactly rounded are used. `y` is always the distance below the octave: `y >= 0`.
"""

from __future__ import annotations

import numpy as np

u16 = np.uint16
u32 = np.uint32
f32 = np.float32
u8 = np.uint8

ONE_Q8 = 256  # one octave in Q8.8
ONE_Q16 = 65536  # 1.0 in Q16.16
P_ONE = 255  # 1.0 in P8
P_WIDE = 65280  # 255 * 256: P8 with eight more fraction bits
W_ONE = 32640  # 1.0 in W15, the weight of a value in decode: fits int16, or a byte and 7 bits
# pv -> 1.0 in the weights of blocks, and in their running sum
WEIGHT_ONE = {"int8": P_ONE, "int16": W_ONE, "bf16": P_ONE, "fp32": 1}
# pv -> what the sums of a block's weights count in
SUM_UNIT = {"int8": 1.0, "int16": 1.0, "bf16": 2.0**-15, "fp32": 1 / ONE_Q16}
FLOAT_VALUES = ("bf16", "fp32")  # pv whose values stay floats
FIRST_ONE = 4080  # 1.0 in P12, the weights of a sequence's first keys
FIRST_KEYS = 4  # keys of a sequence whose keys, weights and values are finer: see INT8 pipeline
FINER = 32  # steps of an INT8 value in which those keys and values are rounded: 5 bits more
SUM_ONE = 16320  # 1.0 in P14, in which decode sums weights: four of them fit 16 bits
# 127 * 128, the largest query, 14 bits and a sign, stored in int16: 128 * high + low,
# |high| <= 127, |low| <= 64
QUERY_ONE = 16256
CODE_QUERY_ONE = 127  # the largest query of a cache of 4 bits, which has no low plane
CODE_ONE = 32767  # the largest of a row's numbers before they become codes of 4 bits
# steps per 65536 units (CODE_ONE is 32767) that the quantiser tries; it keeps the one with the
# smallest error. With 15 the largest number has a code of its own; 16 and 17 have smaller steps
# and clip it.
CODE_STEPS = (15, 16, 17)
MASKED = -32768  # Q8.8 score of a masked key: its weight is exactly 0
MIN_OCTAVE = -(1 << 24)  # octave of a row that has seen no key
# pv -> Q8.8 steps to which a row's largest score in a block is rounded up: its weights refer to that
REFERENCE_STEP = {"int8": ONE_Q8 // 8, "int16": ONE_Q8, "bf16": ONE_Q8, "fp32": ONE_Q8}
# decode sums weighted values in units of it: 2**17 blocks of the largest ones do not overflow
VALUE_UNIT = 2.0**-40
KEY_SCALE_LIMIT = 2.0**96  # of a cached key: times an int32 it stays finite
# of a cached value of zeros: below every other one, so it never is a block's largest
ZERO_VALUE_SCALE = 2.0**-110

# 2**-f on [0, 1) as 1 - f (A - B f), continuous at the octaves' boundaries (A - B = 1/2): worst
# relative error 0.27 %. It is 1 + g (0.6602 + 0.3398 g) with g = 1 - f, mirrored; INT8 pipeline,
# step 5.
QUADRATIC_A = 0.6699
QUADRATIC_B = 0.1699
P_B = round(QUADRATIC_B * P_WIDE)
P_A = P_B + P_WIDE // 2
Q_B = round(QUADRATIC_B * ONE_Q16)
Q_A = Q_B + ONE_Q16 // 2


def exp2_p8(y):
    """round(255 * 2**(-y / 256)) in 16-bit arithmetic: the weight that ships.

    Parameters
    ----------
    y : uint16 Q8.8
        Distance below the octave, 0 to 65535.

    Returns
    -------
    uint8 P8

    Notes
    -----
    Two multiplications keep their high halves (one instruction each in 16-bit lanes). From y = 16
    octaves on the result is 0; a shift by 16 or more is not defined in every language, hence the
    minimum.
    """
    f = u16(u16(y) << u16(8))  # fraction, Q0.16
    g = u16((u32(f) * u32(P_B)) >> u32(16))
    h = u16((u32(f) * u32(u16(u16(P_A) - g))) >> u32(16))
    e = u16(u16(y) >> u16(8))
    e = np.minimum(e, u16(15))
    return u8(u16(u16(u16(u16(P_WIDE) - h) >> e) + u16(128)) >> u16(8))


def exp2_p16(y):
    """The same before its rounding, 65280 * 2**(-y / 256) as uint16.

    What decode multiplies with the values' scales.
    """
    f = u16(u16(y) << u16(8))
    g = u16((u32(f) * u32(P_B)) >> u32(16))
    h = u16((u32(f) * u32(u16(u16(P_A) - g))) >> u32(16))
    return u16(u16(u16(P_WIDE) - h) >> np.minimum(u16(u16(y) >> u16(8)), u16(15)))


def exp2_p12(y):
    """4080 * 2**(-y / 256) as uint16: the weight of one of a sequence's first keys.

    Times a value of 127 * 32 it fits the 24 bits of a float32.
    """
    return u16(exp2_p16(y) >> u16(4))


def exp2_w15(y):
    """32640 * 2**(-y / 256) as uint16: the weights of pv "int16".

    They fit int16, and the sum of 128 of them times INT8 values fits int32.
    """
    return u16(exp2_p16(y) >> u16(1))


# A block of keys that is further below the running maximum than so many octaves is scaled as if it
# were not. So the scale, 2**-MOST_BELOW * `below_octave` at least, is a normal number:
# a multiplication by a subnormal one takes Intel's CPUs 150 cycles.
MOST_BELOW = 125
# 2**-(1/2), 2**-(1/4) and 2**-(1/8), and the eighths of an octave as their rounded products
HALF_OCTAVE, QUARTER_OCTAVE, EIGHTH_OCTAVE = (f32(2.0**-x) for x in (1 / 2, 1 / 4, 1 / 8))
EIGHTHS = np.array(
    [
        f32(
            f32((HALF_OCTAVE if n & 4 else f32(1)) * (QUARTER_OCTAVE if n & 2 else f32(1)))
            * (EIGHTH_OCTAVE if n & 1 else f32(1))
        )
        for n in range(8)
    ],
    f32,
)


def below_octave(top):
    """2**(top / 256) relative to the whole octave at or above it: 1, 2**-(1/8) to 2**-(7/8), float32.

    top : int Q8.8, whole eighths of an octave: what weights of P8 refer to in a block of keys
    """
    return EIGHTHS[-(top >> 5) & 7]


def exp2_bf16(y):
    """255 * 2**(-y / 256) to 8 significant bits, as uint32 in units of 2**-15: the weights of pv
    "bf16", which bfloat16 holds.

    By the cubic of `exp2_cubic`: bfloat16 is nearly as fine as the quadratic is wrong. Times
    2**-octaves, a shift to the right of units of 2**-15; from y = 16 octaves on the result is 0.
    """
    f = u16(u16(y) << u16(8))
    g = u16((u32(f) * u32(B_C)) >> u32(16))
    g = u16((u32(f) * u32(u16(u16(B_B) - g))) >> u32(16))
    h = u16((u32(f) * u32(u16(u16(B_A) - g))) >> u32(16))
    n = u32(u16(u16(u16(P_WIDE) - h) + u16(128)) >> u16(8))
    e = u32(u16(y) >> u16(8))
    return u32(u32(n << u32(u32(15) - np.minimum(e, u32(15)))) * u32(e < u32(16)))


def exp2_quadratic(y):
    """2**(-y / 256) in Q16.16 by the quadratic.

    Worst relative error 0.27 % (`y` uint32 Q8.8, returns uint32).
    """
    f = u32(u32(u32(y) & u32(255)) << u32(8))
    g = u32(u32(f * u32(Q_B)) >> u32(16))
    h = u32(u32(f * u32(u32(Q_A) - g)) >> u32(16))
    return u32(u32(u32(ONE_Q16) - h) >> np.minimum(u32(u32(y) >> u32(8)), u32(31)))


def exp2_cubic(y):
    """2**(-y / 256) in Q16.16 by a cubic; worst relative error 0.011 %.

    2**-f = 1 - f (a - f (b - c f)), continuous at the octave: a - b + c = 1/2.
    """
    f = u32(u32(u32(y) & u32(255)) << u32(8))
    g = u32(u32(f * u32(CUBIC_C)) >> u32(16))
    g = u32(u32(f * u32(u32(CUBIC_B) - g)) >> u32(16))
    h = u32(u32(f * u32(u32(CUBIC_A) - g)) >> u32(16))
    return u32(u32(u32(ONE_Q16) - h) >> np.minimum(u32(u32(y) >> u32(8)), u32(31)))


def exp2_line177(y):
    """The straight line (256 + 177 f) >> e of the A64FX summary (docs/sources.md).

    Errors up to 15.4 %, a jump at every octave.

    Kept for study.

    `Fused FlashAttention V2`, "No Integer Division". 177/256 is ln 2, the slope of 2**f at 0, so
    the line ends at 1.69, not 2.
    """
    t = u32(u32(65536) - u32(y))  # 256 octaves minus the distance y, Q8.8
    frac = u32(t & u32(255))
    octave = u32(t >> u32(8))
    mantissa = u32(u32(u32(256) << u32(8)) + u32(u32(177) * frac))  # Q16.16 in [1, 1.69]
    return u32(mantissa >> np.minimum(u32(u32(256) - octave), u32(31)))


def exp2_ultra(y):
    """2**floor(-y / 256).

    The variant "ultra" of the exp2 benchmark (docs/sources.md), errors up to 50 %.
    """
    return u32(u32(ONE_Q16) >> np.minimum(u32(u32(u32(y) + u32(255)) >> u32(8)), u32(31)))


def exp2_exact(y):
    """2**(-y / 256) correctly rounded to Q16.16; for comparison only (float64)."""
    return u32(np.rint(65536.0 * np.exp2(np.asarray(y, np.float64) / -256.0)))


CUBIC_A = 45312
CUBIC_B = 15106
CUBIC_C = 2562
# the cubic in units of P8's 255 * 256: continuous at the octave as well
B_B, B_C = (round(x * P_WIDE / ONE_Q16) for x in (CUBIC_B, CUBIC_C))
B_A = P_WIDE // 2 + B_B - B_C

# name -> (function uint32 Q8.8 -> uint32 Q16.16, worst relative error over one octave, as
# tests/test_fixedpoint.py measures it); the float variants, by SVE's FEXPA, are
# `cpu.isa.fexpa.EXP2_FLOAT`
EXP2 = {
    "quadratic": (exp2_quadratic, 0.0028),
    "cubic": (exp2_cubic, 0.00014),
    "line177": (exp2_line177, 0.154),
    "ultra": (exp2_ultra, 0.50),
    "exact": (exp2_exact, 0.00002),
}

# ---- options of scores, in float32 by exactly rounded operations only, so that every device agrees
LN2 = np.log(2.0)
LOG2E = 1 / LN2  # natural units -> log2
LOG2E_Q8 = f32(256 * LOG2E)  # natural units -> Q8.8
LN2_Q8 = f32(LN2 / 256)  # and back
T_LIMIT = f32(2.0**28)  # scores beyond +-1 million octaves stop here
# of a score that a finite bias makes: -inf is for hidden keys
LOWEST = f32(np.finfo(np.float32).min)
# tanh(x) = x * CAP_UNIT * (z**2 + P1 z + P0) / (z**3 + Q2 z**2 + Q1 z + Q0), z = x**2, minimax in
# relative error up to CAP_LIMIT, constant beyond; relative error at most 9.1e-6 everywhere
CAP_P0, CAP_P1, CAP_Q0, CAP_Q1, CAP_Q2 = (
    f32(c) for c in (669.49756, 76.66248, 18200.48, 8149.8267, 318.2947)
)
CAP_UNIT = f32(27.185043)
CAP_LIMIT = f32(5.9)


def softcap(x, cap):
    """cap * tanh(x) for a score x in units of its cap; worst relative error 9.1e-6, NaN stays NaN.

    That is half of 1/256 octave for a cap of 150 natural units; a product of INT8 operands is a
    thousand times less exact.
    """
    x = np.minimum(np.maximum(x, -CAP_LIMIT), CAP_LIMIT)
    z = f32(x * x)
    p = f32(f32(f32(z + CAP_P1) * z) + CAP_P0)
    q = f32(f32(f32(f32(f32(z + CAP_Q2) * z) + CAP_Q1) * z) + CAP_Q0)
    return f32(f32(f32(x * f32(f32(cap) * CAP_UNIT)) * p) / q)
