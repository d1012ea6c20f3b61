"""The pieces of packing, all in registers.

Squares of words are transposed, rows are interleaved, packed keys are summed.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit import target
from .isas import VECTOR_ISAS
from .vectors import I8, I16, I32, I64, constant, data, load, repeat, shuffle, store, vector


def transposed(b, rows: list, unit: int = 1) -> list:
    """Vectors of len(rows) units of `unit` words, transposed."""
    rows, lanes = list(rows), len(rows) * unit
    step = len(rows) // 2
    while step:  # swap the off-diagonal quarters, ever smaller
        words = step * unit
        low = [n if not n & words else lanes + n - words for n in range(lanes)]
        high = [n + words if not n & words else lanes + n for n in range(lanes)]
        for r in range(len(rows)):
            if not r & step:
                x, y = rows[r], rows[r + step]
                rows[r], rows[r + step] = shuffle(b, x, y, low), shuffle(b, x, y, high)
        step //= 2
    return rows


@functools.cache
def transpose(
    lanes: int, order: tuple[int, ...] = (), partial: bool = False, element: ir.Type = I32
):
    """Intrinsic f(x, x_off, x_stride, out, out_off, out_stride): a square of words transposed.

    The square has lanes x lanes words, or elements of another type, which stay in registers.

    Offsets and strides are in elements. Row r of the square is row order[r] of x, or row r.

    `partial`: f(..., out_stride, last), the last row of x, which stands for all that would follow it.
    """

    def codegen(context, b, sig, a):
        px = data(context, b, sig.args[0], a[0])
        po = data(context, b, sig.args[3], a[3])
        words, size = vector(element, lanes), element.width // 8
        rows = []
        for r in order or range(lanes):
            row = ir.Constant(a[2].type, r)
            if partial:
                row = b.select(b.icmp_signed("<", row, a[6]), row, a[6])
            rows.append(load(b, px, b.add(a[1], b.mul(a[2], row)), words, size, 1))
        for r, x in enumerate(transposed(b, rows)):
            store(b, x, po, b.add(a[4], b.mul(a[5], ir.Constant(a[5].type, r))), size)
        return context.get_dummy_value()

    @intrinsic
    def square(typingctx, x, x_off, x_stride, out, out_off, out_stride):
        return types.void(x, x_off, x_stride, out, out_off, out_stride), codegen

    @intrinsic
    def last_square(typingctx, x, x_off, x_stride, out, out_off, out_stride, last):
        return types.void(x, x_off, x_stride, out, out_off, out_stride, x_stride), codegen

    return last_square if partial else square


@functools.cache
def interleave(lanes: int, group: int, offset: int, order: tuple[int, ...] = ()):
    """Intrinsic f(x, x_off, x_stride, out, out_off): `group` rows of int8 interleaved.

    Of `lanes` columns, the values of the rows side by side.

    out[out_off + group * c + r] = x[x_off + x_stride * r + c] + offset, in int8 (group 4) or int16
    (group 2), in elements; row r is row order[r] of x where that is given.
    """

    @intrinsic
    def interleaved(typingctx, x, x_off, x_stride, out, out_off):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            po = data(context, b, sig.args[3], a[3])
            rows = [
                load(b, px, b.add(a[1], b.mul(a[2], I64(r))), vector(I8, lanes), 1)
                for r in order or range(group)
            ]
            if group == 2:
                rows = [b.sext(row, vector(I16, lanes)) for row in rows]
            while len(rows) > 1:  # side by side, in one vector
                rows = [
                    shuffle(b, p, q, list(range(2 * p.type.count)))
                    for p, q in zip(rows[::2], rows[1::2], strict=True)
                ]
            whole = shuffle(
                b, rows[0], rows[0], [r * lanes + c for c in range(lanes) for r in range(group)]
            )
            if offset:
                whole = b.add(whole, constant(whole.type, offset))
            store(b, whole, po, a[4], 4 // group)
            return context.get_dummy_value()

        return types.void(x, x_off, x_stride, out, out_off), codegen

    return interleaved


@functools.cache
def first_values(name: str):
    """Intrinsic f(k, k_off, groups, start, start_off).

    What the sums of a packed panel's keys start from.

    start[j] = -q_offset * (the sum of key j over its channels), int32: it takes the offset of Q out
    of the dot products.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def sums(typingctx, k, k_off, groups, start, start_off):
        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            pk = data(context, b, sig.args[0], a[0])
            ps = data(context, b, sig.args[3], a[3])
            i32s = isa.vector(I32)
            zero = isa.fill(b, i32s, 0)
            offsets = b.bitcast(isa.fill(b, i32s, isa.q_offset * 0x01010101), isa.operand)

            def add(g, sums):
                column = b.add(a[1], b.mul(g, isa.elements(b, isa.group * isa.nv)))
                return [
                    isa.score_dot(
                        b,
                        x,
                        offsets,
                        load(b, pk, b.add(column, isa.elements(b, isa.group * v)), isa.operand, 1),
                    )
                    for v, x in enumerate(sums)
                ]

            for v, x in enumerate(repeat(b, I64(0), a[2], [zero] * isa.nv, add)):
                store(b, b.sub(zero, x), ps, b.add(a[4], isa.elements(b, v)), 4)
            return context.get_dummy_value()

        return types.void(k, k_off, groups, start, start_off), codegen

    return sums
