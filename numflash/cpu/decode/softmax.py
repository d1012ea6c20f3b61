"""The INT8 softmax of decode.

The rows of a tile over one block of 128 keys, bit for bit as `reference.integer_decode` has it.

What is one number a row is worked out for all rows at once: their chains of dependent instructions
are long. All of it is in the scratch memory of the tile, `work` of `tiles`.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...numerics.fixedpoint import MIN_OCTAVE, P_A, P_B, P_WIDE
from ...tiling import KEY_BLOCK
from ..isa.score_calls import HIDDEN
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Isa,
    call,
    constant,
    in_order,
    load,
    pointer,
    shuffle,
    signed16,
    splat,
    store,
    vector,
)
from .tiles import (
    LOW_BITS,
    LOW_PLANE,
    OCTAVE,
    RATIO,
    ROWS,
    SCALE,
    SHRINK,
    V_START,
    L,
    M,
    Tile,
    state,
)


@functools.cache
def value_ratios(tile: Tile, rows: int):
    """Intrinsic f(scales, n, work) -> (some token not finite, largest scale of a value), of the
    first n tokens of a block.

    scales (256,) float32 of the keys, then of the values; RATIO (128,) uint16 = min(round(65536 *
    scale / largest), 65535).
    """
    lanes = tile.lanes
    vectors = KEY_BLOCK // tile.lanes
    floats = vector(F32, lanes)
    ints = vector(I32, lanes)

    @intrinsic
    def ratios(typingctx, scales, n, work):
        def codegen(context, b, sig, a):
            ps = pointer(b, a[0])
            pw = pointer(b, a[2])
            count = b.trunc(a[1], I32)
            lane = ir.Constant(ints, list(range(lanes)))
            held = [
                b.icmp_signed("<", lane, splat(b, b.sub(count, I32(lanes * v)), ints))
                for v in range(vectors)
            ]
            scales = [in_order(load(b, ps, I64(lanes * v), floats, 4)) for v in range(2 * vectors)]
            keys = scales[:vectors]
            values = scales[vectors:]
            bad = ir.Constant(held[0].type, None)
            top = constant(ints, 0)
            for some, key, value in zip(held, keys, values, strict=True):
                bad = b.or_(bad, b.and_(some, b.fcmp_unordered("uno", key, key)))
                # finite and positive: ordered like their bits
                bits = b.select(some, b.bitcast(value, ints), top)
                top = call(b, f"llvm.smax.v{lanes}i32", ints, top, bits)
            largest = b.bitcast(call(b, f"llvm.vector.reduce.smax.v{lanes}i32", I32, top), F32)
            factor = splat(b, b.fdiv(ir.Constant(F32, 65536.0), largest), floats)
            for v, value in enumerate(values):
                x = call(
                    b,
                    f"llvm.smin.v{lanes}i32",
                    ints,
                    tile.to_int(b, b.fmul(value, factor)),
                    constant(ints, 65535),
                )
                store(
                    b,
                    b.trunc(x, vector(I16, lanes)),
                    pw,
                    b.add(b.mul(state(rows, RATIO), I64(2)), I64(lanes * v)),
                    2,
                )
            found = call(b, f"llvm.vector.reduce.or.v{lanes}i1", ir.IntType(1), bad)
            return context.make_tuple(b, sig.return_type, [found, largest])

        return types.Tuple((types.boolean, types.float32))(
            types.intp, types.intp, types.intp
        ), codegen

    return ratios


def _fold(b: ir.IRBuilder, tile: Tile, rows: list, operation: str):
    """<8 x i32>: each row's vector reduced to one number, by "smax" or "add".

    With fewer than 8 rows the remaining lanes repeat the first row's.
    """
    rows = rows + rows[:1] * (ROWS - len(rows))
    if tile.x86:  # the tree of shuffles has its constants in memory, cold lines all of them
        return Isa.fold_rows(tile.vectors, b, rows, operation)
    return tile.vectors.fold_rows(b, rows, operation)


def _power(b: ir.IRBuilder, x):
    """2**max(x, -126) of whole numbers x up to 0."""
    ints = vector(I32, ROWS)
    least = constant(x.type, -126.0)
    x = b.fptosi(b.select(b.fcmp_ordered(">", x, least), x, least), ints)
    return b.bitcast(b.shl(b.add(x, constant(ints, 127)), constant(ints, 23)), vector(F32, ROWS))


@functools.cache
def octave_rows(tile: Tile, rows: int):
    """Intrinsic f(work) -> whether a row's M grew.

    OCTAVE = ceil(max t), MIN_OCTAVE where all is hidden; M = max(M, OCTAVE); SHRINK = 2**(M before
    - M), 2**-126 at least.

    The scores t are int32 Q8.8, OCTAVE int32, M and SHRINK float32.
    """
    lanes = tile.lanes
    vectors = KEY_BLOCK // tile.lanes
    ints = vector(I32, lanes)
    eight = vector(I32, ROWS)
    floats = vector(F32, ROWS)

    @intrinsic
    def octaves(typingctx, work):
        def codegen(context, b, sig, a):
            pw = pointer(b, a[0])
            tops = []
            for r in range(rows):
                tree = [
                    load(b, pw, I64(r * KEY_BLOCK + lanes * v), ints, 4) for v in range(vectors)
                ]
                while len(tree) > 1:
                    tree = [
                        call(b, f"llvm.smax.v{lanes}i32", ints, *tree[i : i + 2])
                        for i in range(0, len(tree), 2)
                    ]
                tops += tree
            top = _fold(b, tile, tops, "smax")
            some = b.icmp_signed("!=", top, constant(eight, HIDDEN))
            found = b.select(
                some,
                b.ashr(b.add(top, constant(eight, 255)), constant(eight, 8)),
                constant(eight, MIN_OCTAVE),
            )
            store(b, found, pw, state(rows, OCTAVE), 4)
            before = load(b, pw, state(rows, M), floats, 4)
            new = b.sitofp(found, floats)
            grown = b.fcmp_ordered(">", new, before)
            new = b.select(grown, new, before)
            store(b, new, pw, state(rows, M), 4)
            store(b, _power(b, b.fsub(before, new)), pw, state(rows, SHRINK), 4)
            return call(b, f"llvm.vector.reduce.or.v{ROWS}i1", ir.IntType(1), grown)

        return types.boolean(types.intp), codegen

    return octaves


@functools.cache
def shrink_rows(tile: Tile, rows: int):
    """Intrinsic f(work, o, columns): rows of o times their SHRINK; o (rows, columns) float32."""
    floats = vector(F32, tile.lanes)

    @intrinsic
    def shrink(typingctx, work, o, columns):
        def codegen(context, b, sig, a):
            pw = pointer(b, a[0])
            po = pointer(b, a[1])
            for r in range(rows):
                factor = splat(b, load(b, pw, state(rows, SHRINK + r), F32, 4), floats)
                with cgutils.for_range_slice(b, I64(0), a[2], I64(tile.lanes), I64) as (e, _):
                    at = b.add(b.mul(a[2], I64(r)), e)
                    store(b, b.fmul(load(b, po, at, floats, 4), factor), po, at, 4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), codegen

    return shrink


@functools.cache
def weigh_rows(tile: Tile, rows: int):
    """Intrinsic f(work, unit): the weights of a block, after `octave_rows` of it.

    p16 = 65280 * 2**(t - OCTAVE), cut to whole numbers. Of it p16 / 4 are summed up: L = L * SHRINK
    + sum * 2**(OCTAVE - M). What is stored over t, from the start of its row on, are the weights of
    the values, w = p16 * RATIO / 2**17: each value's scale against the largest one of its block,
    folded in, 15 bits. SCALE = 2**(OCTAVE - M) * unit, 0 where all is hidden; V_START = -v_offset *
    (sum of w) where values have an offset.

    L, SCALE and unit are float32, V_START is int32. Weights are int16 or int32; for byte dot
    products a plane of their 8 high bits, and `LOW_PLANE` bytes behind it one of the low 7.
    """
    lanes = tile.lanes
    vectors = KEY_BLOCK // tile.lanes
    i16s = vector(I16, 2 * lanes)
    i32s = vector(I32, lanes)
    wide = vector(I32, 2 * lanes)
    eight = vector(I32, ROWS)
    floats = vector(F32, ROWS)
    element = {4: I8, 2: I16, 1: I32}[tile.group]
    bytes_of = vector(I8, 2 * lanes)

    def word(n):
        return constant(i16s, signed16(n))

    multiply_high = tile.vectors.multiply_high

    def row_sum(b, xs, count):
        """uint16 vectors of a row summed in half as many int32 lanes.

        `count` of them fit 16 bits.
        """
        total = constant(i32s, 0)
        for n in range(0, len(xs), count):
            x = functools.reduce(b.add, xs[n : n + count])
            low, high = (shuffle(b, x, x, list(range(n, n + lanes))) for n in (0, lanes))
            total = b.add(total, b.add(b.zext(low, i32s), b.zext(high, i32s)))
        return total

    @intrinsic
    def weigh(typingctx, work, unit):
        sig = types.void(types.intp, types.float32)

        def codegen(context, b, sig, a):
            pw = pointer(b, a[0])
            totals = []
            stored = []
            for r in range(rows):
                totals.append([])
                stored.append([])
                base = splat(b, b.shl(load(b, pw, state(rows, OCTAVE + r), I32, 4), I32(8)), i32s)
                ts = [load(b, pw, I64(r * KEY_BLOCK + lanes * v), i32s, 4) for v in range(vectors)]
                for v in range(0, vectors, 2):
                    halves = [
                        call(
                            b, f"llvm.umin.v{lanes}i32", i32s, b.sub(base, x), constant(i32s, 65535)
                        )
                        for x in ts[v : v + 2]
                    ]
                    y = b.trunc(shuffle(b, *halves, list(range(2 * lanes))), i16s)
                    f = b.shl(y, word(8))  # fraction, Q0.16
                    g = b.sub(word(P_A), multiply_high(b, f, word(P_B)))
                    h = multiply_high(b, f, g)
                    x = tile.shift_right(b, b.sub(word(P_WIDE), h), b.lshr(y, word(8)))
                    totals[r].append(b.lshr(x, word(2)))
                    ratio = load(
                        b, pw, b.add(b.mul(state(rows, RATIO), I64(2)), I64(lanes * v)), i16s, 2
                    )
                    x = b.lshr(multiply_high(b, x, ratio), word(1))
                    stored[r].append(x)
                    at = r * KEY_BLOCK * 32 // element.width + lanes * v
                    if tile.planes == 2:
                        low = b.trunc(b.and_(x, word((1 << LOW_BITS) - 1)), bytes_of)
                        store(b, low, pw, I64(at + LOW_PLANE), 1)
                        x = b.trunc(b.lshr(x, word(LOW_BITS)), bytes_of)
                    elif tile.group == 1:
                        x = b.zext(x, wide)
                    store(b, x, pw, I64(at), element.width // 8)
            octaves = load(b, pw, state(rows, OCTAVE), eight, 4)
            l, m, shrink = (load(b, pw, state(rows, x), floats, 4) for x in (L, M, SHRINK))
            hidden = b.icmp_signed("==", octaves, constant(eight, MIN_OCTAVE))
            power = b.select(
                hidden, constant(floats, 0.0), _power(b, b.fsub(b.sitofp(octaves, floats), m))
            )
            totals = [row_sum(b, xs, 4) for xs in totals]
            sums = b.fmul(b.sitofp(_fold(b, tile, totals, "add"), floats), power)
            store(b, b.fadd(b.fmul(l, shrink), sums), pw, state(rows, L), 4)
            store(b, b.fmul(power, splat(b, a[1], floats)), pw, state(rows, SCALE), 4)
            if tile.v_offset:
                sums = _fold(b, tile, [row_sum(b, xs, 2) for xs in stored], "add")
                store(b, b.mul(sums, constant(eight, -tile.v_offset)), pw, state(rows, V_START), 4)
            return context.get_dummy_value()

        return sig, codegen

    return weigh
