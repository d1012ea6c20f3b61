"""Register tiles of the integer pipeline.

`mr` rows x `nv` vectors of int32 sums held in registers, written once for all ISAs.

Contract (A rows, B packed in panels, `groups` steps of `isa.group` products each):

* `score_tile`: x[mr, nv * lanes] = saturate_int16(round(float32(bias[j] + A.B) * ck[j] * cq[i])),
  Q8.8.
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

from ...fixedpoint import ONE_Q16, P_A, P_B, P_WIDE, Q_A, Q_B
from ...jit import target
from ..isa.dot_loop import dot_loop
from ..isa.isas import VECTOR_ISAS
from ..isa.vectors import F32, I8, I16, I32, I64, Isa, constant, data, load, store, vector
from . import score_changes

ROWS = (6, 4, 2)
WAITING_ROWS = (4, 2)


def _score_epilogue(context, b, isa, sig, a, mr, nv, beside=None):
    """Scaled float32 scores of one tile, as mr lists of nv vectors in packed key order."""
    pq, pk, pbias, pck, pcq = (data(context, b, sig.args[i], a[i]) for i in (0, 3, 6, 7, 9))
    col = [b.add(a[8], isa.elements(b, v)) for v in range(nv)]
    i32s = isa.vector(I32)
    f32s = isa.vector(F32)
    start = [load(b, pbias, col[v], i32s, 4) for v in range(nv)]
    key_scale = [load(b, pck, col[v], f32s, 4) for v in range(nv)]
    rows = dot_loop(
        b, isa, isa.score_dot, pq, a[1], a[2], pk, a[4], a[5], start * mr, mr, nv, beside=beside
    )
    if (
        isa.scalable
    ):  # A64FX: dot products and conversions share two pipes, 9 cycles each: rows together
        rows = iter(list(rows))
    for m, acc in enumerate(rows):
        row_scale = isa.splat(b, load(b, pcq, b.add(a[10], I64(m)), F32, 4), f32s)
        yield [
            b.fmul(b.fmul(b.sitofp(x, f32s), k), row_scale)
            for x, k in zip(acc, key_scale, strict=True)
        ]


@functools.cache
def score_tile(name: str, mr: int):
    """Intrinsic f(q, q_off, q_stride, k, k_off, groups, start, ck, j, cq, i, x, x_off, x_stride)
    for one ISA and row count.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def tile(
        typingctx, q, q_off, q_stride, k, k_off, groups, bias, ck, j, cq, i, x, x_off, x_stride
    ):
        sig = types.void(
            q, q_off, q_stride, k, k_off, groups, bias, ck, j, cq, i, x, x_off, x_stride
        )

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px = data(context, b, sig.args[11], a[11])
            for m, scores in enumerate(_score_epilogue(context, b, isa, sig, a, mr, isa.nv)):
                for v in range(0, isa.nv, 2):
                    where = b.add(b.add(a[12], b.mul(a[13], I64(m))), isa.elements(b, v))
                    store(b, isa.to_int16(b, *scores[v : v + 2]), px, where, 2)
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


def _waiting(b, isa, room, turn):
    """Pointer to the tile of an even or odd turn."""
    tile = b.mul(b.and_(turn, I64(1)), isa.elements(b, 4 * WAITING_ROWS[0] * isa.nv))
    return b.inttoptr(b.add(room, tile), I8.as_pointer())


def _change(context, b, isa, types_, args, tile, wide):
    """emit(n): applies the options to row n of a stored tile, and stores it again.

    args : x, x_off, x_stride, changes, ..., i, j as in `finish`
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
def waiting_tile(name: str, mr: int, woven: bool):
    """Intrinsic f(q, q_off, q_stride, k, k_off, groups, start, ck, j, cq, i, room, turn).

    Computes a tile of float32 scores and keeps it in `room` for `finish`.

    `woven`: f(..., x, x_off, x_stride, changes, rows, i_before, j_before) finishes the first rows
    of the tile of the turn before beside the dot products, which use two of Zen 4's four vector
    pipes. rows <= (groups - 1) // BESIDE.
    """
    isa = VECTOR_ISAS[name]

    def codegen(context, b, sig, a):
        target.guard(name, context.codegen())
        tile = _waiting(b, isa, a[11], a[12])
        beside = None
        if woven:
            before = _waiting(b, isa, a[11], b.add(a[12], I64(1)))
            beside = a[17], _change(context, b, isa, sig.args[13:], a[13:], before, False)
        for m, scores in enumerate(_score_epilogue(context, b, isa, sig, a, mr, isa.nv, beside)):
            for v, y in enumerate(scores):
                store(b, y, tile, isa.elements(b, m * isa.nv + v), 4)
        return context.get_dummy_value()

    @intrinsic
    def alone(typingctx, q, q_off, q_stride, k, k_off, groups, start, ck, j, cq, i, room, turn):
        return types.void(
            q, q_off, q_stride, k, k_off, groups, start, ck, j, cq, i, room, turn
        ), codegen

    @intrinsic
    def beside(
        typingctx,
        q,
        q_off,
        q_stride,
        k,
        k_off,
        groups,
        start,
        ck,
        j,
        cq,
        i,
        room,
        turn,
        x,
        x_off,
        x_stride,
        changes,
        rows,
        i_before,
        j_before,
    ):
        return types.void(
            q,
            q_off,
            q_stride,
            k,
            k_off,
            groups,
            start,
            ck,
            j,
            cq,
            i,
            room,
            turn,
            x,
            x_off,
            x_stride,
            changes,
            rows,
            i_before,
            j_before,
        ), codegen

    return beside if woven else alone


@functools.cache
def finish(name: str, wide: bool):
    """Intrinsic f(room, turn, x, x_off, x_stride, changes, done, rows, i, j).

    Writes rows i + done to i + rows of a kept tile, for the keys from j on, to x.

    changes : `score_changes.Changes`, for softcap, ALiBi, bias and mask; x becomes int16, or stays
        float32 where `wide`
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def rest(typingctx, room, turn, x, x_off, x_stride, changes, done, rows, i, j):
        sig = types.void(room, turn, x, x_off, x_stride, changes, done, rows, i, j)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            emit = _change(context, b, isa, sig.args[2:], a[2:], _waiting(b, isa, a[0], a[1]), wide)
            with cgutils.for_range_slice(b, a[6], a[7], I64(1), I64) as (n, _):
                emit(n)
            return context.get_dummy_value()

        return sig, codegen

    return rest


@functools.cache
def value_tile(name: str, mr: int, nv: int):
    """Intrinsic f(p, p_off, p_stride, v, v_off, groups, scale, total, i, o, o_off, o_stride) for
    one ISA, row count and width.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def tile(typingctx, p, p_off, p_stride, v, v_off, groups, scale, total, i, o, o_off, o_stride):
        sig = types.void(p, p_off, p_stride, v, v_off, groups, scale, total, i, o, o_off, o_stride)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            pp, pv, ps, pt, po = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 6, 7, 9))
            i32s = isa.vector(I32)
            f32s = isa.vector(F32)
            start = []  # takes the offset of V back out
            for m in range(mr):
                if isa.v_offset:
                    sum_p = load(b, pt, b.add(a[8], I64(m)), I32, 4)
                    start += [isa.splat(b, b.mul(sum_p, I32(-isa.v_offset)), i32s)] * nv
                else:
                    start += [isa.fill(b, i32s, 0)] * nv
            for m, acc in enumerate(
                dot_loop(b, isa, isa.value_dot, pp, a[1], a[2], pv, a[4], a[5], start, mr, nv)
            ):
                s = isa.splat(b, load(b, ps, b.add(a[8], I64(m)), F32, 4), f32s)
                for n in range(nv):
                    where = b.add(b.add(a[10], b.mul(a[11], I64(m))), isa.elements(b, n))
                    old = load(b, po, where, f32s, 4)
                    store(b, isa.generic(b, "fma", b.sitofp(acc[n], f32s), s, old), po, where, 4)
            return context.get_dummy_value()

        return sig, codegen

    return tile


def over_keys(b, isa: Isa, keys: int, state: list, body):
    """body(offsets, state) -> state over all int16 vectors of `keys` scores.

    All vectors at once, or two a turn where `keys` is known only when the code runs.
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
def block_octaves(name: str, keys: int):
    """Intrinsic f(x, x_off, x_stride, octave, octave_q8, i).

    Octaves of 8 rows of `keys` int16 Q8.8 scores each.

    octave[i:i + 8] = ceil(max x) int32, and the same as int16 Q8.8 in octave_q8 (wrapped where it
    leaves the range).
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def octaves(typingctx, x, x_off, x_stride, octave, octave_q8, i):
        sig = types.void(x, x_off, x_stride, octave, octave_q8, i)

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

            tops = over_keys(b, isa, keys, [isa.fill(b, i16s, -32768)] * 8, larger)
            i32s = vector(I32, 8)
            n = a[5]
            whole = b.ashr(
                b.add(b.sext(isa.fold_rows(b, tops, "smax"), i32s), constant(i32s, 255)),
                constant(i32s, 8),
            )
            store(b, whole, po, n, 4)
            store(b, b.trunc(b.shl(whole, constant(i32s, 8)), vector(I16, 8)), pq, n, 2)
            return context.get_dummy_value()

        return sig, codegen

    return octaves


@functools.cache
def row_weights(name: str, keys: int):
    """Intrinsic f(x, x_off, octave_q8, i, p, p_off, sums, s_off).

    The softmax weights of one row of one key block.

    x int16 Q8.8, `keys` scores; p = round(255 * 2**(x - octave)) in the type of the first dot
    operand, with the bits of `fixedpoint.exp2_p8`; sums[s_off: s_off + lanes] int32 add up to the
    sum of p.

    Short because a 16-bit variable shift by 16 or more is 0 (no clamp), one byte shuffle takes the
    high bytes of two vectors, and the dot instruction with ones adds up the weights.
    """
    isa = VECTOR_ISAS[name]
    i16s = isa.vector(I16, 2)
    i32s = isa.vector(I32)

    @intrinsic
    def weights(typingctx, x, x_off, octave_q8, i, p, p_off, sums, s_off):
        sig = types.void(x, x_off, octave_q8, i, p, p_off, sums, s_off)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px, pq, pp, ps = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4, 6))
            top = isa.splat(b, load(b, pq, a[3], I16, 2), i16s)

            def word(n):
                return isa.fill(b, i16s, n if n < 32768 else n - 65536)

            def weigh(at):
                y = b.sub(top, load(b, px, b.add(a[1], at), i16s, 2))  # >= 0, Q8.8
                f = b.shl(y, word(8))  # fraction, Q0.16
                h = isa.multiply_high(b, f, b.sub(word(P_A), isa.multiply_high(b, f, word(P_B))))
                return b.add(
                    isa.shift_right(b, b.sub(word(P_WIDE), h), b.lshr(y, word(8))), word(128)
                )

            def weigh_all(offsets, state):
                (total,) = state
                found = [weigh(at) for at in offsets]
                if isa.group == 4:  # the high bytes of two vectors side by side
                    found = [isa.high_bytes(b, *found[n : n + 2]) for n in range(0, len(found), 2)]
                else:
                    found = [b.lshr(w, word(8)) for w in found]
                for at, w in zip(offsets[:: isa.group // 2], found, strict=True):
                    store(b, w, pp, b.add(a[5], at), 4 // isa.group)
                    total = isa.value_dot(b, total, w, isa.fill(b, isa.operand, 1))
                return [total]

            (total,) = over_keys(b, isa, keys, [isa.fill(b, i32s, 0)], weigh_all)
            store(b, total, ps, a[7], 4)
            return context.get_dummy_value()

        return sig, codegen

    return weights


@functools.cache
def row_weights_q16(name: str, keys: int):
    """Intrinsic f(x, x_off, octave_q8, i, scale, p, p_off, sums, s_off).

    As `row_weights`, in Q16.16 and float32.

    p = float32(exp2_quadratic(octave - x)) * 2**-16 * scale[i], scale a power of two; sums add up
    to the Q16.16 weights.
    """
    isa = VECTOR_ISAS[name]
    i16s = isa.vector(I16)
    i32s = isa.vector(I32)
    f32s = isa.vector(F32)

    @intrinsic
    def weights(typingctx, x, x_off, octave_q8, i, scale, p, p_off, sums, s_off):
        sig = types.void(x, x_off, octave_q8, i, scale, p, p_off, sums, s_off)

        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            px, pq, pc, pp, ps = (data(context, b, sig.args[n], a[n]) for n in (0, 2, 4, 5, 7))

            def number(n):
                return isa.fill(b, i32s, n)

            top = isa.splat(b, load(b, pq, a[3], I16, 2), i16s)
            factor = b.fmul(
                isa.splat(b, load(b, pc, a[3], F32, 4), f32s), isa.fill(b, f32s, 1 / ONE_Q16)
            )

            def weigh_all(offsets, state):
                (total,) = state
                for at in (b.add(at, isa.elements(b, half)) for at in offsets for half in range(2)):
                    y = b.zext(b.sub(top, load(b, px, b.add(a[1], at), i16s, 2)), i32s)
                    f = b.shl(b.and_(y, number(255)), number(8))
                    g = b.lshr(b.mul(f, number(Q_B)), number(16))
                    h = b.lshr(b.mul(f, b.sub(number(Q_A), g)), number(16))
                    octaves = isa.generic(b, "umin", b.lshr(y, number(8)), number(31))
                    w = b.lshr(b.sub(number(ONE_Q16), h), octaves)
                    total = b.add(total, w)
                    store(b, b.fmul(b.sitofp(w, f32s), factor), pp, b.add(a[6], at), 4)
                return [total]

            (total,) = over_keys(b, isa, keys, [number(0)], weigh_all)
            store(b, total, ps, a[8], 4)
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
