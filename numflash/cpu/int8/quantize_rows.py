"""Rows of floats to int8, eight at a time, in vectors that LLVM splits or joins as the target
needs: one source for every CPU.

Intrinsics on addresses, for input whose magnitudes stay below `PLAIN`: there nothing overflows,
nothing has to be clipped, and the results are those of `numflash.numerics.quantization` to the bit. A vector
at the end of a row begins `LANES` before it, where it overlaps the one before: all that is done
here comes to the same when it is done twice. So rows have `LANES` elements at least.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare
from ...numerics.quantize_kernels import MAGNITUDE, NO_SCALE, ROUND
from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    call,
    constant,
    pointer,
    repeat,
    shuffle,
    splat,
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


class Rows(NamedTuple):
    """Where the rows of a (B, H, L, D) array are: address, strides in bytes, sizes.

    The address is the first row's; the strides lead to the next batch, head and row.
    """

    start: int
    batch: int
    head: int
    row: int
    heads: int
    length: int
    d: int


@bare
def row_at(x, n, i):
    """Address of row i of head n, heads of all batches counted through."""
    return x.start + n // x.heads * x.batch + n % x.heads * x.head + i * x.row


SIZES = {"float32": 4, "bfloat16": 2}


def _at(b, base, offset):
    return b.gep(base, [offset])


def _load(b, base, offset, ty, align=4):
    x = b.load(b.bitcast(_at(b, base, offset), ty.as_pointer()))
    x.align = align
    return x


def _store(b, x, base, offset, align=4):
    b.store(x, b.bitcast(_at(b, base, offset), x.type.as_pointer())).align = align


def _floats(b, kind, base, element):
    """LANES values from `element` on, as float32; bfloat16 is the upper half of one."""
    if kind == "float32":
        return _load(b, base, b.mul(element, I64(4)), FLOATS)
    bits = b.zext(_load(b, base, b.mul(element, I64(2)), vector(I16, LANES), 2), INTS)
    return b.bitcast(b.shl(bits, constant(INTS, 16)), FLOATS)


def _magnitude(b, x):
    """|x| as bits: these are in the order of the numbers."""
    return b.and_(b.bitcast(x, INTS), constant(INTS, int(MAGNITUDE)))


def _smax(b, x, y):
    return call(b, f"llvm.smax.v{x.type.count}i32", x.type, x, y)


def _place(b, n, d, width=LANES):
    """The element at which vector n of a row begins: the last one ends with the row."""
    place = b.mul(n, I64(width))
    last = b.sub(d, I64(width))
    return b.select(b.icmp_signed("<", place, last), place, last)


def _count(b, d, width=LANES):
    return b.sdiv(b.add(d, I64(width - 1)), I64(width))


def _fold(b, rows):
    """<8 x i32>: the maximum of each of 8 vectors, by a transposing tree."""
    lanes = LANES
    part = ROWS // 2
    while part:
        low = [j for j in range(lanes) if j % (2 * part) < part]
        high = [j + part for j in low]
        low, high = (_by_eight(side + [lanes + j for j in side]) for side in (low, high))
        rows = [
            _smax(b, shuffle(b, x, y, low), shuffle(b, x, y, high))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
        part //= 2
    (x,) = rows
    return _smax(b, *(shuffle(b, x, x, list(range(n, n + ROWS))) for n in (0, ROWS)))


def _by_eight(chosen):
    half = ROWS // 2
    n = len(chosen) // 2
    return [
        j for k in range(0, n, half) for j in chosen[k : k + half] + chosen[n + k : n + k + half]
    ]


def _rows(b, first, stride, count):
    """Addresses of ROWS rows; those from `count` on are the last one again."""
    last = b.sub(count, I64(1))
    for r in range(ROWS):
        row = I64(r)
        yield _at(b, first, b.mul(stride, b.select(b.icmp_signed("<", row, last), row, last)))


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
                off = _load(b, ps, b.mul(place, I64(4)), FLOATS)
                return [
                    _smax(b, top, _magnitude(b, b.fsub(_floats(b, kind, row, place), off)))
                    for row, top in zip(rows, tops, strict=True)
                ]

            tops = repeat(b, I64(0), _count(b, args[3]), [constant(INTS, 0)] * ROWS, peaks)
            floats, _ = EIGHT
            bits = _fold(b, tops)
            peak = b.bitcast(bits, floats)
            full = constant(floats, 127.0)
            usable = b.fcmp_ordered(">", peak, constant(floats, float(NO_SCALE)))
            _store(b, b.select(usable, b.fdiv(peak, full), constant(floats, 1.0)), po, I64(0))
            _store(b, b.select(usable, b.fdiv(full, peak), constant(floats, 0.0)), pf, I64(0))
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
                own = [splat(b, _load(b, pf, I64(4 * r), F32), FLOATS) for r in range(ROWS)]

            def turn(n, _):
                place = _place(b, n, args[3])
                known = _load(b, pf if by_channel else ps, b.mul(place, I64(4)), FLOATS)
                for r, (row, to) in enumerate(zip(rows, outs, strict=True)):
                    value = _floats(b, kind, row, place)
                    value = (
                        b.fmul(value, known) if by_channel else b.fmul(b.fsub(value, known), own[r])
                    )
                    whole = b.bitcast(b.fadd(value, constant(FLOATS, float(ROUND))), INTS)
                    _store(b, b.trunc(whole, narrow), to, b.mul(place, I64(bits // 8)), bits // 8)
                return []

            repeat(b, I64(0), _count(b, args[3]), [], turn)
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
                        row = _at(b, px, b.mul(i, args[1]))
                        values = [_floats(b, kind, row, at) for at in places]
                        return [
                            _smax(b, y, _magnitude(b, v)) if peaks else b.fadd(y, v)
                            for y, v in zip(state, values, strict=True)
                        ]

                    state = repeat(b, I64(0), args[2], [first] * width, add)
                    for at, found in zip(places, state, strict=True):
                        _store(b, found, po, b.mul(at, I64(4)))
                    return []

                repeat(b, I64(0), stop, [], chunk)

            enough = b.icmp_signed(">=", args[3], I64(WIDE * LANES))
            zero = I64(0)
            columns(WIDE, b.select(enough, _count(b, args[3], WIDE * LANES), zero))
            columns(1, b.select(enough, zero, _count(b, args[3])))
            return context.get_dummy_value()

        return types.void(x, stride, count, d, out), codegen

    return run
