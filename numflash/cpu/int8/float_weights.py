"""The softmax weights of one row of one key block for P.V in floats, in vectors: pv "fp32" and "bf16".

As `softmax_vectors.row_weights`, but relative to the running octave: times `scale`, a power of two.
The sum of the weights is that of integers, in units of `fixedpoint.SUM_UNIT`, without `scale`.
"""

from __future__ import annotations

import functools

from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...numerics.fixedpoint import B_A, B_B, B_C, ONE_Q16, P_WIDE, Q_A, Q_B, SUM_UNIT
from ..floats.float_isas import FLOAT_ISAS
from ..isa.isas import VECTOR_ISAS
from ..isa.vectors import F32, I16, I32, I64, constant, data, load, signed16, store
from .softmax_vectors import over_keys

ONE_F32 = 127 << 23  # the bits of 1.0 as float32
EXPONENT = 0xFF80  # of bfloat16 bits
# bfloat16 bits of 128.0; those of n from 128 to 255 have n - 128 below the exponent
BITS_128 = 134 << 7
SIXTEEN = 16 << 8  # octaves, Q8.8
UNITS = (127 + 15) << 7  # bfloat16 bits of 2**15


def _q16_weight(b, isa, y, number):
    """`fixedpoint.exp2_quadratic` of int32 lanes."""
    f = b.shl(b.and_(y, number(255)), number(8))
    g = b.lshr(b.mul(f, number(Q_B)), number(16))
    h = b.lshr(b.mul(f, b.sub(number(Q_A), g)), number(16))
    octaves = isa.generic(b, "umin", b.lshr(y, number(8)), number(31))
    return b.lshr(b.sub(number(ONE_Q16), h), octaves)


def _bf16_weight(b, isa, y, number):
    """`fixedpoint.exp2_bf16` of int32 lanes."""
    f = b.shl(b.and_(y, number(255)), number(8))
    g = b.lshr(b.mul(f, number(B_C)), number(16))
    g = b.lshr(b.mul(f, b.sub(number(B_B), g)), number(16))
    h = b.lshr(b.mul(f, b.sub(number(B_A), g)), number(16))
    n = b.lshr(b.sub(number(P_WIDE + 128), h), number(8))
    octaves = isa.generic(b, "umin", b.lshr(y, number(8)), number(31))
    # a shift by 24 or more leaves nothing of 255 << 15: 16 octaves and more become as many
    octaves = b.or_(octaves, b.lshr(b.and_(octaves, number(16)), number(1)))
    return b.lshr(b.shl(n, number(15)), octaves)


WEIGHTS = {"fp32": _q16_weight, "bf16": _bf16_weight}


@functools.cache
def row_weights_float(name: str, keys: int, pv: str):
    """Intrinsic f(x, x_off, tops, i, scale, p, p_off, sums, s_off).

    p float32 = weight(tops[i] - x) * SUM_UNIT * scale[i].
    """
    isa = VECTOR_ISAS[name]
    i16s = isa.vector(I16)
    i32s = isa.vector(I32)
    f32s = isa.vector(F32)
    weight = WEIGHTS[pv]

    @intrinsic
    def weights(typingctx, x, x_off, tops, i, scale, p, p_off, sums, s_off):
        sig = types.void(x, x_off, tops, i, scale, p, p_off, sums, s_off)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px, pq, pc, pp, ps = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4, 5, 7))

            def number(n):
                return isa.fill(b, i32s, n)

            top = isa.splat(b, load(b, pq, a[3], I16, 2), i16s)
            factor = b.fmul(
                isa.splat(b, load(b, pc, a[3], F32, 4), f32s), isa.fill(b, f32s, SUM_UNIT[pv])
            )

            def weigh_all(offsets, state):
                (total,) = state
                for at in (b.add(at, isa.elements(b, half)) for at in offsets for half in range(2)):
                    y = b.zext(b.sub(top, load(b, px, b.add(a[1], at), i16s, 2)), i32s)
                    w = weight(b, isa, y, number)
                    total = b.add(total, w)
                    store(b, b.fmul(b.sitofp(w, f32s), factor), pp, b.add(a[6], at), 4)
                return [total]

            (total,) = over_keys(b, isa, keys, [number(0)], weigh_all)
            store(b, total, ps, a[8], 4)
            return context.get_dummy_value()

        return sig, codegen

    return weights


@functools.cache
def row_weights_bf16(name: str, keys: int):
    """The same for pv "bf16" where the CPU multiplies bfloat16: p holds their bits.

    A weight is n * 2**-octaves, 128 <= n <= 255: the low bits of n below an exponent that whole octaves,
    and then `scale`, lower. vdpbf16ps adds up two weights in units of 2**-15: at most 2 * 255 * 2**15,
    which float32 holds.
    """
    isa, floats = VECTOR_ISAS[name], FLOAT_ISAS["avx512_bf16"]
    i16s, i32s = isa.vector(I16, 2), isa.vector(I32)

    @intrinsic
    def weights(typingctx, x, x_off, tops, i, scale, p, p_off, sums, s_off):
        sig = types.void(x, x_off, tops, i, scale, p, p_off, sums, s_off)

        def codegen(context, b, sig, a):
            target.guard("avx512_bf16", context.codegen(), target.BFLOAT16_ISAS)
            px, pq, pc, pp, ps = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4, 5, 7))

            def word(n):
                return constant(i16s, signed16(n))

            top = isa.splat(b, load(b, pq, a[3], I16, 2), i16s)
            below = b.lshr(b.sub(I32(ONE_F32), load(b, pc, a[3], I32, 4)), I32(16))
            below = isa.splat(b, b.trunc(below, I16), i16s)  # octaves of `scale` as an exponent
            total, nothing = constant(i32s, 0), constant(floats.floats, 0.0)
            for at in range(0, keys, 2 * isa.lanes):
                y = b.sub(top, load(b, px, b.add(a[1], I64(at)), i16s, 2))  # >= 0, Q8.8
                f = b.shl(y, word(8))
                g = isa.multiply_high(b, f, b.sub(word(B_B), isa.multiply_high(b, f, word(B_C))))
                h = isa.multiply_high(b, f, b.sub(word(B_A), g))
                n = b.lshr(b.sub(word(P_WIDE + 128), h), word(8))
                exponent = b.sub(word(BITS_128 + 127), b.lshr(y, word(1)))
                bits = b.or_(b.and_(exponent, word(EXPONENT)), b.and_(n, word(127)))
                bits = b.select(b.icmp_unsigned("<", y, word(SIXTEEN)), bits, word(0))
                pair = floats.dot(b, nothing, bits, word(UNITS))
                total = b.add(total, b.fptosi(pair, i32s))
                bits = isa.generic(b, "usub.sat", bits, below)
                store(b, bits, pp, b.add(a[6], I64(at)), 2)
            store(b, total, ps, a[8], 4)
            return context.get_dummy_value()

        return sig, codegen

    return weights
