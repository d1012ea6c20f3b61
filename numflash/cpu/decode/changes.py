"""What options make of decode's scores between the products and the softmax.

Soft cap, ALiBi, the mask of the new tokens.

Scores are in octaves, INT8 scores in units of 1/256 octave (Q8.8); every operation rounds once, so
INT8 has the bits of `reference.integer_decode` here too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare
from ...numerics import fixedpoint as fx
from .append import slot_of
from .slots import coverage

F = np.float32
softcap = bare(fx.softcap)


class Options(NamedTuple):
    """The options of a call but for its functions.

    cap : (2,) float32, the cap in the unit of the scores and its reciprocal; 0 for none
    shift : (B, Hkv, rows) float32, added to the scores in units of the cap; in the unit of the
        scores, before the functions, where there are some
    slopes : (Hkv, group) float32 in the unit of the scores; (0, 0) for none
    mask : (B, L, L) uint8, 0 where a new token does not attend to a new token; (0, 0, 0) for none
    """

    cap: np.ndarray
    shift: np.ndarray
    slopes: np.ndarray
    mask: np.ndarray


class ChangedScratch(NamedTuple):
    """`task_data.Scratch` and `Options`, as the kernel takes them.

    function, frame : addresses of a tile function and its frame, see `isa.score_calls`; 0 for none
    """

    q: np.ndarray
    work: np.ndarray
    sums: np.ndarray
    line: np.ndarray
    edges: np.ndarray
    spoiled: np.ndarray
    o: np.ndarray
    m: np.ndarray
    l: np.ndarray
    counter: np.ndarray
    cap: np.ndarray
    shift: np.ndarray
    slopes: np.ndarray
    mask: np.ndarray
    function: int
    frame: int


@bare
def token_in(slot, length, sinks, ring):
    """The token in a slot of a sequence of `length` tokens; the inverse of `append.slot_of`."""
    if slot < sinks or length <= sinks + ring:
        return slot
    return length - 1 - (length - 1 - slot) % ring


class Rows(NamedTuple):
    """Where the rows of a tile belong: sequence, KV head, first row, the sequence's sizes."""

    b: int
    g: int
    row: int
    queries: int
    length: int
    sinks: int
    ring: int


@bare
def position_of(at, r):
    """The position of the token of row r of a tile; negative before the sequence's first."""
    if at.queries == 1:  # divisions take as long as eight vectors of scores
        return at.length - 1
    return at.length - at.queries + (at.row + r) % at.queries


@bare
def head_in_group(at, r):
    """The query head of row r of a tile, counted from the first one of its KV head."""
    return at.row + r if at.queries == 1 else (at.row + r) // at.queries


class RowOptions(NamedTuple):
    """One row's options.

    The position of its token, the cap and its reciprocal, what is added before the cap, ALiBi's
    slope.
    """

    position: int
    cap: float
    inverse: float
    shift: float
    slope: float


@bare
def change_floats(x, first, at, row):
    """Soft cap and ALiBi of one row's float scores x of slots from `first` on; -inf stays."""
    wrapped = at.length > at.sinks + at.ring
    if row.cap > F(0):
        for j in range(x.size):
            capped = softcap(F(F(x[j] * row.inverse) + row.shift), row.cap)
            x[j] = x[j] if x[j] == F(-np.inf) else capped
    if row.slope != F(0) and wrapped:
        for j in range(x.size):
            away = abs(row.position - token_in(first + j, at.length, at.sinks, at.ring))
            x[j] = F(x[j] - F(row.slope * F(away)))
    elif row.slope != F(0):  # without divisions, in vectors
        for j in range(x.size):
            x[j] = F(x[j] - F(row.slope * F(abs(row.position - first - j))))


@bare
def hide_new(x, value, first, mask, start, sinks, ring):
    """x[j] = value for the slots from `first` on that hold new tokens which the row does not attend
    to.

    mask : (L,) of the new tokens, the first of which is token `start`
    """
    if ring > start + mask.size and first + x.size <= start:
        return
    for n in range(mask.size):
        if mask[n] == 0 and start + n >= 0:
            slot = slot_of(start + n, sinks, ring) - first
            if 0 <= slot < x.size:
                x[slot] = value


@bare
def is_masked(slot, mask, start, length, sinks, ring):
    """Whether a slot holds a new token that the row does not attend to."""
    new = token_in(slot, length, sinks, ring) - start
    return new >= 0 and mask[new] == 0


@bare
def row_options(s, at, r):
    """The options of row r of a tile, from a `ChangedScratch`."""
    row = at.row + r
    slope = s.slopes[at.g, head_in_group(at, r)] if s.slopes.size > 0 else F(0)
    shift = s.shift[at.b, at.g, row] if s.function == 0 else F(0)
    return RowOptions(position_of(at, r), s.cap[0], s.cap[1], shift, slope)


@bare
def hide_masked(x, value, first, s, at, r):
    """x[j] = value for the slots from `first` on that the mask of the new tokens hides from row r."""
    if s.mask.size > 0:
        mask = s.mask[at.b, (at.row + r) % at.queries]
        hide_new(x, value, first, mask, at.length - at.queries, at.sinks, at.ring)


@bare
def attends_to_some(edges, slots, s, at, r):
    """Whether row r attends to one of the first `slots` slots, except for tokens that the mask hides."""
    start, mask = at.length - at.queries, s.mask[at.b, (at.row + r) % at.queries]
    for j in range(slots):
        hidden = is_masked(j, mask, start, at.length, at.sinks, at.ring)
        if coverage(edges, j, 1)[0] and not hidden:
            return True
    return False


@bare
def attends_to_bad(edges, first, scales, s, at, r):
    """`sees_bad`, except for tokens that the mask hides."""
    start = at.length - at.queries
    for j in range(scales.size):
        if scales[j] != scales[j] and coverage(edges, first + j, 1)[0]:
            if s.mask.size == 0:
                return True
            mask = s.mask[at.b, (at.row + r) % at.queries]
            if not is_masked(first + j, mask, start, at.length, at.sinks, at.ring):
                return True
    return False
