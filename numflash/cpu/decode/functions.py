"""Score and mask functions in decode: called on the scores of a tile's rows and one key block.

Scores are in octaves for float storage, which has them in float32, and int32 in 1/256 octave (Q8.8)
for INT8 and INT4. Functions see positions: a ring's slots are taken in runs of consecutive tokens.
The rows of one new token are query heads, and one call serves all of them; those of several tokens
have a call each.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare, inlined
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import T_LIMIT
from ...numerics.quantize_kernels import INFINITE, MAGNITUDE
from ...tiling import KEY_BLOCK
from ..isa.score_calls import HIDDEN, Corner, Function, call_cached
from ..isa.vectors import (
    F32,
    I32,
    I64,
    address,
    constant,
    load,
    pointer,
    store,
    vector,
)
from .append import slot_of
from .changes import change_floats, head_in_group, hide_masked, position_of, row_options, token_in
from .slots import hide
from .tiles import Tile

F = np.float32
I = np.int32
MASKED = F(-np.inf)  # a float score that is hidden
LOG2E = F(fx.LOG2E)
LN2 = F(fx.LN2)


@inlined
def call_functions(work, place, n, first, query, rounded, scale, unit):
    """Call the functions on the scores of all rows and n slots from `first` on, run by run of tokens.

    work, place : addresses of the rows of a tile and of the keys' scales
    Rows before the sequence's first token are left out. Returns, in bits, the rows with NaN and those
    with what float32 does not hold, of slots that a row does not attend to, too: `emit_cached`.
    """
    s, at = query.options, query.rows
    function, shift = Function(s.function, s.frame), s.shift[at.b, at.g]
    if at.queries == 1:
        first_head, together = at.g * shift.size, query.real
    else:
        first_head, together = at.g * (shift.size // at.queries), 1
    wrapped = at.length > at.sinks + at.ring
    oldest = 0  # the slot of a ring's oldest token
    if wrapped:
        oldest = slot_of(at.length - 1, at.sinks, at.ring) + 1
    found, stop = 0, first + n
    for r in range(0, query.real, together):
        position, head = position_of(at, r), first_head + head_in_group(at, r)
        slot = first if position >= 0 else stop
        while slot < stop:
            end = stop
            if wrapped:
                end = min(stop, at.sinks if slot < at.sinks else oldest if slot < oldest else stop)
            token = token_in(slot, at.length, at.sinks, at.ring)
            corner = Corner(at.b, head, position, token)
            x, scales = work + 4 * (r * KEY_BLOCK + slot - first), place + 4 * (slot - first)
            moved = address(shift) + 4 * (at.row + r)
            of_run = call_cached(
                function, x, moved, scales, together, end - slot, rounded, corner, scale, unit
            )
            found |= of_run << r
            slot = end
    return found


@inlined
def suffice(blocks, query):
    """Whether the functions are all that changes or hides scores of a block."""
    s, at = query.options, query.rows
    in_turn = at.length <= at.sinks + at.ring
    return blocks.inside and in_turn and s.mask.size == 0 and not (s.cap[0] > F(0) or s.slopes.size)


@bare
def _largest(x):
    """Bits of the largest magnitude but for -inf, which hides; NaN is above all."""
    bits, top = x.view(np.int32), I(0)
    for j in range(x.size):
        top = max(top, I(0) if x[j] == MASKED else I(bits[j] & MAGNITUDE))
    return top


@bare
def _hide_rest(x, first, query, r, inside):
    """-inf for the slots from `first` on that row r does not attend to."""
    s, at = query.options, query.rows
    if position_of(at, r) < 0:
        x[:] = MASKED
        return
    if not inside:
        hide(query.edges[r], first, x.size, x, MASKED)
    hide_masked(x, MASKED, first, s, at, r)


@bare
def no_nan(x):
    """NaN becomes 0."""
    for j in range(x.size):
        x[j] = F(0) if x[j] != x[j] else x[j]


@inlined
def after_functions(x, first, query, r, inside):
    """Hide what row r does not attend to, and the options after the functions, on float scores x.

    Returns the bits of the largest magnitude; above INFINITE the row attends to a token that was
    not finite or the function gave NaN, which is 0 then.
    """
    _hide_rest(x, first, query, r, inside)
    top, s = _largest(x), query.options
    if top > INFINITE:
        no_nan(x)
    if s.cap[0] > F(0) or s.slopes.size > 0:
        change_floats(x, first, query.rows, row_options(s, query.rows, r))
    return top


@functools.cache
def row_conversions(tile: Tile):
    """Intrinsics on row r of the scratch memory at address `work`, 128 scores.

    to_floats(work, r): int32 to float32.
    to_integers(work, r): float32 to the next int32, -inf to HIDDEN, NaN to any number.
    """
    lanes = tile.lanes
    floats, ints = vector(F32, lanes), vector(I32, lanes)

    def places(b, r):
        first = b.mul(r, I64(KEY_BLOCK))
        return [b.add(first, I64(n)) for n in range(0, KEY_BLOCK, lanes)]

    @intrinsic
    def to_floats(typingctx, work, r):
        def codegen(context, b, sig, a):
            p = pointer(b, a[0])
            for at in places(b, a[1]):
                store(b, b.sitofp(load(b, p, at, ints, 4), floats), p, at, 4)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64), codegen

    @intrinsic
    def to_integers(typingctx, work, r):
        def codegen(context, b, sig, a):
            p = pointer(b, a[0])
            top, bottom = (constant(floats, x) for x in (float(T_LIMIT), -float(T_LIMIT)))
            for at in places(b, a[1]):
                x = load(b, p, at, floats, 4)
                near = b.select(b.fcmp_ordered("<", x, top), x, top)
                near = b.select(b.fcmp_ordered(">", near, bottom), near, bottom)
                hidden = b.fcmp_ordered("==", x, constant(floats, -math.inf))
                n = b.select(hidden, constant(ints, HIDDEN), tile.to_int(b, near))
                store(b, n, p, at, 4)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64), codegen

    return to_floats, to_integers
