"""Register tiles of the integer pipeline.

`mr` rows x `nv` vectors of int32 sums held in registers, written once for all ISAs.

Contract (A rows, B packed in panels, `groups` steps of `isa.group` products each):

* `score_tile`: x[mr, nv * lanes] = saturate_int16(round(float32(bias[j] + A.B) * ck[j] * cq[i])),
  Q8.8, or the same before rounding.
* `waiting_tile`, `finish`: the same in two parts, with softcap, ALiBi, bias and mask between, or as
  float32 for scores that need more range.
* `value_tile`: o[mr, nv * lanes] += float32(A.B) * scale[i], scale a power of two, so the
  multiply-add rounds once anyway; total[i] is the sum of A's row, for instruction sets that add an
  offset to B.

Tiles of 6 x 4, 4 x 4 and 2 x 4 vectors as in the A64FX summary (docs/sources.md); the smaller ones
serve the last rows of a block. Those of `waiting_tile` have 4 rows at most, so that what runs
beside them finds registers. One LLVM phi per accumulator keeps the sums in registers, and the
initial value is an operand (docs/pitfalls.md, "Accumulators in arrays stay in memory").
"""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ...tiling import KEY_BLOCK
from ..isa.dot_loop import Panel, dot_loop
from ..isa.isas import VECTOR_ISAS
from ..isa.operands import Rows, flat
from ..isa.vectors import F32, I8, I32, I64, data, load, store
from . import score_changes

ROWS = (6, 4, 2)
WAITING_ROWS = (4, 2)


def _score_epilogue(context, b, isa, types_, a, mr, beside=None):
    """Scaled float32 scores of one tile, as mr lists of vectors in packed key order."""
    nv = isa.nv
    pq, pk, pbias, pck, pcq = (data(context, b, types_[i], a[i]) for i in (0, 3, 6, 7, 9))
    col = [b.add(a[8], isa.elements(b, v)) for v in range(nv)]
    i32s = isa.vector(I32)
    f32s = isa.vector(F32)
    start = [load(b, pbias, col[v], i32s, 4) for v in range(nv)]
    key_scale = [load(b, pck, col[v], f32s, 4) for v in range(nv)]
    rows = dot_loop(
        b, isa, isa.score_dot, Rows(pq, a[1], a[2]), Panel(pk, a[4]), a[5], start * mr, nv, beside
    )
    # A64FX: dot products and conversions share two pipes, 9 cycles each: rows together
    if isa.scalable:
        rows = iter(list(rows))
    for m, acc in enumerate(rows):
        row_scale = isa.splat(b, load(b, pcq, b.add(a[10], I64(m)), F32, 4), f32s)
        yield [
            b.fmul(b.fmul(b.sitofp(x, f32s), k), row_scale)
            for x, k in zip(acc, key_scale, strict=True)
        ]


@functools.cache
def score_tile(name: str, mr: int, wide: bool = False):
    """Intrinsic f(q: Rows, k: Packed, groups, scales, x: Rows) for one ISA and row count.

    `wide`: x stays float32.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def tile(typingctx, q, k, groups, scales, x):
        sig = types.void(q, k, groups, scales, x)

        def codegen(context, b, sig, args):
            target.guard(name, context.codegen())
            types_, a = flat(b, sig, args)
            px = data(context, b, types_[11], a[11])
            for m, scores in enumerate(_score_epilogue(context, b, isa, types_, a, mr)):
                for v in range(0, isa.nv, 2):
                    where = b.add(b.add(a[12], b.mul(a[13], I64(m))), isa.elements(b, v))
                    pair = scores[v : v + 2]
                    if wide:
                        for n, y in enumerate(isa.in_order(b, *pair)):
                            store(b, y, px, b.add(where, isa.elements(b, n)), 4)
                    else:
                        store(b, isa.to_int16(b, *pair), px, where, 2)
            return context.get_dummy_value()

        return sig, codegen

    return tile


@functools.cache
def waiting_room(name: str):
    """Intrinsic f(): address of two tiles of float32 scores, in L1, on the stack of the caller."""
    isa = VECTOR_ISAS[name]

    @intrinsic
    def room(typingctx):
        def codegen(context, b, sig, a):
            with b.goto_entry_block():  # not cgutils.alloca_once, which clears it at every call
                tiles = b.alloca(isa.vector(F32), 2 * WAITING_ROWS[0] * isa.nv)
            return b.ptrtoint(tiles, I64)

        return types.int64(), codegen

    return room


def _waiting(b, isa, room, number):
    """Pointer to the tile of an even or odd number."""
    tile = b.mul(b.and_(number, I64(1)), isa.elements(b, 4 * WAITING_ROWS[0] * isa.nv))
    return b.inttoptr(b.add(room, tile), I8.as_pointer())


def _change(context, b, isa, types_, args, tile, wide):
    """emit(n): applies the options to row n of a stored tile, and stores it again.

    args : those of `finish` from x on, flat
    """
    px = data(context, b, types_[0], args[0])
    change = score_changes.changer(context, b, isa, types_[3], args[3], wide)

    def emit(n):
        first = b.mul(n, isa.elements(b, isa.nv))
        scores = [
            load(b, tile, b.add(first, isa.elements(b, v)), isa.vector(F32), 4)
            for v in range(isa.nv)
        ]
        change(scores, b.add(args[-2], n), args[-1], px, b.add(args[1], b.mul(args[2], n)))

    return emit


@functools.cache
def waiting_tile(name: str, mr: int, overlapped: bool):
    """Intrinsic f(q: Rows, k: Packed, groups, scales, waiting: Waiting).

    Computes a tile of float32 scores and keeps it for `finish`.

    `overlapped`: f(..., x: Rows, changes, before: Part) finishes the first rows of the tile of the
    iteration before beside the dot products, which use two of Zen 4's four vector pipes.
    before.count <= (groups - 1) // BESIDE.
    """
    isa = VECTOR_ISAS[name]

    def codegen(context, b, sig, args):
        target.guard(name, context.codegen())
        types_, a = flat(b, sig, args)
        tile = _waiting(b, isa, a[11], a[12])
        beside = None
        if overlapped:
            before = _waiting(b, isa, a[11], b.add(a[12], I64(1)))
            beside = a[17], _change(context, b, isa, types_[13:], a[13:], before, False)
        for m, scores in enumerate(_score_epilogue(context, b, isa, types_, a, mr, beside)):
            for v, y in enumerate(scores):
                store(b, y, tile, isa.elements(b, m * isa.nv + v), 4)
        return context.get_dummy_value()

    @intrinsic
    def alone(typingctx, q, k, groups, scales, waiting):
        return types.void(q, k, groups, scales, waiting), codegen

    @intrinsic
    def beside(typingctx, q, k, groups, scales, waiting, x, changes, before):
        return types.void(q, k, groups, scales, waiting, x, changes, before), codegen

    return beside if overlapped else alone


@functools.cache
def finish(name: str, wide: bool):
    """Intrinsic f(waiting: Waiting, x: Rows, changes, done, part: Part).

    Writes the rows of `part` from number `done` on of a kept tile to x.

    changes : `score_changes.Changes`, for softcap, ALiBi, bias and mask; x becomes int16, or stays
        float32 where `wide`
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def rest(typingctx, waiting, x, changes, done, part):
        sig = types.void(waiting, x, changes, done, part)

        def codegen(context, b, sig, args):
            target.guard(name, context.codegen())
            types_, a = flat(b, sig, args)
            emit = _change(context, b, isa, types_[2:], a[2:], _waiting(b, isa, a[0], a[1]), wide)
            with cgutils.for_range_slice(b, a[6], a[7], I64(1), I64) as (n, _):
                emit(n)
            return context.get_dummy_value()

        return sig, codegen

    return rest


@functools.cache
def value_tile(name: str, mr: int, nv: int, planes: int = 1):
    """Intrinsic f(p: Rows, v: Packed, groups, scale, total, i, o: Rows) for one ISA, row count and
    width.

    planes : 2 where a weight is two bytes (`softmax_vectors.row_weights`): the sums of the high
        ones, times 256, are what those of the low ones begin with
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def tile(typingctx, p, v, groups, scale, total, i, o):
        sig = types.void(p, v, groups, scale, total, i, o)

        def codegen(context, b, sig, args):
            target.guard(name, context.codegen())
            types_, a = flat(b, sig, args)
            pp, pv, ps, pt, po = (data(context, b, types_[n], a[n]) for n in (0, 3, 6, 7, 9))
            i32s = isa.vector(I32)
            f32s = isa.vector(F32)
            start = []  # takes the offset of V back out
            for m in range(mr):
                if isa.v_offset:
                    sum_p = load(b, pt, b.add(a[8], I64(m)), I32, 4)
                    start += [isa.splat(b, b.mul(sum_p, I32(-isa.v_offset)), i32s)] * nv
                else:
                    start += [isa.fill(b, i32s, 0)] * nv

            def product(first, start):
                rows = Rows(pp, first, a[2])
                return dot_loop(b, isa, isa.value_dot, rows, Panel(pv, a[4]), a[5], start, nv)

            first = a[1]
            if planes == 2:
                high = product(first, [isa.fill(b, i32s, 0)] * (mr * nv))
                sums = [b.shl(x, isa.fill(b, i32s, 8)) for row in high for x in row]
                start = [b.add(x, y) for x, y in zip(sums, start, strict=True)]
                first = b.add(first, I64(KEY_BLOCK))
            for m, acc in enumerate(product(first, start)):
                s = isa.splat(b, load(b, ps, b.add(a[8], I64(m)), F32, 4), f32s)
                for n in range(nv):
                    where = b.add(b.add(a[10], b.mul(a[11], I64(m))), isa.elements(b, n))
                    old = load(b, po, where, f32s, 4)
                    store(b, isa.generic(b, "fma", b.sitofp(acc[n], f32s), s, old), po, where, 4)
            return context.get_dummy_value()

        return sig, codegen

    return tile
