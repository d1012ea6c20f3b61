"""Soft cap and ALiBi of a row of integer scores that attends to a whole key block, in one pass.

The operations are those of `changes.change_floats`, which other rows take, with the same bits.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import inlined
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import f32
from ...tiling import KEY_BLOCK
from ..int8.score_changes import softcap
from ..isa.vectors import F32, I32, I64, constant, load, pointer, splat, store, vector
from .register_tiles import limited
from .tiles import Tile


@functools.cache
def make_change_row(tile: Tile):
    """change_row(work, r, row, first): int32 scores of row r, rounded again.

    work : address of the rows of a tile, 128 int32 Q8.8 each
    row : its `changes.RowOptions`
    first : the token of the first score; the others are those behind it
    """
    both, capped, sloped = (
        _one_pass(tile, *options) for options in ((True, True), (True, False), (False, True))
    )

    @inlined
    def change_row(work, r, row, first):
        cap, slope, away = f32(row.cap * fx.CAP_UNIT), row.slope, row.position - first
        if row.cap == f32(0):
            sloped(work, r, cap, row.inverse, row.shift, slope, away)
        elif slope == f32(0):
            capped(work, r, cap, row.inverse, row.shift, slope, away)
        else:
            both(work, r, cap, row.inverse, row.shift, slope, away)

    return change_row


@functools.cache
def _one_pass(tile: Tile, has_cap: bool, has_slope: bool):
    """Intrinsic f(work, r, cap, inverse, shift, slope, away) on 128 scores.

    cap : times `fixedpoint.CAP_UNIT`;  away : how far the row's token is behind the first score's
    """
    lanes = tile.lanes
    floats, ints = vector(F32, lanes), vector(I32, lanes)

    @intrinsic
    def change(typingctx, work, r, cap, inverse, shift, slope, away):
        def codegen(context, b, sig, a):
            p, first = pointer(b, a[0]), b.mul(a[1], I64(KEY_BLOCK))
            cap, inverse, shift, slope = (splat(b, x, floats) for x in a[2:6])
            behind = splat(b, b.trunc(a[6], I32), ints)
            for n in range(0, KEY_BLOCK, lanes):
                at = b.add(first, I64(n))
                x = b.sitofp(load(b, p, at, ints, 4), floats)
                if has_cap:
                    x = b.fadd(b.fmul(x, inverse), shift)
                    x = softcap(b, tile.vectors, [x], cap)[0]
                if has_slope:
                    keys = ir.Constant(ints, list(range(n, n + lanes)))
                    far = b.sub(behind, keys)
                    near = b.sub(constant(ints, 0), far)
                    far = b.select(b.icmp_signed(">", far, near), far, near)
                    x = b.fsub(x, b.fmul(slope, b.sitofp(far, floats)))
                store(b, limited(b, tile, x), p, at, 4)
            return context.get_dummy_value()

        numbers = [types.float32] * 4
        return types.void(types.intp, types.int64, *numbers, types.int64), codegen

    return change
