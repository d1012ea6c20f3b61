"""Scores that a function changes, as int16: a few rows at a time, in one pass through L1.

The products of some rows become float32 scores, the tile function changes these where they lie,
and they are rounded to int16 Q8.8. The whole block of rows would not stay in L1.

    int32 sums -> float32 scores -> score_mod, mask_mod -> int16

The lowest int16 is kept for -inf, what a function hides: a row of it alone sees nothing, where a
row of very low scores has to be done again in float32 (`wide_scores.leave_int16`). So has one
with a NaN, which becomes the highest.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, padded
from ..isa.operands import KeyRange, Packed, Queries, Rows
from ..isa.score_calls import Corner, Function, batch_of, call_rounded, call_tile, must_mask
from ..semantics import HIDDEN, UNSEEN
from .blocks import score_block
from .rows import MOST_OCTAVES, hide_edges, hide_first

I = np.int32
ROWS = 24  # float32 scores of so many rows and a block of keys, 12 KB, stay in L1


class Called(NamedTuple):
    """The function that changes a block's scores (address 0 for none), and where these belong.

    Batch entry and head are numbered as the function sees them; `row` is the first row.
    """

    address: int
    frame: int
    b: int
    h: int
    row: int


@bare
def function_for(functions, b, h, row, last, block):
    """The function for a block of keys and the rows `row` to `last`."""
    address, frame = functions.unmasked, functions.unmasked_frame
    stop = block.first + block.real
    if functions.masked != 0 and must_mask(functions, b, h, row, last, block.first, stop):
        address, frame = functions.masked, functions.masked_frame
    return Called(address, frame, batch_of(functions, b), h, row)


@bare
def call_rows(called, scores, rows, block):
    """Change the first `rows` rows of flat float32 scores in Q8.8 units."""
    if called.address != 0:
        function, x = Function(called.address, called.frame), Rows(scores, 0, KEY_BLOCK)
        corner = Corner(called.b, called.h, called.row, block.first)
        call_tile(function, x, rows, block.real, corner, fx.LN2_Q8, fx.LOG2E_Q8)


@bare
def round_rows(called, scores, rows, block, x, base, i):
    """Changed scores less `base` as int16, in flat x from row i on; these float32 stay as they are."""
    function, source = Function(called.address, called.frame), Rows(scores, 0, KEY_BLOCK)
    to, bases = Packed(x, i * KEY_BLOCK), Packed(base, i)
    corner = Corner(called.b, called.h, called.row, block.first)
    call_rounded(function, source, to, bases, rows, block.real, corner, fx.LN2_Q8, fx.LOG2E_Q8)


@bare
def follow_base(octave, rows, base):
    """The base of the next block's scores: each row's octave in this one."""
    for i in range(rows):
        if octave[i] != UNSEEN:
            base[i] = max(min(octave[i], I(MOST_OCTAVES)), I(-MOST_OCTAVES)) << I(8)


@functools.cache
def function_block(name: str):
    """f(tile, kv, block, called, scores, x, base): int16 scores x of a block, after the function,
    less each row's `base`.

    `scores` is float32 scratch.
    """
    part = padded(ROWS, VECTOR_ISAS[name].rows[0])
    float_scores = score_block(name, False, True)

    @bare
    def run(tile, kv, block, called, scores, x, base):
        stride, flat = tile.q.shape[1], scores.reshape(scores.size)
        narrow = x.reshape(x.size)
        for i in range(0, tile.real, part):
            stop, seen = min(i + part, tile.rows), min(i + part, tile.real)
            if tile.hi[seen - 1] <= block.first or tile.lo[i] >= block.first + block.columns:
                x[i:seen, : block.columns] = HIDDEN
                continue
            queries = Queries(tile.q[i:stop], stride, tile.scale[i:stop], stop - i)
            keys = KeyRange(kv.keys, kv.start, kv.scale, block.first, block.columns)
            float_scores(queries, keys, scores)
            here = Called(called.address, called.frame, called.b, called.h, called.row + i)
            round_rows(here, flat, seen - i, block, narrow, base, i)
        if not block.inside:
            hide_edges(x, tile, block)
        elif block.first < block.begin:
            hide_first(x, tile, block)

    return run


@bare
def drop_rows(tile, octave, lowest, unseen):
    """Rows of which a function hides the whole block see nothing of it; whether there are any."""
    found = False
    for i in range(tile.real):
        if tile.live[i] and octave[i] == lowest:
            tile.live[i], octave[i], found = 0, unseen, True
    return found
