"""2**x of float32 vectors: a polynomial, and the instructions of AVX-512 and SVE."""

from __future__ import annotations

import numpy as np

from ..isa.fexpa import exponential
from ..isa.vectors import (
    I16,
    I32,
    call,
    compare,
)
from .float_isas import larger

# 2**f on [-1/2, 1/2], minimax in relative error with the constant fixed at 1: 1.1e-7
EXP2 = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733953714371,
    0.009671512991189957,
    0.0013264714507386088,
)
LOWEST = -150.0  # 2**LOWEST is 0 in float32
# 2**x is 0 below: times values down to 2**-14, weights then add up to normal numbers. Sums that
# begin with a subnormal product cost Intel's CPUs 150 cycles each.
FLOOR = -112
GROWTH = np.float32(8)  # octaves that a maximum may grow before O is rescaled
# EXP2's polynomial fitted on [0, 1), relative error 8.2e-8
EXP2_FLOOR = (
    1.0,
    0.6931513118066539,
    0.24016445012995594,
    0.05579991319565182,
    0.009017030193706534,
    0.0018671301307139631,
)


def polynomial(b, isa, coefficients, f):
    """c0 + c1 * f + c2 * f**2 + ..., by Horner's rule."""
    y = isa.fill(b, isa.floats, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = isa.fma(b, y, f, isa.fill(b, isa.floats, c))
    return y


def whole(b, isa, n):
    """A whole float32 number as int32, within its range; NaN becomes 0.

    LLVM's fptosi.sat does the same, but lane by lane.
    """
    return b.fptosi(
        b.select(compare(b, "fcmp_ordered", "ord", n, n), n, isa.fill(b, isa.floats, 0.0)),
        isa.vector(I32),
    )


def exp2(b, isa, x):
    """2**x per lane, x <= 127; 0 below `FLOOR`, NaN stays NaN.

    With SVE 0 below the normal numbers: FEXPA gives no others.
    """
    if isa.scalable:
        return exponential(b, isa, x)
    if isa.lanes == 16:
        return exp2_avx512(b, isa, x)
    x = larger(b, x, isa.fill(b, isa.floats, LOWEST))
    n = isa.generic(b, "roundeven", x)
    y = polynomial(b, isa, EXP2, b.fsub(x, n))
    ints = isa.vector(I32)
    n = b.add(whole(b, isa, n), isa.fill(b, ints, 127))
    power = b.bitcast(b.shl(n, isa.fill(b, ints, 23)), isa.floats)
    return b.select(
        compare(b, "icmp_signed", "<", n, isa.fill(b, ints, 127 + FLOOR)),
        b.fmul(y, isa.fill(b, isa.floats, 0.0)),
        b.fmul(y, power),
    )


def exp2_avx512(b, isa, x):
    """2**x by two instructions of AVX-512 and a polynomial between them.

    vreduceps gives x - floor(x), 0 of infinity; vscalefps gives y * 2**floor(x), 0 where x is below
    `FLOOR`.
    """
    zero = isa.fill(b, isa.floats, 0.0)
    down = I32(9)
    f = call(b, "llvm.x86.avx512.mask.reduce.ps.512", isa.floats, x, down, zero, I16(-1), I32(4))
    floor = isa.fill(b, isa.floats, float(FLOOR))
    kept = b.bitcast(compare(b, "fcmp_unordered", ">=", x, floor), I16)
    return call(
        b,
        "llvm.x86.avx512.mask.scalef.ps.512",
        isa.floats,
        polynomial(b, isa, EXP2_FLOOR, f),
        x,
        zero,
        kept,
        I32(4),
    )
