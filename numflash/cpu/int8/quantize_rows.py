"""Rows of floats to int8, eight at a time, in vectors that LLVM splits or joins as the target
needs: one source for every CPU.

Intrinsics on addresses, for input whose magnitudes stay below `PLAIN`: there nothing overflows,
nothing has to be clipped, and the results are those of `numflash.numerics.quantization` to the bit. A vector
at the end of a row begins `LANES` before it, where it overlaps the one before: all that is done
here comes to the same when it is done twice. So rows have `LANES` elements at least.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...numerics.quantize_kernels import MAGNITUDE, NO_SCALE, ROUND
from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    call,
    constant,
    fold_tree,
    load_at,
    pointer,
    pointer_at,
    repeat,
    splat,
    store_at,
    vector,
)

# elements of a vector, rows at a time, vectors of channels at a time
LANES = 16
ROWS = 8
WIDE = 4
PLAIN = 2.0**96
FLOATS = vector(F32, LANES)
INTS = vector(I32, LANES)
EIGHT = vector(F32, ROWS), vector(I32, ROWS)


def _floats(b, kind, base, element):
    """LANES values from `element` on, as float32; bfloat16 is the upper half of one."""
    if kind == "float32":
        return load_at(b, base, FLOATS, b.mul(element, I64(4)))
    bits = b.zext(load_at(b, base, vector(I16, LANES), b.mul(element, I64(2)), 2), INTS)
    return b.bitcast(b.shl(bits, constant(INTS, 16)), FLOATS)


def _magnitude(b, x):
    """|x| as bits: these are in the order of the numbers."""
    return b.and_(b.bitcast(x, INTS), constant(INTS, int(MAGNITUDE)))


def _larger(b, x, y):
    return call(b, f"llvm.smax.v{x.type.count}i32", x.type, x, y)


def _place(b, n, d, width=LANES):
    """The element at which vector n of a row begins: the last one ends with the row."""
    place = b.mul(n, I64(width))
    last = b.sub(d, I64(width))
    return b.select(b.icmp_signed("<", place, last), place, last)


def _count(b, d, width=LANES):
    return b.sdiv(b.add(d, I64(width - 1)), I64(width))


def _rows(b, first, stride, count):
    """Addresses of ROWS rows; those from `count` on are the last one again."""
    last = b.sub(count, I64(1))
    for r in range(ROWS):
        row = I64(r)
        yield pointer_at(
            b, first, b.mul(stride, b.select(b.icmp_signed("<", row, last), row, last))
        )


@functools.cache
def row_scales(kind: str):
    """Intrinsic f(x, stride, count, d, shift, scale, factor) -> largest bits.

    The scales of up to ROWS rows of x - shift.

    scale[r] = peak / 127 and factor[r] = 127 / peak, float32, or 1 and 0 for a row of nothing; ROWS
    of each are stored.
    """

    @intrinsic
    def run(typingctx, x, stride, count, d, shift, scale, factor):
        def codegen(context, b, sig, args):
            px, ps, po, pf = (pointer(b, args[n]) for n in (0, 4, 5, 6))
            rows = list(_rows(b, px, args[1], args[2]))

            def peaks(n, tops):
                place = _place(b, n, args[3])
                off = load_at(b, ps, FLOATS, b.mul(place, I64(4)))
                return [
                    _larger(b, top, _magnitude(b, b.fsub(_floats(b, kind, row, place), off)))
                    for row, top in zip(rows, tops, strict=True)
                ]

            tops = repeat(b, I64(0), _count(b, args[3]), [constant(INTS, 0)] * ROWS, peaks)
            floats, _ = EIGHT
            bits = fold_tree(b, tops, functools.partial(_larger, b))
            peak = b.bitcast(bits, floats)
            full = constant(floats, 127.0)
            usable = b.fcmp_ordered(">", peak, constant(floats, float(NO_SCALE)))
            store_at(b, b.select(usable, b.fdiv(peak, full), constant(floats, 1.0)), po, I64(0))
            store_at(b, b.select(usable, b.fdiv(full, peak), constant(floats, 0.0)), pf, I64(0))
            return call(b, "llvm.vector.reduce.smax.v8i32", I32, bits)

        return types.int32(x, stride, count, d, shift, scale, factor), codegen

    return run


@functools.cache
def quantize_rows(kind: str, by_channel: bool, bits: int = 8):
    """Intrinsic f(x, stride, count, d, shift, factor, out, out_stride).

    Up to ROWS rows of (x - shift) * factor, rounded to even.

    factor: one for each row, or for each channel (`by_channel`, where shift is not read); out: int8
    or int16 (`bits`).
    """
    narrow = vector(ir.IntType(bits), LANES)

    @intrinsic
    def run(typingctx, x, stride, count, d, shift, factor, out, out_stride):
        def codegen(context, b, sig, args):
            px, ps, pf, po = (pointer(b, args[n]) for n in (0, 4, 5, 6))
            rows = list(_rows(b, px, args[1], args[2]))
            outs = list(_rows(b, po, args[7], args[2]))
            if not by_channel:
                own = [splat(b, load_at(b, pf, F32, I64(4 * r)), FLOATS) for r in range(ROWS)]

            def quantize(n, _):
                place = _place(b, n, args[3])
                known = load_at(b, pf if by_channel else ps, FLOATS, b.mul(place, I64(4)))
                for r, (row, to) in enumerate(zip(rows, outs, strict=True)):
                    value = _floats(b, kind, row, place)
                    value = (
                        b.fmul(value, known) if by_channel else b.fmul(b.fsub(value, known), own[r])
                    )
                    whole = b.bitcast(b.fadd(value, constant(FLOATS, float(ROUND))), INTS)
                    store_at(b, b.trunc(whole, narrow), to, b.mul(place, I64(bits // 8)), bits // 8)
                return []

            repeat(b, I64(0), _count(b, args[3]), [], quantize)
            return context.get_dummy_value()

        return types.void(x, stride, count, d, shift, factor, out, out_stride), codegen

    return run


@functools.cache
def down_channels(kind: str, peaks: bool):
    """Intrinsic f(x, stride, count, d, out): out[c] = x[0, c] + x[1, c] + ...

    Float32 sums, added in this order. With `peaks` the largest magnitudes instead, as bits.
    """
    first = constant(INTS, 0) if peaks else constant(FLOATS, 0.0)

    @intrinsic
    def run(typingctx, x, stride, count, d, out):
        def codegen(context, b, sig, args):
            px, po = (pointer(b, args[n]) for n in (0, 4))

            def columns(width, stop):
                """`width` vectors of channels after the other, down all rows."""

                def chunk(n, _):
                    place = _place(b, n, args[3], width * LANES)
                    places = [b.add(place, I64(v * LANES)) for v in range(width)]

                    def add(i, state):
                        row = pointer_at(b, px, b.mul(i, args[1]))
                        values = [_floats(b, kind, row, at) for at in places]
                        return [
                            _larger(b, y, _magnitude(b, v)) if peaks else b.fadd(y, v)
                            for y, v in zip(state, values, strict=True)
                        ]

                    state = repeat(b, I64(0), args[2], [first] * width, add)
                    for at, found in zip(places, state, strict=True):
                        store_at(b, found, po, b.mul(at, I64(4)))
                    return []

                repeat(b, I64(0), stop, [], chunk)

            enough = b.icmp_signed(">=", args[3], I64(WIDE * LANES))
            zero = I64(0)
            columns(WIDE, b.select(enough, _count(b, args[3], WIDE * LANES), zero))
            columns(1, b.select(enough, zero, _count(b, args[3])))
            return context.get_dummy_value()

        return types.void(x, stride, count, d, out), codegen

    return run
