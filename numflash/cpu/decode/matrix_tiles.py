"""Decode's INT8 products on the matrix tiles of AMX.

The layout of the cache is that of `tiles` for AVX-512 VNNI, which is that of AMX's right operand,
too: 16 steps of a panel, 256 bytes apart, are 64 channels of 16 keys. Its left operand holds both
planes of up to 8 query rows, so one product multiplies both: row 2r is the high plane of row r, row
2r + 1 the low one (the only one of INT4's query). The sums are exact integers, hence the bits are those of the vectors.

Codes of INT4 are unpacked to 16 steps of a panel, 4 KB of scratch, from which the tiles are loaded;
one such piece ahead of the products, in two buffers: a tile cannot be loaded before its stores are
in the cache.
"""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import LEFT, RIGHT, ROWS, SUMS, WIDTH, tile_call
from ..isa.vectors import F32, I8, I32, I64, constant, load, pointer, prefetch, splat, vector
from ..isa.vectors import store as write
from .register_tiles import doubled, rounded_scores
from .tiles import (
    CQ,
    LOW_BITS,
    LOW_PLANE,
    SCALE,
    START,
    V_START,
    Tile,
    state,
)

LANES = 16
PANEL = 64  # keys side by side, and columns of V
STEP = 4 * PANEL  # bytes between two steps of a whole panel
SUMS_ROW = 16  # the row of `work` from which the tiles of sums are stored: 16 rows of 128 int32
CODES_ROW = SUMS_ROW + ROWS  # the first row of `work` for two pieces of unpacked codes of INT4
PIECE = 16 * STEP  # bytes
SCRATCH_ROWS = CODES_ROW + 2 * PIECE // (4 * KEY_BLOCK)
AHEAD = 2048  # prefetch distance in bytes; a second prefetch, 8 KB ahead, gained nothing
ALL_SUMS = (*SUMS[0], *SUMS[1])


def _load(b, tile: int, address, stride) -> None:
    tile_call(b, "tileloadd64", I8(tile), address, stride)


def _clear(b) -> None:
    for tile in ALL_SUMS:
        tile_call(b, "tilezero", I8(tile))


def _ahead(b, address, lines: int) -> None:
    """Prefetch the lines `AHEAD` bytes behind this address."""
    for n in range(lines):
        prefetch(b, b.gep(address, [I64(64 * n + AHEAD)]), 3)


def _buffer(b, work, number):
    """The address of buffer `number`, even or odd, for unpacked codes."""
    offset = b.mul(b.and_(number, I64(1)), I64(PIECE))
    return b.gep(work, [b.add(offset, I64(4 * CODES_ROW * KEY_BLOCK))])


def _unpack(b, tile: Tile, cached, stride, codes, vectors: int) -> None:
    """Write 16 steps of codes to the buffer `codes`, steps of `STEP` bytes.

    `vectors` vectors wide and `stride` bytes from pair to pair.
    """
    for pair in range(8):
        for v in range(vectors):
            at = b.add(b.mul(stride, I64(pair)), I64(WIDTH * v))
            prefetch(b, b.gep(cached, [b.add(at, I64(AHEAD))]), 3)
            for step, x in enumerate(tile.cached_vectors_of_two_steps(b, cached, at), 2 * pair):
                write(b, x, codes, I64(STEP * step + WIDTH * v), 1)


def _multiply(
    b, instruction: str, left: int, cached, stride, vectors: int, prefetched: bool = True
) -> None:
    """Tiles of sums += the left tile times `vectors` tiles side by side at `cached`."""
    for v in range(vectors):
        right = RIGHT[v % 2]
        if prefetched:
            _ahead(b, b.gep(cached, [I64(1024 * v)]), 16)
        _load(b, right, b.gep(cached, [I64(WIDTH * v)]), stride)
        tile_call(b, instruction, I8(ALL_SUMS[v]), I8(left), I8(right))


def _leave(b, work, vectors: int, column) -> None:
    """Write the tiles of sums side by side from `column` on, in rows of 128 int32."""
    sums = b.gep(work, [b.add(I64(4 * SUMS_ROW * KEY_BLOCK), b.mul(column, I64(4)))])
    for v in range(vectors):
        at = b.gep(sums, [I64(WIDTH * v)])
        tile_call(b, "tilestored64", I8(ALL_SUMS[v]), at, I64(4 * KEY_BLOCK))


def _both(b, work, row: int, column):
    """A vector of row `row`'s sums: 128 * its high plane + its low one."""
    ints = vector(I32, LANES)
    high, low = (
        load(b, work, b.add(I64((SUMS_ROW + 2 * row + n) * KEY_BLOCK), column), ints, 4)
        for n in range(2)
    )
    return b.add(b.shl(high, constant(ints, LOW_BITS)), low)


def _with_start(tile: Tile, b, sums, first):
    """Sums of products with the first value of their row."""
    return doubled(b, tile, sums, first) if tile.packed == 2 else b.add(sums, first)


@functools.cache
def matrix_scores(tile: Tile, rows: int):
    """Intrinsic f(q, words, k, scales, n, work): scores of the first n keys of a block.

    In whole panels; k is the address of the first of them; `words` is a multiple of 16. All
    products come first: reading sums waits for the last of theirs.
    """
    floats = vector(F32, LANES)
    ints = vector(I32, LANES)
    add = functools.partial(_with_start, tile)

    @intrinsic
    def scores(typingctx, q, words, k, scales, n, work):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            target.guard("amx_int8", context.codegen())
            pq, pk, pck, pw = (pointer(b, a[i]) for i in (0, 2, 3, 5))
            stride = b.mul(a[1], I64(4))
            pieces = b.ashr(a[1], I64(4))  # of a panel: 16 steps
            size = PIECE // tile.packed
            if tile.packed == 2:
                _unpack(b, tile, pk, I64(STEP), _buffer(b, pw, I64(0)), 4)
            with cgutils.for_range_slice(b, I64(0), a[4], I64(PANEL), I64) as (first, _):
                _clear(b)
                before = b.mul(b.sdiv(first, I64(PANEL)), pieces)
                last = b.icmp_signed(">=", b.add(first, I64(PANEL)), a[4])
                with cgutils.for_range(b, pieces) as step:
                    _load(b, LEFT[0], b.gep(pq, [b.mul(step.index, I64(WIDTH))]), stride)
                    number = b.add(before, step.index)
                    cached = b.gep(pk, [b.mul(number, I64(size))])
                    if tile.packed == 2:
                        at_end = b.icmp_signed("==", b.add(step.index, I64(1)), pieces)
                        with b.if_then(b.not_(b.and_(last, at_end)), likely=True):
                            other = _buffer(b, pw, b.add(number, I64(1)))
                            _unpack(b, tile, b.gep(cached, [I64(size)]), I64(STEP), other, 4)
                        cached = _buffer(b, pw, number)
                    _multiply(b, "tdpbsud", LEFT[0], cached, I64(STEP), 4, tile.packed == 1)
                _leave(b, pw, 4, first)
            with cgutils.for_range_slice(b, I64(0), a[4], I64(LANES), I64) as (at, _):
                key_scale = load(b, pck, at, floats, 4)
                for m in range(rows):
                    start = splat(b, load(b, pw, state(rows, START + m), I32, 4), ints)
                    row_scale = splat(b, load(b, pw, state(rows, CQ + m), F32, 4), floats)
                    x = b.sitofp(add(b, _both(b, pw, m, at), start), floats)
                    t = rounded_scores(b, tile, x, key_scale, row_scale)
                    write(b, t, pw, b.add(at, I64(m * KEY_BLOCK)), 4)
            return context.get_dummy_value()

        return sig, codegen

    return scores


@functools.cache
def matrix_values(tile: Tile, rows: int, vectors: int):
    """Intrinsic f(work, v, step, o, column, columns): `value_tile` of all 128 keys.

    For 16 * `vectors` columns from `column` on, `vectors` up to 4, or 8: two chunks of 64.
    """
    floats = vector(F32, LANES)
    ints = vector(I32, LANES)

    @intrinsic
    def values(typingctx, work, v, step, o, column, columns):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            target.guard("amx_int8", context.codegen())
            pw, pv, po = (pointer(b, a[i]) for i in (0, 1, 3))
            for n, left in enumerate(LEFT):
                _load(b, left, b.gep(pw, [I64(WIDTH * n)]), I64(LOW_PLANE))
            pieces = [(first, n) for first in range(0, vectors, 4) for n in range(len(LEFT))]
            width = min(4, vectors)
            stride = I64(STEP) if tile.packed == 2 else a[2]

            def place(number):
                first, n = pieces[number]
                cached = b.gep(pv, [b.mul(a[2], I64(16 * n // tile.packed))])
                return b.gep(cached, [I64(first * LANES * KEY_BLOCK // tile.packed)])

            def unpacked(number):
                if tile.packed == 2 and number < len(pieces):
                    codes = _buffer(b, pw, I64(number))
                    _unpack(b, tile, place(number), a[2], codes, width)

            unpacked(0)
            for number, (first, n) in enumerate(pieces):
                if n == 0:
                    _clear(b)
                unpacked(number + 1)
                cached = _buffer(b, pw, I64(number)) if tile.packed == 2 else place(number)
                _multiply(b, "tdpbusd", LEFT[n], cached, stride, width, tile.packed == 1)
                if n == len(LEFT) - 1:
                    _leave(b, pw, width, I64(LANES * first))
            for m in range(rows):
                scale = splat(b, load(b, pw, state(rows, SCALE + m), F32, 4), floats)
                first = constant(ints, 0)
                if tile.v_offset:
                    first = splat(b, load(b, pw, state(rows, V_START + m), I32, 4), ints)
                for n in range(vectors):
                    at = b.add(b.add(a[4], b.mul(a[5], I64(m))), I64(LANES * n))
                    x = _both(b, pw, m, I64(LANES * n))
                    x = _with_start(tile, b, x, first) if tile.v_offset else x
                    x = b.fmul(b.sitofp(x, floats), scale)
                    write(b, b.fadd(load(b, po, at, floats, 4), x), po, at, 4)
            return context.get_dummy_value()

        return sig, codegen

    return values
