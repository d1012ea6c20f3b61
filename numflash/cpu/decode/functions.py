"""Score and mask functions in decode: called on the scores of one row and one key block.

Scores are float32 here, in octaves for float storage and in 1/256 octave (Q8.8) for INT8. Functions
see positions: a ring's slots are taken in runs of consecutive tokens.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare
from ...jit.memory import array_at
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import LN2_Q8, LOG2E_Q8, T_LIMIT
from ...numerics.quantize_kernels import INFINITE, MAGNITUDE
from ...tiling import KEY_BLOCK
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, call_tile
from ..isa.vectors import (
    F32,
    I32,
    I64,
    address,
    call,
    constant,
    load,
    pointer,
    splat,
    store,
    vector,
)
from . import tiles
from .append import slot_of
from .changes import change_floats, hide_masked, position_of, row_options, token_in
from .slots import hide
from .tiles import Tile

F = np.float32
I = np.int32
HIDDEN = F(-np.inf)
LOG2E = F(fx.LOG2E)
LN2 = F(fx.LN2)


@bare(forceinline=True)
def head_of(at, all_rows, r):
    """The query head of row r of a tile."""
    row = at.g * all_rows + at.row + r
    return row if at.queries == 1 else row // at.queries


@bare(forceinline=True)
def _call(scores, r, n, first, s, at, scale, unit):
    """Call the functions on scores[r, :n] of slots from `first` on, run by run of tokens."""
    head = head_of(at, s.shift.shape[2], r)
    position = position_of(at, r)
    wrapped = at.length > at.sinks + at.ring
    oldest = 0  # the slot of a ring's oldest token
    if wrapped:
        oldest = slot_of(at.length - 1, at.sinks, at.ring) + 1
    flat = scores.reshape(scores.size)
    slot, stop = first, first + n
    while slot < stop:
        end = stop
        if wrapped:
            end = min(stop, at.sinks if slot < at.sinks else oldest if slot < oldest else stop)
        token = token_in(slot, at.length, at.sinks, at.ring)
        x = Rows(flat, r * KEY_BLOCK + slot - first, KEY_BLOCK)
        corner = Corner(at.b, head, position, token)
        call_tile(Function(s.function, s.frame), x, 1, end - slot, corner, scale, unit)
        slot = end


@bare
def _largest(x):
    """Bits of the largest magnitude but for -inf, which hides; NaN is above all."""
    bits, top = x.view(np.int32), I(0)
    for j in range(x.size):
        top = max(top, I(0) if x[j] == HIDDEN else I(bits[j] & MAGNITUDE))
    return top


@bare(forceinline=True)
def _change(scores, r, n, first, k_scale, some_bad, query, inside, scale, unit):
    """Scores of row r as functions and masks leave them, -inf where hidden.

    scores (rows, 128) float32; k_scale (n,) is NaN where a token was not finite; inside : the row
    attends to every slot.
    """
    s, at, x = query.options, query.rows, scores[r, :n]
    if position_of(at, r) < 0:
        x[:] = HIDDEN
        return
    if some_bad:
        for j in range(n):
            x[j] = F(np.nan) if k_scale[j] != k_scale[j] else x[j]
    _call(scores, r, n, first, s, at, scale, unit)
    if not inside:
        hide(query.edges[r], first, n, x, HIDDEN)
    hide_masked(x, HIDDEN, first, s, at, r)


@bare
def _change_further(x, first, query, r):
    """Soft cap and ALiBi of scores that functions have changed; NaN is 0."""
    for j in range(x.size):
        x[j] = F(0) if x[j] != x[j] else x[j]
    change_floats(x, first, query.rows, row_options(query.options, query.rows, r))


@bare(forceinline=True)
def apply_functions(scores, r, n, first, k_scale, some_bad, query, inside, scale, unit):
    """`_change`, and the options after it.

    Returns the bits of the largest magnitude; above INFINITE the row attends to a token that was
    not finite or the function gave NaN, which is 0 then.
    """
    _change(scores, r, n, first, k_scale, some_bad, query, inside, scale, unit)
    x = scores[r, :n]
    top = _largest(x)
    s = query.options
    if top > INFINITE or s.cap[0] > F(0) or s.slopes.size > 0:
        _change_further(x, first, query, r)
    return top


@functools.cache
def row_conversions(tile: Tile):
    """Intrinsics on row r of the scratch memory at address `work`, 128 scores.

    to_floats(work, r, shift): int32 to float32, plus a float32.
    to_integers(work, r): float32 to the next int32, -inf to HIDDEN; whether there is NaN, which
        becomes any number.
    """
    lanes = tile.lanes
    floats, ints = vector(F32, lanes), vector(I32, lanes)

    def places(b, r):
        first = b.mul(r, I64(KEY_BLOCK))
        return [b.add(first, I64(n)) for n in range(0, KEY_BLOCK, lanes)]

    @intrinsic
    def to_floats(typingctx, work, r, shift):
        def codegen(context, b, sig, a):
            p, added = pointer(b, a[0]), splat(b, a[2], floats)
            for at in places(b, a[1]):
                x = b.fadd(b.sitofp(load(b, p, at, ints, 4), floats), added)
                store(b, x, p, at, 4)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64, types.float32), codegen

    @intrinsic
    def to_integers(typingctx, work, r):
        def codegen(context, b, sig, a):
            p = pointer(b, a[0])
            top, bottom = (constant(floats, x) for x in (float(T_LIMIT), -float(T_LIMIT)))
            bad = ir.Constant(vector(ir.IntType(1), lanes), None)
            for at in places(b, a[1]):
                x = load(b, p, at, floats, 4)
                bad = b.or_(bad, b.fcmp_unordered("uno", x, x))
                near = b.select(b.fcmp_ordered("<", x, top), x, top)
                near = b.select(b.fcmp_ordered(">", near, bottom), near, bottom)
                hidden = b.fcmp_ordered("==", x, constant(floats, -math.inf))
                n = b.select(hidden, constant(ints, tiles.HIDDEN), tile.to_int(b, near))
                store(b, n, p, at, 4)
            return call(b, f"llvm.vector.reduce.or.v{lanes}i1", ir.IntType(1), bad)

        return types.boolean(types.intp, types.int64), codegen

    return to_floats, to_integers


@functools.cache
def make_apply_to_integers(tile: Tile):
    """apply_to_integers(r, n, first, k_scale, some_bad, query, inside): int32 Q8.8 scores as
    functions and all else leave them, rounded again; whether the row has met NaN.
    """
    to_floats, to_integers = row_conversions(tile)

    @bare(forceinline=True)
    def apply_to_integers(r, n, first, k_scale, some_bad, query, inside):
        s, at, place = query.options, query.rows, address(query.work)
        scores = query.work.view(np.float32)
        to_floats(place, r, s.shift[at.b, at.g, at.row + r])
        _change(scores, r, n, first, k_scale, some_bad, query, inside, LN2_Q8, LOG2E_Q8)
        scores[r, n:] = HIDDEN
        if s.cap[0] > F(0) or s.slopes.size > 0:
            bad = _largest(scores[r]) > INFINITE
            _change_further(scores[r, :n], first, query, r)
            return to_integers(place, r) or bad
        return to_integers(place, r)

    return apply_to_integers


@functools.cache
def make_apply_to_row(tile: Tile):
    """apply_to_row(work, r, scales, some_bad, function, corner, shift): `apply_to_integers` for a
    row that attends to all 128 tokens of a block, one after the other, without other options.

    work, scales : addresses, of the scratch memory and of the keys' scales
    """
    to_floats, to_integers = row_conversions(tile)

    @bare(forceinline=True)
    def apply_to_row(work, r, scales, some_bad, function, corner, shift):
        to_floats(work, r, shift)
        x = array_at(work + r * (KEY_BLOCK * 4), (KEY_BLOCK,), np.float32)
        if some_bad:
            k_scale = array_at(scales, (KEY_BLOCK,), np.float32)
            for j in range(KEY_BLOCK):
                x[j] = F(np.nan) if k_scale[j] != k_scale[j] else x[j]
        call_tile(function, Rows(x, 0, KEY_BLOCK), 1, KEY_BLOCK, corner, LN2_Q8, LOG2E_Q8)
        return to_integers(work, r)

    return apply_to_row
