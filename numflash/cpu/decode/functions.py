"""Score and mask functions in decode: called on the scores of one row and one key block.

Scores are float32 here, in octaves for float storage and in 1/256 octave (Q8.8) for INT8. Functions
see positions: a ring's slots are taken in runs of consecutive tokens.
"""

from __future__ import annotations

import numpy as np

from ...jit.compiler import bare
from ...numerics.fixedpoint import LN2_Q8, LOG2E_Q8, T_LIMIT
from ...tiling import KEY_BLOCK
from ..isa.score_calls import call_tile
from .append import place
from .changes import change_floats, hide_masked, position_of, row_options, token_in
from .slots import hide

F = np.float32
I = np.int32
MAGNITUDE = I(0x7FFFFFFF)
INFINITE = I(0x7F800000)
HIDDEN = F(-np.inf)
LOG2E = F(LOG2E_Q8 / 256)
LN2 = F(np.log(2))


@bare
def _call(scores, r, n, first, s, at, scale, unit):
    """Call the functions on scores[r, :n] of slots from `first` on, run by run of tokens."""
    row = at.row + r
    head = at.g * s.shift.shape[2] + row
    if at.queries != 1:
        head //= at.queries
    position = position_of(at, r)
    wrapped = at.length > at.sinks + at.ring
    turn = 0  # the slot of a ring's oldest token
    if wrapped:
        turn = place(at.length - 1, at.sinks, at.ring) + 1
    flat = scores.reshape(scores.size)
    slot, stop = first, first + n
    while slot < stop:
        end = stop
        if wrapped:
            end = min(stop, at.sinks if slot < at.sinks else turn if slot < turn else stop)
        token = token_in(slot, at.length, at.sinks, at.ring)
        offset = r * KEY_BLOCK + slot - first
        call_tile(
            s.function, s.frame, flat, offset, KEY_BLOCK, 1, end - slot, at.b, head, position,
            token, scale, unit,
        )  # fmt: skip
        slot = end


@bare
def _largest(x):
    """Bits of the largest magnitude but for -inf, which hides; NaN is above all."""
    bits, top = x.view(np.int32), I(0)
    for j in range(x.size):
        top = max(top, I(0) if x[j] == HIDDEN else I(bits[j] & MAGNITUDE))
    return top


@bare
def apply_functions(scores, r, n, first, k_scale, some_bad, query, scale, unit):
    """Scores of row r as functions and masks leave them, -inf where hidden.

    scores (rows, 128) float32; k_scale (n,) is NaN where a token was not finite. Returns the bits
    of the largest magnitude; above INFINITE the row attends to such a token or the function gave
    NaN, which is 0 then.
    """
    s, at, edges, x = query.options, query.rows, query.edges[r], scores[r, :n]
    if position_of(at, r) < 0:
        x[:] = HIDDEN
        return I(0)
    if some_bad:
        for j in range(n):
            x[j] = F(np.nan) if k_scale[j] != k_scale[j] else x[j]
    _call(scores, r, n, first, s, at, scale, unit)
    hide(edges, first, n, x, HIDDEN)
    hide_masked(x, HIDDEN, first, s, at, r)
    top = _largest(x)
    if top > INFINITE:
        for j in range(n):
            x[j] = F(0) if x[j] != x[j] else x[j]
    if s.cap[0] > F(0) or s.slopes.size > 0:
        change_floats(x, first, at, row_options(s, at, r))
    return top


@bare
def apply_to_integers(work, r, n, first, k_scale, some_bad, query, hidden):
    """The same of int32 Q8.8 scores, rounded again: whether the row has met NaN."""
    s, at = query.options, query.rows
    scores, t = work.view(np.float32), work[r]
    x, shift = scores[r], s.shift[at.b, at.g, at.row + r]
    for j in range(n):
        x[j] = F(F(t[j]) + shift)
    top = apply_functions(scores, r, n, first, k_scale, some_bad, query, LN2_Q8, LOG2E_Q8)
    for j in range(n):
        y = x[j]
        t[j] = I(hidden) if y == HIDDEN else I(np.rint(min(max(y, -T_LIMIT), T_LIMIT)))
    return top > INFINITE
