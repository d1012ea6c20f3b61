"""Products in registers: a few query rows, or their weights, with whole vectors of cached elements.

The layouts are those of `tiles`.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...numerics.fixedpoint import T_LIMIT
from ...tiling import KEY_BLOCK
from ..isa.vectors import (
    F32,
    I32,
    I64,
    constant,
    load,
    pointer,
    prefetch,
    splat,
    store,
)
from .tiles import CQ, LOW_BITS, LOW_PLANE, SCALE, START, V_START, Tile, state


class Operands(NamedTuple):
    """What the products of a tile read.

    rows : address of the rows, `row_stride` words apart, their low plane `low` words behind
    cached : address of the cached elements, `cached_step` elements between two steps, of INT4 and
        pairs of bfloat16 between two pairs of steps
    steps : one or more, of INT4 an even number; of pairs of bfloat16 pairs of steps
    """

    rows: ir.Value
    row_stride: ir.Value
    low: ir.Value
    cached: ir.Value
    cached_step: ir.Value
    steps: ir.Value


def _products(b, tile, operands, first, rows, nv, keys, planes):
    """rows x nv sums in registers: products of `planes` planes, added to `first`, one value a row."""
    start = [x for x in first for _ in range(nv)]
    zero = [constant(tile.sums, 0)] * len(start)
    codes = tile.packed == 2
    last = zero if codes else start  # what the sums of the low plane, or the only one, begin with
    if planes == 1 or tile.pairs:
        (sums,) = _planes(b, tile, operands, [last], rows, nv, keys, tile.ahead)
    elif tile.together(rows, nv):
        high, low = _planes(b, tile, operands, [zero, last], rows, nv, keys, tile.ahead)
        sums = [b.add(x, y) for x, y in zip(_higher(b, tile, high), low, strict=True)]
    else:
        (high,) = _planes(b, tile, operands, [zero], rows, nv, keys, tile.ahead)
        last = [b.add(x, y) for x, y in zip(_higher(b, tile, high), last, strict=True)]
        low = operands._replace(rows=b.gep(operands.rows, [b.mul(operands.low, I64(4))]))
        (sums,) = _planes(b, tile, low, [last], rows, nv, keys, 0)
    if codes:
        return [doubled(b, tile, x, y) for x, y in zip(sums, start, strict=True)]
    return sums


def _higher(b, tile, sums):
    """Sums of the high plane in units of the low one."""
    return [b.shl(x, constant(tile.sums, LOW_BITS)) for x in sums]


def doubled(b, tile, sums, first):
    """Sums of codes as sums of the numbers they stand for, with the first value of their row."""
    return b.add(b.shl(sums, constant(tile.sums, 1)), first)


def _planes(b, tile, operands, first, rows, nv, keys, prefetched):
    """rows x nv sums of each plane, in one loop over `steps` steps that loads the cached vectors once.

    first : the values that the sums begin with, a list for each plane; the planes' words are
        `operands.low` apart
    prefetched : bytes that are prefetched ahead, 0 for none
    """
    words, row_stride, low, cached, cached_step, steps = operands
    pace = 2 if tile.pairs else tile.packed  # steps at a time
    entry = b.block
    loop = b.append_basic_block("dot")
    done = b.append_basic_block("dot.end")
    b.branch(loop)
    b.position_at_end(loop)
    n = b.phi(I64)
    n.add_incoming(I64(0), entry)
    sums = [[b.phi(x.type) for x in plane] for plane in first]
    for phis, plane in zip(sums, first, strict=True):
        for phi, x in zip(phis, plane, strict=True):
            phi.add_incoming(x, entry)
    place = b.mul(n, cached_step)
    at = [b.add(place, I64(tile.lanes * tile.group * v)) for v in range(nv)]
    load_steps = (
        tile.cached_vectors_of_two_steps
        if pace == 2
        else lambda *where: [tile.cached_vector(*where)]
    )
    columns = [load_steps(b, cached, x) for x in at]
    for x in at if prefetched else ():
        prefetch(b, b.gep(cached, [b.add(b.mul(x, I64(tile.size)), I64(prefetched))]))
    out = [list(plane) for plane in sums]
    for s in range(pace):
        step = b.add(b.mul(n, I64(pace)), I64(s)) if pace > 1 else n
        for m, p in itertools.product(range(rows), range(len(first))):
            row = b.add(b.mul(row_stride, I64(m)), b.mul(low, I64(p)))
            word = tile.broadcast_word(b, words, b.add(step, row))
            for v in range(nv):
                out[p][m * nv + v] = tile.dot(b, out[p][m * nv + v], columns[v][s], word, keys)
    following = b.add(n, I64(1))
    n.add_incoming(following, loop)
    for phis, plane in zip(sums, out, strict=True):
        for phi, x in zip(phis, plane, strict=True):
            phi.add_incoming(x, loop)
    passed = b.mul(following, I64(pace)) if tile.packed > 1 else following
    b.cbranch(b.icmp_signed("<", passed, steps), loop, done)
    b.position_at_end(done)
    return out


@functools.cache
def score_tile(tile: Tile, rows: int):
    """Intrinsic f(q, words, k, scales, j, work).

    Scores of a block's keys from j on, `tile.width` vectors of them.

    Addresses: q rows of `tile.query_planes` planes of `words` words; k the first of these keys;
    scales (128,) float32; work, from which START and CQ are taken. INT8 writes work[row, j + n] =
    round(clip((float32(start + q.k) * scale) * cq)) as int32 Q8.8, HIDDEN where the scale is NaN;
    float storage writes (q.k) * cq as float32.
    """
    nv = tile.width(rows)

    @intrinsic
    def scores(typingctx, q, words, k, scales, j, work):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            tile.guard(context.codegen())
            pq, pk, pck, pw = (pointer(b, a[i]) for i in (0, 2, 3, 5))
            floats = tile.vectors.vector(F32)
            exact = tile.exact
            first = [tile.vectors.fill(b, tile.sums, 0)] * rows
            if exact:
                first = [
                    splat(b, load(b, pw, state(rows, START + m), I32, 4), tile.sums)
                    for m in range(rows)
                ]
            stride = b.mul(a[1], I64(tile.query_planes))
            operands = Operands(pq, stride, a[1], pk, I64(tile.panel * tile.group), a[1])
            sums = _products(b, tile, operands, first, rows, nv, True, tile.query_planes)
            if exact:
                key_scale = [
                    load(b, pck, b.add(a[4], I64(tile.lanes * v)), floats, 4) for v in range(nv)
                ]
            for m in range(rows):
                row_scale = tile.vectors.splat(b, load(b, pw, state(rows, CQ + m), F32, 4), floats)
                for v in range(nv):
                    x = sums[m * nv + v]
                    if exact:
                        x = rounded_scores(b, tile, b.sitofp(x, floats), key_scale[v], row_scale)
                    else:
                        x = b.fmul(x, row_scale)
                    store(b, x, pw, b.add(a[4], I64(m * KEY_BLOCK + tile.lanes * v)), 4)
            return context.get_dummy_value()

        return sig, codegen

    return scores


def rounded_scores(b, tile: Tile, x, key_scale, row_scale):
    """float32 sums to int32 Q8.8 scores, HIDDEN where the key's scale is NaN."""
    return limited(b, tile, b.fmul(b.fmul(x, key_scale), row_scale))


def limited(b, tile: Tile, x):
    """float32 Q8.8 scores cut at +-T_LIMIT, then int32; HIDDEN of NaN."""
    return tile.to_int(b, tile.vectors.clamp(b, x, float(T_LIMIT)))


@functools.cache
def value_tile(tile: Tile, rows: int, nv: int):
    """Intrinsic f(work, v, step, steps, o, column, columns).

    o[rows, column + nv * lanes] += (P.V) * scale.

    Addresses: work, of the weights P and SCALE; v the first of these columns, `step`
    elements between two steps of it; o, rows of `columns` float32. INT8 multiplies and adds in
    float32, each rounded, and where values are stored with an offset its sums begin with V_START;
    float storage starts its sums from o and takes no scale.
    """

    @intrinsic
    def values(typingctx, work, v, step, steps, o, column, columns):
        sig = types.void(*[types.intp] * 7)

        def codegen(context, b, sig, a):
            tile.guard(context.codegen())
            pw, pv, po = (pointer(b, a[i]) for i in (0, 1, 4))
            floats = tile.vectors.vector(F32)
            exact = tile.exact
            where = [
                b.add(b.add(a[5], b.mul(a[6], I64(m))), I64(tile.lanes * n))
                for m in range(rows)
                for n in range(nv)
            ]
            operands = Operands(pw, I64(KEY_BLOCK), I64(LOW_PLANE // 4), pv, a[2], a[3])
            if exact:
                first = [constant(tile.sums, 0)] * rows
                if tile.v_offset:
                    first = [
                        splat(b, load(b, pw, state(rows, V_START + m), I32, 4), tile.sums)
                        for m in range(rows)
                    ]
                sums = _products(b, tile, operands, first, rows, nv, False, tile.planes)
            else:
                before = [load(b, po, w, floats, 4) for w in where]
                (sums,) = _planes(b, tile, operands, [before], rows, nv, False, tile.ahead)
            for i, (w, x) in enumerate(zip(where, sums, strict=True)):
                if exact:
                    s = splat(b, load(b, pw, state(rows, SCALE + i // nv), F32, 4), floats)
                    x = b.fadd(load(b, po, w, floats, 4), b.fmul(b.sitofp(x, floats), s))
                store(b, x, po, w, 4)
            return context.get_dummy_value()

        return sig, codegen

    return values
