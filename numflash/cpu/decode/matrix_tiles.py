"""Decode's INT8 products on the matrix tiles of AMX.

The layout of the cache is that of `tiles` for AVX-512 VNNI, which is that of AMX's right operand,
too: 16 steps of a panel, 256 bytes apart, are 64 channels of 16 keys. Its left operand holds both
planes of up to 8 query rows, so one product multiplies both: row 2r is the high plane of row r, row
2r + 1 the low one. The sums are exact integers, hence the bits are those of the vectors.
"""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import LEFT, RIGHT, ROWS, SUMS, VOID, WIDTH
from ..isa.vectors import F32, I8, I32, I64, call, constant, load, pointer, prefetch, splat, vector
from ..isa.vectors import store as write
from .tiles import CQ, LOW_BITS, LOW_PLANE, SCALE, START, Tile, rounded_scores, state

LANES = 16
PANEL = 64  # keys side by side, and columns of V
STEP = 4 * PANEL  # bytes between two steps of a whole panel
SUMS_ROW = 16  # the row of `work` from which the tiles of sums are stored: 16 rows of 128 int32
SCRATCH_ROWS = SUMS_ROW + ROWS
AHEAD = 2048  # prefetch distance in bytes; a second prefetch, 8 KB ahead, gained nothing
ALL_SUMS = (*SUMS[0], *SUMS[1])


def _load(b, tile: int, address, stride) -> None:
    call(b, "llvm.x86.tileloadd64", VOID, I8(tile), address, stride)


def _clear(b) -> None:
    for tile in ALL_SUMS:
        call(b, "llvm.x86.tilezero", VOID, I8(tile))


def _ahead(b, address, lines: int) -> None:
    """Prefetch the lines `AHEAD` bytes behind this address."""
    for n in range(lines):
        prefetch(b, b.gep(address, [I64(64 * n + AHEAD)]), 3)


def _multiply(b, instruction: str, left: int, many, stride, vectors: int) -> None:
    """Tiles of sums += the left tile times `vectors` tiles side by side at `many`."""
    for v in range(vectors):
        right = RIGHT[v % 2]
        _ahead(b, b.gep(many, [I64(1024 * v)]), 16)
        _load(b, right, b.gep(many, [I64(WIDTH * v)]), stride)
        call(b, f"llvm.x86.{instruction}", VOID, I8(ALL_SUMS[v]), I8(left), I8(right))


def _leave(b, work, vectors: int, column) -> None:
    """Write the tiles of sums side by side from `column` on, in rows of 128 int32."""
    sums = b.gep(work, [b.add(I64(4 * SUMS_ROW * KEY_BLOCK), b.mul(column, I64(4)))])
    for v in range(vectors):
        at = b.gep(sums, [I64(WIDTH * v)])
        call(b, "llvm.x86.tilestored64", VOID, I8(ALL_SUMS[v]), at, I64(4 * KEY_BLOCK))


def _both(b, work, row: int, column):
    """A vector of row `row`'s sums: 128 * its high plane + its low one."""
    ints = vector(I32, LANES)
    high, low = (
        load(b, work, b.add(I64((SUMS_ROW + 2 * row + n) * KEY_BLOCK), column), ints, 4)
        for n in range(2)
    )
    return b.add(b.shl(high, constant(ints, LOW_BITS)), low)


@functools.cache
def matrix_scores(tile: Tile, rows: int):
    """Intrinsic f(q, words, k, scales, n, work): `tiles.score_tile` of the first n keys of a block.

    In whole panels; k is the address of the first of them; `words` is a multiple of 16. All
    products come first: reading sums waits for the last of theirs.
    """
    floats = vector(F32, LANES)
    ints = vector(I32, LANES)

    @intrinsic
    def scores(typingctx, q, words, k, scales, n, work):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            target.guard("amx_int8", context.codegen())
            pq, pk, pck, pw = (pointer(b, a[i]) for i in (0, 2, 3, 5))
            stride = b.mul(a[1], I64(4))
            with cgutils.for_range_slice(b, I64(0), a[4], I64(PANEL), I64) as (first, _):
                panel = b.gep(pk, [b.mul(first, stride)])
                _clear(b)
                with cgutils.for_range(b, b.ashr(a[1], I64(4))) as step:
                    _load(b, LEFT[0], b.gep(pq, [b.mul(step.index, I64(WIDTH))]), stride)
                    many = b.gep(panel, [b.mul(step.index, I64(16 * STEP))])
                    _multiply(b, "tdpbsud", LEFT[0], many, I64(STEP), 4)
                _leave(b, pw, 4, first)
            with cgutils.for_range_slice(b, I64(0), a[4], I64(LANES), I64) as (at, _):
                key_scale = load(b, pck, at, floats, 4)
                for m in range(rows):
                    start = splat(b, load(b, pw, state(rows, START + m), I32, 4), ints)
                    row_scale = splat(b, load(b, pw, state(rows, CQ + m), F32, 4), floats)
                    x = b.sitofp(b.add(_both(b, pw, m, at), start), floats)
                    t = rounded_scores(b, tile, x, key_scale, row_scale)
                    write(b, t, pw, b.add(at, I64(m * KEY_BLOCK)), 4)
            return context.get_dummy_value()

        return sig, codegen

    return scores


@functools.cache
def matrix_values(tile: Tile, rows: int, vectors: int):
    """Intrinsic f(work, v, step, o, column, columns): `tiles.value_tile` of all 128 keys.

    For 16 * `vectors` columns from `column` on, `vectors` up to 4, or 8: two chunks of 64.
    """
    floats = vector(F32, LANES)

    @intrinsic
    def values(typingctx, work, v, step, o, column, columns):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            target.guard("amx_int8", context.codegen())
            pw, pv, po = (pointer(b, a[i]) for i in (0, 1, 3))
            for n, left in enumerate(LEFT):
                _load(b, left, b.gep(pw, [I64(WIDTH * n)]), I64(LOW_PLANE))
            for first in range(0, vectors, 4):
                width = min(4, vectors - first)
                _clear(b)
                for n, left in enumerate(LEFT):
                    many = b.gep(pv, [b.mul(a[2], I64(16 * n))])
                    many = b.gep(many, [I64(first * LANES * KEY_BLOCK)])
                    _multiply(b, "tdpbusd", left, many, a[2], width)
                _leave(b, pw, width, I64(LANES * first))
            for m in range(rows):
                scale = splat(b, load(b, pw, state(rows, SCALE + m), F32, 4), floats)
                for n in range(vectors):
                    at = b.add(b.add(a[4], b.mul(a[5], I64(m))), I64(LANES * n))
                    x = b.fmul(b.sitofp(_both(b, pw, m, I64(LANES * n)), floats), scale)
                    write(b, b.fadd(load(b, po, at, floats, 4), x), po, at, 4)
            return context.get_dummy_value()

        return sig, codegen

    return values
