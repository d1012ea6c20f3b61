"""Scores that a function changes, as int16: a few rows at a time, in one pass through L1.

The products of some rows become float32 scores, the tile function changes these where they lie,
and they are rounded to int16 Q8.8. The whole block of rows would not stay in L1.

    int32 sums -> float32 scores -> score_mod, mask_mod -> int16

The lowest int16 is kept for -inf, what a function hides: a row of it alone sees nothing, where a
row of very low scores has to be done again in float32 (`leave_int16` in `flash_int8`). So has one
with a NaN, which becomes the highest.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...jit.compiler import bare
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, padded
from ..isa.score_calls import batch_of, call_tile, must_mask
from ..isa.vectors import F32, data, load, store
from ..semantics import HIDDEN
from .blocks import score_block
from .rows import hide_edges, hide_first
from .softmax import HALF
from .softmax_vectors import over_keys

F = np.float32
LN2_Q8 = F(math.log(2) / 256)  # from Q8.8 units to natural ones
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
        call_tile(
            called.address, called.frame, scores, 0, KEY_BLOCK, rows, block.real, called.b,
            called.h, called.row, block.first, LN2_Q8, fx.LOG2E_Q8,
        )  # fmt: skip


@functools.cache
def round_row(name: str, keys: int):
    """Intrinsic f(scores, at, x, x_at): `keys` float32 scores of a row to int16.

    -inf alone becomes -32768; NaN, like what is too large, 32767.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def run(typingctx, scores, at, x, x_at):
        def codegen(context, b, sig, a):
            target.guard(name, context.codegen())
            ps, px = (data(context, b, sig.args[n], a[n]) for n in (0, 2))
            floats = isa.vector(F32)

            def number(value):
                return isa.fill(b, floats, float(value))

            def limited(y):
                y = isa.choose(b, "<", y, number(32767), y, number(32767))
                low = isa.choose(b, ">", y, number(-32767), y, number(-32767))
                return isa.choose(b, "==", y, number(-np.inf), y, low)

            def body(offsets, state):
                for offset in offsets:
                    first = b.add(a[1], offset)
                    pair = (
                        load(b, ps, b.add(first, isa.elements(b, v)), floats, 4) for v in range(2)
                    )
                    y = isa.to_int16_in_order(b, *map(limited, pair))
                    store(b, y, px, b.add(a[3], offset), 2)
                return state

            over_keys(b, isa, keys, [], body)
            return context.get_dummy_value()

        return types.void(scores, at, x, x_at), codegen

    return run


@functools.cache
def function_block(name: str):
    """f(tile, kv, block, called, scores, x): int16 scores x of a block, after the function.

    `scores` is float32 scratch.
    """
    part = padded(ROWS, VECTOR_ISAS[name].rows[0])
    float_scores = score_block(name, False, True)
    half, whole = round_row(name, HALF), round_row(name, KEY_BLOCK)

    @bare
    def round_rows(scores, rows, columns, x, first):
        for i in range(rows):
            if columns == HALF:
                half(scores, i * KEY_BLOCK, x, (first + i) * KEY_BLOCK)
            else:
                whole(scores, i * KEY_BLOCK, x, (first + i) * KEY_BLOCK)

    @bare
    def run(tile, kv, block, called, scores, x):
        stride, flat = tile.q.shape[1], scores.reshape(scores.size)
        for i in range(0, tile.real, part):
            stop, seen = min(i + part, tile.rows), min(i + part, tile.real)
            if tile.hi[seen - 1] <= block.first or tile.lo[i] >= block.first + block.columns:
                x[i:seen, : block.columns] = HIDDEN
                continue
            float_scores(
                tile.q[i:stop], stride, kv.keys, block.first, kv.start, kv.scale,
                tile.scale[i:stop], stop - i, block.columns, scores,
            )  # fmt: skip
            here = Called(called.address, called.frame, called.b, called.h, called.row + i)
            call_rows(here, flat, seen - i, block)
            round_rows(flat, seen - i, block.columns, x, i)
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
