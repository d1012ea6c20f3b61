"""Row operations of the floating-point kernels: one row of scores, whole vectors at a time.

NaN is kept on purpose: comparisons are written so that a NaN score stays NaN and reaches the row
sum.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...numerics.fixedpoint import LOG2E
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    compare,
    data,
    load,
    store,
    vector,
)
from .float_exp2 import EXP2, exp2, polynomial, whole
from .float_isas import BF16, FLOAT_ISAS, NO_BFLOAT, larger


def for_vectors(b, count, lanes, state, body):
    """`for n in range(count)`: body(offset in elements, state) -> state; returns the last state.

    No iteration if count is 0.

    The test is at the loop's head, so that LLVM unrolls the loop: with `vectors.repeat` float32
    attention takes 5 to 25 % longer.
    """
    entry = b.block
    head, loop, done = (b.append_basic_block(part) for part in ("row", "row.loop", "row.end"))
    b.branch(head)
    b.position_at_end(head)
    n = b.phi(I64)
    n.add_incoming(I64(0), entry)
    phis = []
    for x in state:
        phis.append(b.phi(x.type))
        phis[-1].add_incoming(x, entry)
    b.cbranch(compare(b, "icmp_signed", "<", n, count), loop, done)
    b.position_at_end(loop)
    after = body(b.mul(n, I64(lanes)), phis)
    n.add_incoming(b.add(n, I64(1)), b.block)
    for phi, x in zip(phis, after, strict=True):
        phi.add_incoming(x, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


@functools.cache
def row_max(name: str):
    """Intrinsic f(x, x_off, count) -> the largest score of `count` vectors; NaN does not count."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def largest(typingctx, x, x_off, count):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])

            def body(at, state):
                return [larger(b, state[0], load(b, px, b.add(a[1], at), isa.floats, 4))]

            (top,) = for_vectors(b, a[2], isa.lanes, [isa.fill(b, isa.floats, float("-inf"))], body)
            return isa.top(b, top)

        return types.float32(x, x_off, count), codegen

    return largest


@functools.cache
def row_total(name: str):
    """Intrinsic f(x, x_off) -> the sum of one vector."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def total(typingctx, x, x_off):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            return isa.total(b, load(b, px, a[1], isa.floats, 4))

        return types.float32(x, x_off), codegen

    return total


@functools.cache
def row_times(name: str):
    """Intrinsic f(x, x_off, count, y, out, out_off): out = x * y, `count` vectors.

    Returns whether a product is infinite or NaN.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def times(typingctx, x, x_off, count, y, out, out_off):
        def codegen(context, b, sig, a):
            px, po = (data(context, b, sig.args[n], a[n]) for n in (0, 4))
            y = isa.splat(b, a[3], isa.floats)
            infinite = isa.fill(b, isa.floats, float("inf"))

            def body(at, state):
                product = b.fmul(load(b, px, b.add(a[1], at), isa.floats, 4), y)
                store(b, product, po, b.add(a[5], at), 4)
                size = isa.generic(b, "fabs", product)
                return [b.or_(state[0], compare(b, "fcmp_unordered", "==", size, infinite))]

            none = ir.Constant(isa.vector(ir.IntType(1)), None)
            (found,) = for_vectors(b, a[2], isa.lanes, [none], body)
            return isa.any_set(b, found)

        return types.boolean(x, x_off, count, y, out, out_off), codegen

    return times


@functools.cache
def row_beyond(name: str):
    """Intrinsic f(x, x_off, count, bound) -> whether `count` vectors of operands hold one above.

    bound : bits of a float32 number, which NaN and infinity are above, too
    """
    isa = FLOAT_ISAS[name]
    lanes, element = isa.lanes * isa.group, I32 if isa.group == 1 else I16
    kind, truth = (
        isa.vector(x) if isa.group == 1 else vector(x, lanes) for x in (element, ir.IntType(1))
    )

    @intrinsic
    def beyond(typingctx, x, x_off, count, bound):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            bound = b.trunc(b.lshr(a[3], I32(32 - element.width)), element)
            bound = isa.splat(b, bound, kind)

            def body(at, state):
                bits = load(b, px, b.add(a[1], at), kind, element.width // 8)
                size = b.and_(bits, isa.fill(b, kind, (1 << element.width - 1) - 1))
                return [b.or_(state[0], compare(b, "icmp_unsigned", ">", size, bound))]

            (found,) = for_vectors(b, a[2], lanes, [ir.Constant(truth, None)], body)
            return isa.any_set(b, found)

        return types.boolean(x, x_off, count, types.uint32), codegen

    return beyond


@functools.cache
def row_exceeds(name: str):
    """Intrinsic f(x, x_off, count, c, bound) -> whether any score times c > 0 of a row is above the
    bound; also if the bound is NaN, and maybe if a score is.

    The largest score is found first: one instruction for a vector.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def exceeds(typingctx, x, x_off, count, c, bound):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])

            def body(at, state):
                return [larger(b, load(b, px, b.add(a[1], at), isa.floats, 4), state[0])]

            lowest = isa.fill(b, isa.floats, float("-inf"))
            (top,) = for_vectors(b, a[2], isa.lanes, [lowest], body)
            c, bound = (isa.splat(b, y, isa.floats) for y in a[3:])
            return isa.any_set(b, compare(b, "fcmp_unordered", ">", b.fmul(top, c), bound))

        return types.boolean(x, x_off, count, c, bound), codegen

    return exceeds


@functools.cache
def row_leaves(name: str):
    """Intrinsic f(x, x_off, count, c, lowest, bound) -> whether any score times c of a row is not
    from `lowest` to `bound`, or NaN.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def leaves(typingctx, x, x_off, count, c, lowest, bound):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            c, lowest, bound = (isa.splat(b, y, isa.floats) for y in a[3:])

            def body(at, state):
                y = b.fmul(load(b, px, b.add(a[1], at), isa.floats, 4), c)
                above = compare(b, "fcmp_unordered", ">", y, bound)
                return [b.or_(state[0], b.or_(above, compare(b, "fcmp_ordered", "<", y, lowest)))]

            none = ir.Constant(isa.vector(ir.IntType(1)), None)
            (found,) = for_vectors(b, a[2], isa.lanes, [none], body)
            return isa.any_set(b, found)

        return types.boolean(x, x_off, count, c, lowest, bound), codegen

    return leaves


def _weigh(context, b, isa, sig, a, change):
    """p = 2**change(x), as operands of `value_tile`, and l, one vector, += p.

    The last four arguments are p, p_off, l, l_off.
    """
    end = len(a)
    px, pp, pl = (data(context, b, sig.args[n], a[n]) for n in (0, end - 4, end - 2))

    def body(at, state):
        x = change(load(b, px, b.add(a[1], at), isa.floats, 4))
        y = exp2(b, isa, x)
        store(
            b, y if isa.group == 1 else narrow(b, isa, y), pp, b.add(a[end - 3], at), 4 // isa.group
        )
        return [b.fadd(state[0], y)]

    (total,) = for_vectors(b, a[2], isa.lanes, [load(b, pl, a[end - 1], isa.floats, 4)], body)
    store(b, total, pl, a[end - 1], 4)
    return context.get_dummy_value()


@functools.cache
def row_exp(name: str):
    """Intrinsic f(x, x_off, count, m, p, p_off, l, l_off).

    p = 2**(x - m), as operands of `value_tile`; l, one vector, += p.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def weights(typingctx, x, x_off, count, m, p, p_off, l, l_off):
        def codegen(context, b, sig, a):
            m = isa.splat(b, a[3], isa.floats)
            return _weigh(context, b, isa, sig, a, lambda x: b.fsub(x, m))

        return types.void(x, x_off, count, m, p, p_off, l, l_off), codegen

    return weights


@functools.cache
def row_weights(name: str):
    """Intrinsic f(x, x_off, count, c, m, p, p_off, l, l_off).

    `row_exp` of scores that still lack their factor: 2**(x * c - m).
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def weights(typingctx, x, x_off, count, c, m, p, p_off, l, l_off):
        def codegen(context, b, sig, a):
            c = isa.splat(b, a[3], isa.floats)
            below = isa.splat(b, b.fneg(a[4]), isa.floats)
            return _weigh(context, b, isa, sig, a, lambda x: isa.fma(b, x, c, below))

        return types.void(x, x_off, count, c, m, p, p_off, l, l_off), codegen

    return weights


def narrow(b, isa, x):
    """float32 to bfloat16, ties to even."""
    x = call(
        b,
        f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * isa.lanes}",
        vector(I16 if NO_BFLOAT else BF16, isa.lanes),
        x,
    )
    return b.bitcast(x, vector(I16, isa.lanes))


@functools.cache
def row_narrow(name: str):
    """Intrinsic f(x, x_off, out, out_off, count): float32 x to bfloat16 bits, `count` vectors."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def narrow_row(typingctx, x, x_off, out, out_off, count):
        def codegen(context, b, sig, a):
            px, po = (data(context, b, sig.args[n], a[n]) for n in (0, 2))

            def body(at, state):
                y = narrow(b, isa, load(b, px, b.add(a[1], at), isa.floats, 4))
                store(b, y, po, b.add(a[3], at), 2)
                return []

            for_vectors(b, a[4], isa.lanes, [], body)
            return context.get_dummy_value()

        return types.void(x, x_off, out, out_off, count), codegen

    return narrow_row


def row_change(name: str, more: int, change):
    """Intrinsic f(x, x_off, count, ...) of `more` (1 or 2) arguments.

    x = change(context, b, isa, sig, args, x, offset).
    """
    isa = FLOAT_ISAS[name]

    def codegen(context, b, sig, a):
        px = data(context, b, sig.args[0], a[0])

        def body(at, state):
            where = b.add(a[1], at)
            store(
                b,
                change(context, b, isa, sig, a, load(b, px, where, isa.floats, 4), at),
                px,
                where,
                4,
            )
            return []

        for_vectors(b, a[2], isa.lanes, [], body)
        return context.get_dummy_value()

    @intrinsic
    def with_one(typingctx, x, x_off, count, y):
        return types.void(x, x_off, count, y), codegen

    @intrinsic
    def with_two(typingctx, x, x_off, count, y, z):
        return types.void(x, x_off, count, y, z), codegen

    return with_one if more == 1 else with_two


@functools.cache
def row_scale(name: str):
    """Intrinsic f(x, x_off, count, c): x *= c."""

    def change(context, b, isa, sig, a, x, at):
        return b.fmul(x, isa.splat(b, a[3], isa.floats))

    return row_change(name, 1, change)


@functools.cache
def row_softcap(name: str, hidden: bool = False):
    """Intrinsic f(x, x_off, count, cap): x = cap * tanh(x / cap), exact also where x is small.

    hidden : -inf stays -inf
    """

    def change(context, b, isa, sig, a, x, at):
        cap = isa.splat(b, a[3], isa.floats)
        part = isa.splat(b, b.fdiv(F32(1.0), a[3]), isa.floats)
        sign = isa.vector(I32)
        bits = b.bitcast(b.fmul(x, part), sign)
        magnitude = b.bitcast(b.and_(bits, isa.fill(b, sign, 0x7FFFFFFF)), isa.floats)
        y = b.fmul(magnitude, isa.fill(b, isa.floats, 2 * LOG2E))
        y = b.select(
            compare(b, "fcmp_ordered", ">", y, isa.fill(b, isa.floats, 30.0)),
            isa.fill(b, isa.floats, 30.0),
            y,
        )
        n = isa.generic(b, "roundeven", y)
        f = b.fsub(y, n)
        g = polynomial(b, isa, EXP2[1:], f)
        power = b.bitcast(
            b.shl(b.add(whole(b, isa, n), isa.fill(b, sign, 127)), isa.fill(b, sign, 23)),
            isa.floats,
        )
        e = isa.fma(b, b.fmul(f, g), power, b.fsub(power, isa.fill(b, isa.floats, 1.0)))  # 2**y - 1
        t = b.fdiv(e, b.fadd(e, isa.fill(b, isa.floats, 2.0)))
        t = b.or_(b.bitcast(t, sign), b.and_(bits, isa.fill(b, sign, -0x80000000)))
        capped = b.fmul(cap, b.bitcast(t, isa.floats))
        if not hidden:
            return capped
        lowest = isa.fill(b, isa.floats, float("-inf"))
        return b.select(compare(b, "fcmp_ordered", "==", x, lowest), lowest, capped)

    return row_change(name, 1, change)


@functools.cache
def row_alibi(name: str):
    """Intrinsic f(x, x_off, count, slope, centre): x -= slope * |centre - column|."""

    def change(context, b, isa, sig, a, x, at):
        ints = isa.vector(I32)
        column = b.add(isa.splat(b, b.trunc(at, I32), ints), isa.index(b))
        away = b.sub(isa.splat(b, b.trunc(a[4], I32), ints), column)
        away = b.select(
            compare(b, "icmp_signed", "<", away, isa.fill(b, ints, 0)),
            b.sub(isa.fill(b, ints, 0), away),
            away,
        )
        return isa.fma(b, b.fneg(isa.splat(b, a[3], isa.floats)), b.sitofp(away, isa.floats), x)

    return row_change(name, 2, change)


@functools.cache
def row_bias(name: str):
    """Intrinsic f(x, x_off, count, bias, off): x += bias * log2(e).

    A bias of -inf hides even a NaN.
    """

    def change(context, b, isa, sig, a, x, at):
        bias = load(b, data(context, b, sig.args[3], a[3]), b.add(a[4], at), isa.floats, 4)
        hidden = isa.fill(b, isa.floats, float("-inf"))
        return b.select(
            compare(b, "fcmp_ordered", "==", bias, hidden),
            hidden,
            isa.fma(b, bias, isa.fill(b, isa.floats, LOG2E), x),
        )

    return row_change(name, 2, change)


@functools.cache
def row_mask(name: str):
    """Intrinsic f(x, x_off, count, mask, off): x = -inf where the uint8 mask is 0."""

    def change(context, b, isa, sig, a, x, at):
        seen = load(b, data(context, b, sig.args[3], a[3]), b.add(a[4], at), isa.vector(I8), 1)
        return b.select(
            compare(b, "icmp_unsigned", "!=", seen, isa.fill(b, seen.type, 0)),
            x,
            isa.fill(b, isa.floats, float("-inf")),
        )

    return row_change(name, 2, change)


@functools.cache
def row_span(name: str):
    """Intrinsic f(x, x_off, count, first, stop): x = -inf before column `first` and from `stop` on.

    By whole vectors: a vector that is loaded where single numbers have just been stored waits for them.
    """

    def change(context, b, isa, sig, a, x, at):
        words = isa.vector(I32)
        column = b.add(isa.index(b), isa.splat(b, b.trunc(at, I32), words))
        first, stop = (isa.splat(b, b.trunc(bound, I32), words) for bound in a[3:5])
        seen = b.and_(
            compare(b, "icmp_signed", ">=", column, first),
            compare(b, "icmp_signed", "<", column, stop),
        )
        return b.select(seen, x, isa.fill(b, isa.floats, float("-inf")))

    return row_change(name, 2, change)


@functools.cache
def any_byte(name: str):
    """Intrinsic f(mask, off, count) -> whether any byte of `count` vectors is not 0."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def found(typingctx, mask, off, count):
        def codegen(context, b, sig, a):
            pm = data(context, b, sig.args[0], a[0])
            bytes_ = isa.vector(I8)

            def body(at, state):
                return [b.or_(state[0], load(b, pm, b.add(a[1], at), bytes_, 1))]

            (seen,) = for_vectors(b, a[2], isa.lanes, [isa.fill(b, bytes_, 0)], body)
            return isa.any_set(b, seen)

        return types.boolean(mask, off, count), codegen

    return found
