"""One row of INT8 scores outside the fast path, whole vectors at a time: the arithmetic of `scores`, to the bit.

Dense masks and biases are asked for a key block ahead: their rows lie too far apart for the hardware to foresee the next one.
Scores are float32 in Q8.8 units. No multiply-add is fused here: every operation rounds once, as in the integer model.
"""
from __future__ import annotations

import functools

from numba import types
from numba.extending import intrinsic

from .. import fixedpoint as fx
from ..tiling import KEY_BLOCK
from .float_tiles import FLOAT_ISAS, fold, for_vectors, larger, row_change, whole
from .vectors import I8, I16, I32, I64, call, constant, data, load, prefetch, splat, store, vector

FLOATS = {16: "avx512", 8: "avx2", 4: "neon"}   # float vectors of as many lanes as those of an INT8 instruction set
HIDDEN, LOWEST = float("-inf"), float(fx.LOWEST)


def _rounded(b, isa, x):
    """float32 to the nearest int32, ties to even; x within range, NaN becomes 0."""
    return whole(b, isa, call(b, f"llvm.roundeven.v{isa.lanes}f32", isa.floats, x))


def _limited(b, isa, x):
    for test, bound in ((">", float(fx.T_LIMIT)), ("<", -float(fx.T_LIMIT))):
        x = b.select(b.fcmp_ordered(test, x, constant(isa.floats, bound)), constant(isa.floats, bound), x)
    return x


@functools.cache
def row_softcap(lanes: int):
    """Intrinsic f(x, x_off, count, cap, shift): x = cap * tanh((x + shift) / cap), `fixedpoint.tanh_f32` lane by lane."""
    def change(context, b, isa, sig, a, x, at):
        ints = vector(I32, isa.lanes)
        cap = splat(b, a[3], isa.floats)
        bits = b.bitcast(b.fdiv(b.fadd(x, splat(b, a[4], isa.floats)), cap), ints)
        z = b.fmul(b.bitcast(b.and_(bits, constant(ints, 0x7FFFFFFF)), isa.floats), constant(isa.floats, float(fx.TWO_LOG2E)))
        z = b.select(b.fcmp_ordered(">", z, constant(isa.floats, 40.0)), constant(isa.floats, 40.0), z)
        n = call(b, f"llvm.roundeven.v{isa.lanes}f32", isa.floats, z)
        f = b.fsub(z, n)
        e = b.fadd(b.fmul(f, constant(isa.floats, float(fx.E5))), constant(isa.floats, float(fx.E4)))
        for c in (fx.E3, fx.E2, fx.E1, 1.0):
            e = b.fadd(b.fmul(f, e), constant(isa.floats, float(c)))
        power = b.bitcast(b.shl(b.add(_rounded(b, isa, n), constant(ints, 127)), constant(ints, 23)), isa.floats)
        e = b.fmul(e, power)
        t = b.fdiv(b.fsub(e, constant(isa.floats, 1.0)), b.fadd(e, constant(isa.floats, 1.0)))
        t = b.or_(b.and_(b.bitcast(t, ints), constant(ints, 0x7FFFFFFF)), b.and_(bits, constant(ints, -0x80000000)))
        return b.fmul(cap, b.bitcast(t, isa.floats))
    return row_change(FLOATS[lanes], 2, change)


@functools.cache
def row_alibi(lanes: int):
    """Intrinsic f(x, x_off, count, slope, centre): x -= slope * |centre - column|."""
    def change(context, b, isa, sig, a, x, at):
        ints = vector(I32, isa.lanes)
        column = b.add(splat(b, b.trunc(at, I32), ints), ints(list(range(isa.lanes))))
        away = b.sub(splat(b, b.trunc(a[4], I32), ints), column)
        away = b.select(b.icmp_signed("<", away, constant(ints, 0)), b.neg(away), away)
        return b.fsub(x, b.fmul(splat(b, a[3], isa.floats), b.sitofp(away, isa.floats)))
    return row_change(FLOATS[lanes], 2, change)


@functools.cache
def row_bias(lanes: int):
    """Intrinsic f(x, x_off, count, bias, off): x += bias in Q8.8; -inf hides even a NaN."""
    def change(context, b, isa, sig, a, x, at):
        source, where = data(context, b, sig.args[3], a[3]), b.add(a[4], at)
        prefetch(b, b.gep(source, [b.mul(b.add(where, I64(KEY_BLOCK)), I64(4))]))
        bias = load(b, source, where, isa.floats, 4)
        hidden = constant(isa.floats, HIDDEN)
        changed = b.fadd(x, b.fmul(bias, constant(isa.floats, float(fx.LOG2E_Q8))))
        changed = b.select(b.fcmp_ordered("<", changed, constant(isa.floats, LOWEST)), constant(isa.floats, LOWEST), changed)
        return b.select(b.fcmp_ordered("==", bias, hidden), hidden, changed)
    return row_change(FLOATS[lanes], 2, change)


@functools.cache
def row_top(lanes: int):
    """Intrinsic f(x, x_off, count) -> (largest score, any NaN)."""
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def top(typingctx, x, x_off, count):
        sig = types.Tuple((types.float32, types.boolean))(x, x_off, count)

        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])

            def body(at, state):
                y = load(b, px, b.add(a[1], at), isa.floats, 4)
                return [larger(b, state[0], y), b.or_(state[1], b.zext(b.fcmp_unordered("uno", y, y), vector(I32, lanes)))]
            best, nan = for_vectors(b, a[2], lanes, [constant(isa.floats, HIDDEN), constant(vector(I32, lanes), 0)], body)
            spoiled = b.icmp_unsigned("!=", fold(b, nan, lambda b, x, y: b.or_(x, y)), I32(0))
            return context.make_tuple(b, sig.return_type, [fold(b, best, larger), spoiled])
        return sig, codegen
    return top


@functools.cache
def row_narrow(lanes: int):
    """Intrinsic f(x, x_off, count, base, out, out_off): out int16 = round(x) - base, at least -32768; that where x is -inf."""
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def narrow(typingctx, x, x_off, count, base, out, out_off):
        sig = types.void(x, x_off, count, base, out, out_off)

        def codegen(context, b, sig, a):
            px, po, ints = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[4], a[4]), vector(I32, lanes)
            base, lowest = splat(b, a[3], ints), constant(ints, fx.MASKED)

            def body(at, state):
                y = load(b, px, b.add(a[1], at), isa.floats, 4)
                t = b.sub(_rounded(b, isa, _limited(b, isa, y)), base)
                t = b.select(b.icmp_signed("<", t, lowest), lowest, t)
                t = b.select(b.fcmp_ordered("==", y, constant(isa.floats, HIDDEN)), lowest, t)
                store(b, b.trunc(t, vector(I16, lanes)), po, b.add(a[5], at), 2)
                return []
            for_vectors(b, a[2], lanes, [], body)
            return context.get_dummy_value()
        return sig, codegen
    return narrow


@functools.cache
def row_short(lanes: int):
    """Intrinsic f(x, x_off, count, out, out_off): out int16 = round(x), saturated; -32768 for -inf, 32767 for NaN."""
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def short(typingctx, x, x_off, count, out, out_off):
        sig = types.void(x, x_off, count, out, out_off)

        def codegen(context, b, sig, a):
            px, po, ints = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[3], a[3]), vector(I32, lanes)

            def body(at, state):
                y = load(b, px, b.add(a[1], at), isa.floats, 4)
                for test, bound in (("<", 32767.0), (">", -32768.0)):
                    y = b.select(b.fcmp_ordered(test, y, constant(isa.floats, bound)), y, constant(isa.floats, bound))
                t = b.bitcast(b.fadd(y, constant(isa.floats, 1.5 * 2.0**23)), ints)     # rounds; the low bits are the integer
                store(b, b.trunc(t, vector(I16, lanes)), po, b.add(a[4], at), 2)
                return []
            for_vectors(b, a[2], lanes, [], body)
            return context.get_dummy_value()
        return sig, codegen
    return short


@functools.cache
def row_mask(lanes: int):
    """Intrinsic f(x, x_off, count, mask, off): int16 scores x become -32768 where the uint8 mask is 0; count times `lanes` keys."""
    @intrinsic
    def mask_row(typingctx, x, x_off, count, mask, off):
        sig = types.void(x, x_off, count, mask, off)

        def codegen(context, b, sig, a):
            px, pm, words = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[3], a[3]), vector(I16, lanes)

            def body(at, state):
                where = b.add(a[1], at)
                prefetch(b, b.gep(pm, [b.add(b.add(a[4], at), I64(KEY_BLOCK))]))
                seen = load(b, pm, b.add(a[4], at), vector(I8, lanes), 1)
                x = b.select(b.icmp_unsigned("!=", seen, constant(seen.type, 0)), load(b, px, where, words, 2),
                             constant(words, fx.MASKED))
                store(b, x, px, where, 2)
                return []
            for_vectors(b, a[2], lanes, [], body)
            return context.get_dummy_value()
        return sig, codegen
    return mask_row
