"""The softmax of the INT8 kernel in vectors, written once for all ISAs: tops of a block of
scores, the weights of a row with their sum, and the sums of 8 rows.

Scores are int16 Q8.8 in rows of KEY_BLOCK keys; `softmax` loops over the rows.
"""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import ONE_Q8, P_A, P_B, P_WIDE
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, weight_planes
from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    Isa,
    call,
    constant,
    data,
    load,
    signed16,
    store,
    vector,
)


def over_keys(b, isa: Isa, keys: int, state: list, body):
    """body(offsets, state) -> state over all int16 vectors of `keys` scores.

    All vectors at once, or two an iteration where `keys` is known only when the code runs.
    """
    if not isa.scalable:
        return body([I64(2 * isa.lanes * v) for v in range(keys // (2 * isa.lanes))], state)
    entry = b.block
    loop = b.append_basic_block("keys")
    done = b.append_basic_block("keys.end")
    b.branch(loop)
    b.position_at_end(loop)
    j = b.phi(I64)
    now = [b.phi(x.type) for x in state]
    new = body([j, b.add(j, isa.elements(b, 2))], now)
    following = b.add(j, isa.elements(b, 4))
    for phi, first, back in zip([j, *now], [I64(0), *state], [following, *new], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(back, loop)
    b.cbranch(b.icmp_unsigned("<", following, I64(keys)), loop, done)
    b.position_at_end(done)
    return new


@functools.cache
def block_tops(name: str, keys: int, step: int = ONE_Q8):
    """Intrinsic f(x, x_off, x_stride, octave, tops, i).

    The largest of `keys` int16 Q8.8 scores of 8 rows, rounded up.

    octave[i:i + 8] = int32, to the whole octave;  tops[i:i + 8] = int16 Q8.8, to `step`, a power of
    two (wrapped where it leaves the range)
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def find(typingctx, x, x_off, x_stride, octave, tops, i):
        sig = types.void(x, x_off, x_stride, octave, tops, i)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px, po, pq = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 4))
            i16s = isa.vector(I16, 2)
            rows = [b.add(a[1], b.mul(a[2], I64(r))) for r in range(8)]

            def larger(offsets, tops):
                return [
                    functools.reduce(
                        lambda u, v: isa.generic(b, "smax", u, v),
                        (load(b, px, b.add(row, at), i16s, 2) for at in offsets),
                        top,
                    )
                    for top, row in zip(tops, rows, strict=True)
                ]

            largest = over_keys(b, isa, keys, [isa.fill(b, i16s, -32768)] * 8, larger)
            i32s = vector(I32, 8)
            best, n = b.sext(isa.fold_rows(b, largest, "smax"), i32s), a[5]

            def up(unit):
                """`best` rounded up to whole units."""
                return b.and_(b.add(best, constant(i32s, unit - 1)), constant(i32s, -unit))

            store(b, b.ashr(up(ONE_Q8), constant(i32s, 8)), po, n, 4)
            store(b, b.trunc(up(step), vector(I16, 8)), pq, n, 2)
            return context.get_dummy_value()

        return sig, codegen

    return find


def _operands(b, isa: Isa, words: list) -> list:
    """The high bytes of 16-bit words as dot operands."""
    if isa.group == 4:  # the high bytes of two vectors side by side
        return [isa.high_bytes(b, *words[n : n + 2]) for n in range(0, len(words), 2)]
    return [b.lshr(w, isa.fill(b, w.type, 8)) for w in words]


@functools.cache
def row_weights(name: str, keys: int, pv: str = "int8"):
    """Intrinsic f(x, x_off, tops, i, p, p_off, sums, s_off).

    The softmax weights of one row of one key block.

    x int16 Q8.8, `keys` scores; p = round(255 * 2**((x - tops[i]) / 256)) in the type of the first dot
    operand, with the bits of `fixedpoint.exp2_p8`; with pv "int16" those of `exp2_w15`, as one
    int16, or as two bytes: the low ones are `KEY_BLOCK` elements behind the high ones.
    sums[s_off: s_off + lanes] int32 add up to the sum of p.

    Short because a 16-bit variable shift by 16 or more is 0 (no clamp), one byte shuffle takes the
    high bytes of two vectors, and the dot instruction with ones adds up the weights.
    """
    isa = VECTOR_ISAS[name]
    planes = weight_planes(name, pv)
    i16s = isa.vector(I16, 2)
    i32s = isa.vector(I32)

    @intrinsic
    def weights(typingctx, x, x_off, tops, i, p, p_off, sums, s_off):
        sig = types.void(x, x_off, tops, i, p, p_off, sums, s_off)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px, pq, pp, ps = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4, 6))
            top = isa.splat(b, load(b, pq, a[3], I16, 2), i16s)

            def word(n):
                return isa.fill(b, i16s, signed16(n))

            def weigh(at):
                y = b.sub(top, load(b, px, b.add(a[1], at), i16s, 2))  # >= 0, Q8.8
                f = b.shl(y, word(8))  # fraction, Q0.16
                h = isa.multiply_high(b, f, b.sub(word(P_A), isa.multiply_high(b, f, word(P_B))))
                mantissa, octaves = b.sub(word(P_WIDE), h), b.lshr(y, word(8))
                if pv == "int16":
                    return isa.shift_right(b, mantissa, b.add(octaves, word(1)))
                return b.add(isa.shift_right(b, mantissa, octaves), word(128))

            def operands(words):
                """A list of dot operands for each plane of the weights."""
                if pv == "int8":
                    return [_operands(b, isa, words)]
                if planes == 1:
                    return [words]
                low = [b.shl(w, word(8)) for w in words]
                return [_operands(b, isa, words), _operands(b, isa, low)]

            def weigh_all(offsets, state):
                totals = list(state)
                found = operands([weigh(at) for at in offsets])
                for plane, row in enumerate(found):
                    first = b.add(a[5], I64(plane * KEY_BLOCK))
                    for at, w in zip(offsets[:: isa.group // 2], row, strict=True):
                        store(b, w, pp, b.add(first, at), 4 // isa.group)
                        ones = isa.fill(b, isa.operand, 1)
                        totals[plane] = isa.value_dot(b, totals[plane], w, ones)
                return totals

            total, *low = over_keys(b, isa, keys, [isa.fill(b, i32s, 0)] * planes, weigh_all)
            if low:
                total = b.add(b.shl(total, isa.fill(b, i32s, 8)), low[0])
            store(b, total, ps, a[7], 4)
            return context.get_dummy_value()

        return sig, codegen

    return weights


@functools.cache
def block_totals(name: str):
    """Intrinsic f(sums, total, i).

    total[i:i + 8] int32 = the sums of 8 rows of `lanes` int32 each, from row i of `sums` on.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def totals(typingctx, sums, total, i):
        sig = types.void(sums, total, i)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            ps = data(context, b, sig.args[0], a[0])
            pt = data(context, b, sig.args[1], a[1])
            lanes = isa.elements(b, 1)
            i32s = isa.vector(I32)
            rows = [load(b, ps, b.mul(b.add(a[2], I64(r)), lanes), i32s, 4) for r in range(8)]
            store(b, isa.fold_rows(b, rows, "add"), pt, a[2], 4)
            return context.get_dummy_value()

        return sig, codegen

    return totals


def power_of_two(b, n):
    """2**-min(n, MOST_BELOW) as float32, of a vector of int32 n >= 0: made of exponent bits."""
    lanes = n.type.count
    n = call(b, f"llvm.smin.v{lanes}i32", n.type, n, constant(n.type, fx.MOST_BELOW))
    return b.bitcast(
        b.shl(b.sub(constant(n.type, 127), n), constant(n.type, 23)), vector(F32, lanes)
    )


def below_octave(b, top):
    """`fixedpoint.below_octave` of a vector of int32, of which the low 16 bits count."""
    ints, floats = top.type, vector(F32, top.type.count)
    eighths = b.sub(constant(ints, 0), b.lshr(top, constant(ints, 5)))

    def factor(bit, value):
        unset = b.icmp_unsigned("==", b.and_(eighths, constant(ints, bit)), constant(ints, 0))
        return b.select(unset, constant(floats, 1.0), constant(floats, float(value)))

    half, quarter = factor(4, fx.HALF_OCTAVE), factor(2, fx.QUARTER_OCTAVE)
    return b.fmul(b.fmul(half, quarter), factor(1, fx.EIGHTH_OCTAVE))


@intrinsic
def block_scales(typingctx, octave, top, m, scale, i):
    """scale[i:i + 8] = 2**(top / 256 - m): what brings the sums of 8 rows to their running octaves.

    octave, m : int32;  top : int16 Q8.8, relative to any whole octave;  scale : float32
    """

    def codegen(context, b, sig, a):
        po, pt, pm, ps = (data(context, b, sig.args[n], a[n]) for n in range(4))
        eight, i = vector(I32, 8), a[4]
        above = b.sub(load(b, pm, i, eight, 4), load(b, po, i, eight, 4))
        own = below_octave(b, b.sext(load(b, pt, i, vector(I16, 8), 2), eight))
        store(b, b.fmul(power_of_two(b, above), own), ps, i, 4)
        return context.get_dummy_value()

    return types.void(octave, top, m, scale, i), codegen


@functools.cache
def result_row(name: str):
    """Intrinsic f(o, at, v_scale, reciprocal, out, out_at, width): out = o * reciprocal * v_scale of
    a row of `width` float32, rounded after each product.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def store_row(typingctx, o, at, v_scale, reciprocal, out, out_at, width):
        def codegen(context, b, sig, a):
            po, ps, pt = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4))
            step, width = isa.elements(b, 1), a[6]
            whole = b.sub(width, b.urem(width, step))

            def scale(first, stop, step, kind, factor):
                with cgutils.for_range_slice(b, first, stop, step, I64) as (t, _):
                    x = b.fmul(load(b, po, b.add(a[1], t), kind, 4), factor)
                    x = b.fmul(x, load(b, ps, t, kind, 4))
                    store(b, x, pt, b.add(a[5], t), 4)

            floats = isa.vector(F32)
            scale(I64(0), whole, step, floats, isa.splat(b, a[3], floats))
            scale(whole, width, I64(1), F32, a[3])
            return context.get_dummy_value()

        place = types.int64
        return types.void(o, place, v_scale, types.float32, out, place, place), codegen

    return store_row
